"""From text to micro-batches: sources, tokenising, cleaning, the token store, layouts, the MindSpore dataset."""
