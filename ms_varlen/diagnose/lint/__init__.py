"""Find contradictions in the batches of any loader."""
