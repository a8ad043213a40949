"""Checkpoints of MindFormers: folders, names, model sections."""
