"""The bridge to MindFormers: our data in its Trainer, its models on a CPU, its recipes."""
