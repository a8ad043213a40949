"""Measure contenders against each other, step by step, in one run."""
