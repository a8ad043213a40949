"""Recipe, train step, loop and metrics."""
