"""How a run of several ranks stops: on request, or because msrun died.

SIGTERM and SIGINT ask the run to stop: `StopRequest` notes them, the ranks agree on the step before which they stop,
save, and exit. When msrun dies, the system sends its ranks a SIGTERM, and they do the same. The scheduler ignores these
signals and exits after the ranks, since they need it to save.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time

import psutil

logger = logging.getLogger("ms_varlen")

ROLE, SCHEDULER = "MS_ROLE", "MS_SCHED"
MSRUN_PID = "MS_VARLEN_MSRUN_PID"
"""Variable in which the launcher hands msrun's process id to the ranks; scripts/train.py reads it too."""
SAME_REQUEST_SECONDS = 3
"""Signals this soon after the first count as one request. `timeout`, batch systems and containers send one to every
process, the launcher sends another to each rank, and so does the system when msrun dies."""
ORPHAN_SECONDS = 60
"""A scheduler outlives its msrun by at most this long: the ranks need it until they have saved."""

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)


def started_by_msrun() -> bool:
    """Whether msrun started this process, as a rank or as the scheduler."""
    return ROLE in os.environ


class StopRequest:
    """Stop signals. The first asks for a clean stop; a second one means: stop now."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def note(self, number: int) -> bool:
        """Record a signal. Return whether it is a second request, which means: stop now."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        return time.monotonic() - self._since > SAME_REQUEST_SECONDS

    def listen(self, rank: int) -> None:
        """Note SIGTERM and SIGINT from now on; a second request interrupts the running code.

        The handlers stay until the process exits: a rank that has trained is saved, and its exit must not look like a
        failure. Without msrun nothing waits for this process, so the caller's handlers stay.
        """
        if not started_by_msrun():
            return

        def heard(number: int, _frame: object) -> None:
            first = not self.asked
            if self.note(number):
                raise KeyboardInterrupt
            if first:
                name = signal.Signals(number).name
                logger.warning("rank %d got %s: ranks stop before the next step, save and exit", rank, name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, heard)


def exit_with_msrun(scheduler: bool) -> threading.Event:
    """Make this process exit when its msrun has died; call it before the ranks meet.

    Args:
        scheduler: whether this process is the scheduler, which waits for the ranks first.
    Returns:
        an event to set when the ranks have met. Until then MindSpore holds signals back, so a thread watches msrun.
    """
    parent, joined = int(os.environ.get(MSRUN_PID, os.getppid())), threading.Event()
    if scheduler:
        # A signal that is sent to every process is meant for the ranks.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_exit_after_ranks, args=(parent,), daemon=True).start()
    else:
        ask_for_signal_of_parents_death(parent)
        threading.Thread(target=_exit_without_parent, args=(parent, joined), daemon=True).start()
    return joined


def ask_for_signal_of_parents_death(parent: int) -> None:
    """Have the system send this process a SIGTERM when its parent dies; exit at once if it is dead already.

    Args:
        parent: process id that the parent had.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have the system make this process the parent of its children's orphans, so that it learns how they exit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def _exit_without_parent(parent: int, joined: threading.Event) -> None:
    """Exit with the parent, until the ranks have met."""
    while os.getppid() == parent:
        if joined.wait(1):
            return
    os._exit(1)


def _exit_after_ranks(parent: int) -> None:
    """Exit once the parent is dead and the ranks that it had started have exited."""
    ranks: list[psutil.Process] = []
    while os.getppid() == parent:
        with contextlib.suppress(psutil.Error):
            ranks = [child for child in psutil.Process(parent).children() if child.pid != os.getpid()] or ranks
        time.sleep(1)
    end = time.monotonic() + ORPHAN_SECONDS
    while any(map(alive, ranks)) and time.monotonic() < end:
        time.sleep(1)
    os._exit(1)


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
