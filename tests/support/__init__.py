"""Helpers of the tests: the strict operator emulator, planted faults, the tiny recipe, checkpoints and runs."""
