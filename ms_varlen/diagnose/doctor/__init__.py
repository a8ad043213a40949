"""Check environment, recipe, data, plan and checkpoints of a run, and explain each fault."""
