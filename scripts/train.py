"""Train a recipe: ``python scripts/train.py recipes/quickstart.yaml train.steps=20``."""

import ctypes
import os
import signal
import sys


def follow_msrun() -> None:
    """End with the msrun that started this process, also when it dies while this one starts or is dead already."""
    parent = int(os.environ.get("MS_VARLEN_MSRUN_PID", os.getppid()))
    if sys.platform == "linux" and os.environ.get("MS_ROLE") == "MS_WORKER":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    # The system tells of a death that comes after the call alone.
    if "MS_ROLE" in os.environ and os.getppid() != parent:
        sys.exit(f"msrun (pid {parent}) is gone before this process began: it leaves")


if __name__ == "__main__":
    follow_msrun()  # before the imports, which take seconds

    from ms_varlen.cli.app import main

    status = main(["train", *sys.argv[1:]])
    if "MS_ROLE" in os.environ:
        # All is saved, and MindSpore takes seconds to leave: a signal must not make a failure of it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
