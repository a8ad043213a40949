"""Which samples make up a step: pure NumPy, no MindSpore and no I/O."""
