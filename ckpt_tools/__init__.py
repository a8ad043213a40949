"""Checkpoints: look into them, convert them between modes and frameworks, and prove that nothing changed."""
