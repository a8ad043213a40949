"""How a process joins the ranks of a run: processes that msrun started, which train one step together.

msrun also starts the same script once as a scheduler. It reads no data, and serves the ranks
until the last one has exited.
"""

import dataclasses
import functools
import logging
import os

from ms_varlen.ranks.stop import ROLE, SCHEDULER, exit_with_msrun, started_by_msrun
from ms_varlen.recipe.sections import DeviceConfig

logger = logging.getLogger("ms_varlen")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run.

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


def join_ranks(device: DeviceConfig) -> Ranks:
    """Meet the other ranks; without msrun, return a single rank.

    Call it after the device is set and before anything runs on it. In the scheduler it does not return: MindSpore
    exits the process once all ranks have exited.

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

    joined = exit_with_msrun(scheduler=os.environ[ROLE] == SCHEDULER)
    init()
    joined.set()
    ranks = Ranks(get_rank(), get_group_size())
    logger.info("rank %d of %d", ranks.rank, ranks.size)
    return ranks
