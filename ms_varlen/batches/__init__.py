"""Micro-batches: samples laid out on one token axis, with their lengths."""
