"""Hashes of files, and a memory of what was hashed or checked while a file's size and times stay as they were.

Reading a corpus and its store again at every start costs seconds per GB. A file that has the size, time of change (in
nanoseconds), inode and device of the one that was read is taken for the same; whoever changes a file and sets its time
back deliberately is not found out.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ms_varlen.errors import DataError

SETTLED_S = 2.0
"""A file changed this short ago may change again without a new time: some file systems keep whole seconds."""
ENTRIES = 1000
"""Hashes that a memory keeps, the latest ones."""


def file_hash(path: Path) -> str:
    """A checksum of a file's content; reads about 1 GB/s."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def state_of(paths: Iterable[Path]) -> str:
    """A hash of which files these are, their sizes and their times: it changes when one of them does.

    Raises:
        DataError: a file is missing.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(os.fsencode(os.path.abspath(path)) + f"\0{_stat(path)}\0".encode())
    return digest.hexdigest()


def _stat(path: Path) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} must stay where it is, got {error.strerror}; put it back and run again") from error
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


def settled(paths: Iterable[Path]) -> bool:
    """Whether the files' times can be relied on to show a further change."""
    newest = max((os.stat(path).st_mtime for path in paths), default=0.0)
    return newest < time.time() - SETTLED_S


class FileMemory:
    """What was found out about files, by `state_of` them, in a small JSON file; a damaged one is replaced."""

    def __init__(self, path: Path):
        self._path = path

    def recall(self, state: str) -> str | None:
        """What was remembered of this state, None if nothing."""
        return self._entries().get(state)

    def remember(self, state: str, found: str) -> None:
        """Keep `found`. Best effort: where nothing can be written, it is found out again next time."""
        entries = {**self._entries(), state: found}
        kept = dict(list(entries.items())[-ENTRIES:])
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept))
            os.replace(temporary, self._path)

    def _entries(self) -> dict[str, str]:
        try:
            entries = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
