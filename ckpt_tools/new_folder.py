"""A new folder, whole or not at all: room is looked for first, and a kill leaves no half of it under its name.

Everything is written into a hidden folder next to it, fsynced, and renamed at the end. What a kill leaves is removed
by the next command that writes in the same place; a lock tells it from one that is still being written.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ms_varlen.errors import CheckpointError
from ms_varlen.files import fsync_tree, publish, try_lock

HIDDEN = ".ckpt-tools-"
"""Begins the name of the folder that is written to."""

SPARE_BYTES = 1 << 20
"""Room for headers, manifests and the recipe."""


@contextlib.contextmanager
def new_folder(destination: Path, source: Path, needed: int) -> Iterator[Path]:
    """A hidden folder to write to: `destination` when the block ends well, removed when it does not.

    Args:
        destination: the folder to make; its parent is made when there is none.
        source: what is read; nothing is written into it.
        needed: bytes that will be written.
    Raises:
        CheckpointError: `destination` exists, lies in the source, is being written, or the disk is full; nothing is
            left then.
    """
    destination = without_dots(destination)
    _check_place(destination, source)
    _check_room(destination, needed)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{destination.parent} must be a folder that can be made, got {error.strerror}; choose another", "CKPT-DISK"
        ) from error
    _remove_leftovers(destination.parent)
    hidden = destination.with_name(f"{HIDDEN}{destination.name}")
    with _locked(hidden, destination):
        try:
            yield hidden
            fsync_tree(hidden)
            _check_place(destination, source)
            publish(hidden, destination)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            shutil.rmtree(hidden, ignore_errors=True)  # the message then reports the space as free
            raise CheckpointError(
                f"{destination} could not be written ({error.strerror}): needed {_mb(needed)}, "
                f"free {_mb(shutil.disk_usage(destination.parent).free)} in {destination.parent}; nothing was left "
                "there and the source is as it was; make room or choose another disk",
                "CKPT-DISK",
            ) from error
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def without_dots(path: Path) -> Path:
    """The path itself, or resolved where it has a "..", of which the folder before need not exist."""
    return path.resolve() if ".." in path.parts else path


def _check_place(destination: Path, source: Path) -> None:
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists already; nothing is overwritten, choose a new name")
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{destination} must not lie in the source {source}; choose a place outside of it")


def _check_room(destination: Path, needed: int) -> None:
    there = next(folder for folder in destination.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE_BYTES:
        raise CheckpointError(
            f"{destination} needs {_mb(needed + SPARE_BYTES)}, free are {_mb(free)} in {there}; "
            "make room or choose another disk",
            "CKPT-DISK",
        )


def _remove_leftovers(parent: Path) -> None:
    """Remove the hidden folders of killed commands: those that nobody holds the lock of."""
    for leftover in parent.glob(f"{HIDDEN}*"):
        descriptor = _lock(leftover)
        if descriptor is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(descriptor)


def _lock(hidden: Path) -> int | None:
    """A descriptor with the folder's lock, which the system releases when this process ends, however it ends.

    None where another process holds it, or the folder went away.
    """
    try:
        descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _locked(hidden: Path, destination: Path) -> Iterator[None]:
    """The empty hidden folder, locked."""
    try:
        hidden.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{hidden.parent} must be a folder that can be written, got {error.strerror}; choose another", "CKPT-DISK"
        ) from error
    descriptor = _lock(hidden)
    # Another command may have removed it as a leftover between the two lines above.
    if descriptor is None or not hidden.exists() or not os.path.samestat(os.fstat(descriptor), hidden.stat()):
        if descriptor is not None:
            os.close(descriptor)
        raise CheckpointError(
            f"{destination} is being written by another process; wait for it or choose another name", "CKPT-LOCKED"
        )
    try:
        for leftover in hidden.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        yield
    finally:
        os.close(descriptor)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
