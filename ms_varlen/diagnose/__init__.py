"""Alignment between modes, and report pages."""
