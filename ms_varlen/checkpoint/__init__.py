"""Atomic checkpoints, kept apart by mode."""
