"""The ranks of a run: how they join, compare what they hold, and exchange values."""
