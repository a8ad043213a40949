"""Train a recipe: ``python scripts/train.py recipes/quickstart.yaml train.steps=20``."""

import ctypes
import os
import signal
import sys


def follow_msrun() -> None:
    """Exit with the msrun that started this process, even if it dies before the imports are done."""
    parent = int(os.environ.get("MS_VARLEN_MSRUN_PID", os.getppid()))
    if sys.platform == "linux" and os.environ.get("MS_ROLE") == "MS_WORKER":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    # The system reports only a death after that call.
    if "MS_ROLE" in os.environ and os.getppid() != parent:
        sys.exit(f"msrun (pid {parent}) died before this process began: it exits")


if __name__ == "__main__":
    follow_msrun()  # before the imports, which take seconds

    from ms_varlen.cli.app import main

    status = main(["train", *sys.argv[1:]])
    if "MS_ROLE" in os.environ:
        # All is saved, but MindSpore takes seconds to exit: a signal must not turn that into a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
