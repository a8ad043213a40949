"""Files that are whole or not there: atomic writes, fsync, locks, and the user's cache folder.

A kill at any moment leaves the old content or the new one. What it leaves under a hidden name is removed by the next
writer. The system releases a lock when its process ends, however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

HIDDEN = ".tmp-"
"""Begins the name of a file or folder that is being written, next to its place."""


def hidden(path: Path) -> Path:
    """Return the name under which a file or folder is written before it is put in its place."""
    return path.with_name(f"{HIDDEN}{path.name}")


def fsync(path: Path) -> None:
    """Force a file, or a folder's list of entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force a folder and everything below it to the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync(Path(parent) / name)
        fsync(Path(parent))


def write_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the content of a file."""
    temporary = hidden(path)
    with temporary.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


def publish(temporary: Path, final: Path) -> None:
    """Put a folder that is complete and on the disk in its place."""
    os.rename(temporary, final)
    fsync(final.parent)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is made if missing.

    The file stays: removing it would let two processes lock two files of the same name. This is flock rather than the
    filelock package: a run folder's lock file also names its holder, a forked child shares the lock, ranks share a
    folder under a shared lock, and ckpt-tools locks a folder itself.

    Args:
        path: the lock file.
        wait: wait for another process that holds the lock.
    Yields:
        whether the lock is held; false only without `wait`.
    """
    with path.open("ab") as file:
        yield try_lock(file.fileno(), wait)


def try_lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or folder exclusively, until it is closed. Return false if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def user_cache(name: str) -> Path:
    """Return a folder in the user's cache: below ``$XDG_CACHE_HOME/ms_varlen``, or ``~/.cache/ms_varlen``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root).absolute() / "ms_varlen" / name


def folder_fault(folder: Path) -> str | None:
    """Return why no file can be written in a folder, which need not exist yet; None if one can. Makes nothing."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    return None
