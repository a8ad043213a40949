"""The ranks of a run: processes that msrun started, which train one step together.

msrun starts the same script once more as a scheduler. It serves the ranks until the last has left, and reads no data.

SIGTERM and SIGINT ask a run of several ranks to stop: `StopRequest` notes them, the ranks agree on the step before
which they stop, save, and leave. A worker whose msrun dies gets a SIGTERM from the system and does the same.
"""

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time

import psutil

from ms_varlen.recipe.sections import DeviceConfig

logger = logging.getLogger("ms_varlen")

ROLE, SCHEDULER = "MS_ROLE", "MS_SCHED"
MSRUN_PID = "MS_VARLEN_MSRUN_PID"
"""Variable by which the launcher tells ranks who their parent is; scripts/train.py reads it too."""
SAME_WISH_SECONDS = 3
"""Signals this soon after the first ask for the same. `timeout`, batch systems and containers send one to every
process, and a rank is sent another by its launcher, and by the system when msrun ends."""
ORPHAN_SECONDS = 60
"""How long a scheduler outlives its msrun at most: the ranks need it until they have saved."""

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those of a run.

    Attributes:
        rank: its number, from 0. Rank 0 writes metrics and checkpoints.
        size: number of ranks.
    """

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0


def started_by_msrun() -> bool:
    """Whether msrun started this process, as a rank or as the scheduler."""
    return ROLE in os.environ


def join_ranks(device: DeviceConfig) -> Ranks:
    """Meet the other ranks, after the device is set and before anything runs on it; alone without msrun.

    In the scheduler this does not return: MindSpore ends the process when the ranks have left.

    Args:
        device: the `device` section, for HCCL's time-outs.
    """
    if not started_by_msrun():
        return Ranks()
    # A variable that the user exported wins, as everywhere with HCCL.
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(device.hccl_connect_seconds))
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(device.hccl_exec_seconds))
    return _joined()


@functools.cache
def _joined() -> Ranks:
    """A process joins once."""
    from mindspore.communication import get_group_size, get_rank, init

    parent = int(os.environ.get(MSRUN_PID, os.getppid()))
    joined = threading.Event()
    if os.environ[ROLE] == SCHEDULER:
        # Sent to every process, they are for the ranks, who need the scheduler until they have saved.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_after_ranks, args=(parent,), daemon=True).start()
    else:
        ask_for_signal_of_parents_death(parent)
        threading.Thread(target=_end_without_parent, args=(parent, joined), daemon=True).start()
    init()
    joined.set()
    ranks = Ranks(get_rank(), get_group_size())
    logger.info("rank %d of %d", ranks.rank, ranks.size)
    return ranks


def ask_for_signal_of_parents_death(parent: int) -> None:
    """Have the system send this process a SIGTERM when its parent dies; end it where that is dead already.

    Args:
        parent: process id that the parent had.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have the system make this process the parent of what its children leave behind, so that it is told their ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def _end_without_parent(parent: int, joined: threading.Event) -> None:
    """End a rank with its parent until it has joined: MindSpore holds signals back while it waits for the others."""
    while os.getppid() == parent:
        if joined.wait(1):
            return
    os._exit(1)


def _end_after_ranks(parent: int) -> None:
    """End a scheduler whose parent is dead when the ranks that this had started have left."""
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
    """Whether a process runs; one that has ended and waits for its parent to take note does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class StopRequest:
    """Whether somebody asked to stop, and since when; asked again, not to wait any longer."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def note(self, number: int) -> bool:
        """Take down a signal; whether it is a wish of its own after an earlier one, to end at once."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        return time.monotonic() - self._since > SAME_WISH_SECONDS

    def listen(self, ranks: Ranks) -> None:
        """Note SIGTERM and SIGINT from now on; asked again, what runs is interrupted at once.

        To the end of the process: a rank that has trained is saved, and leaving must not look like a failure. Alone a
        process is not held up by others, and keeps what its caller does on these signals.
        """
        if not started_by_msrun():
            return

        def heard(number: int, _frame: object) -> None:
            first = not self.asked
            if self.note(number):
                raise KeyboardInterrupt
            if first:
                name = signal.Signals(number).name
                logger.warning("rank %d got %s: ranks stop before the next step, save and leave", ranks.rank, name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, heard)
