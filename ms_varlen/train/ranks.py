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
from collections.abc import Iterator

from ms_varlen.train.config import DeviceConfig

logger = logging.getLogger("ms_varlen")

ROLE, SCHEDULER = "MS_ROLE", "MS_SCHED"
ORPHAN_SECONDS = 60
"""How long a scheduler outlives its msrun: long enough for the ranks to save, which need it until then."""

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


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

    if os.environ[ROLE] == SCHEDULER:
        threading.Thread(target=_end_without_parent, args=(os.getppid(),), daemon=True).start()
    else:
        _ask_for_signal_of_parents_death()
    init()
    ranks = Ranks(get_rank(), get_group_size())
    logger.info("rank %d of %d", ranks.rank, ranks.size)
    return ranks


def _ask_for_signal_of_parents_death() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _end_without_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self, ranks: Ranks) -> Iterator[None]:
        """Note SIGTERM and SIGINT for the time of the block; the second one interrupts at once.

        Alone a process is not held up by others, and keeps what its caller does on these signals.
        """
        if not started_by_msrun():
            yield
            return

        def note(number: int, _frame: object) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            logger.warning(
                "rank %d got %s: ranks stop before the next step, save and leave",
                ranks.rank,
                signal.Signals(number).name,
            )

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
