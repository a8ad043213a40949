"""One rank of a node plans an epoch, the others map its plan: 16 bytes a sample once a node, not once a rank.

The files lie below the temporary folder, one folder for each msrun, and are removed by the last of its ranks to leave;
what killed runs left is removed by the next.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import psutil

from ms_varlen.errors import DataError
from ms_varlen.files import locked, try_lock
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.plan import SharePlan

_NAME = "ms_varlen-plans-{user}-{launcher}"
_IN_USE = "in_use.lock"
"""Shared by the ranks that use the folder, for as long as they do."""


@contextlib.contextmanager
def plans_of_node(launcher: int) -> Iterator[SharePlan]:
    """What `EpochPlans` takes as `share`: the first rank of a node that needs a plan makes it, the others wait.

    Args:
        launcher: process id of the msrun that started the ranks of this node.
    """
    folder = Path(tempfile.gettempdir()) / _NAME.format(user=os.getuid(), launcher=launcher)
    _remove_leftovers(folder)
    used: list[IO[bytes]] = []  # from the first plan on
    try:
        yield lambda name, make: _shared(folder, used, name, make)
    finally:
        for lock in used:
            with lock:
                _remove_unused(folder, lock)


def _shared(folder: Path, used: list[IO[bytes]], name: str, make: Callable[[], Batches]) -> Batches:
    entry = folder / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not used:
            used.append((folder / _IN_USE).open("ab"))
            fcntl.flock(used[0], fcntl.LOCK_SH)
        with locked(folder / f"{name}.lock"):
            if not entry.is_dir():
                _write(entry, make())
        order, offsets = (np.load(entry / f"{part}.npy", mmap_mode="r") for part in ("order", "offsets"))
    except OSError as error:
        raise DataError(
            f"the plan must be written to the temporary folder for the other ranks of this node, got {error}; free "
            f"space in {folder.parent} or set TMPDIR"
        ) from error
    return Batches(np.asarray(order), np.asarray(offsets))


def _write(entry: Path, batches: Batches) -> None:
    building = Path(tempfile.mkdtemp(dir=entry.parent))
    for part in ("order", "offsets"):
        np.save(building / f"{part}.npy", getattr(batches, part))
    building.rename(entry)


def _remove_leftovers(own: Path) -> None:
    for folder in own.parent.glob(_NAME.format(user=os.getuid(), launcher="*")):
        launcher = folder.name.rpartition("-")[2]
        if folder != own and launcher.isdigit() and not psutil.pid_exists(int(launcher)):
            # Ranks outlive a killed msrun until they have saved. A lock that cannot be made is that of nobody.
            with contextlib.suppress(OSError), (folder / _IN_USE).open("ab") as lock:
                _remove_unused(folder, lock)


def _remove_unused(folder: Path, lock: IO[bytes]) -> None:
    """Remove a folder unless another rank holds its lock, which removes it then; mapped arrays stay readable."""
    if try_lock(lock.fileno()):
        shutil.rmtree(folder, ignore_errors=True)
