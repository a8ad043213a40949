"""Sizes that graphs accept: declarations, compile watch, compile cache."""
