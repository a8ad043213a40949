"""What the graph is told about sizes: declarations, compile watch, compile cache."""
