"""Train a recipe: ``python scripts/train.py recipes/quickstart.yaml train.steps=20``."""

import sys

from ms_varlen.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
