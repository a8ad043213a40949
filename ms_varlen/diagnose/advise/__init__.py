"""What to choose for a corpus and a model, with the numbers behind it."""
