"""Operators on flat tokens, each with a plain reference body."""
