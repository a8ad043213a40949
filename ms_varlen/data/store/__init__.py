"""The token store: a corpus tokenised once, memory-mapped by every run."""
