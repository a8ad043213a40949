"""What tests share: the strict operator emulator, planted faults, made-up recipes, checkpoints and runs."""
