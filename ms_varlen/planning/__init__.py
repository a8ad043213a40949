"""Which samples make up a step. Pure NumPy, no I/O."""
