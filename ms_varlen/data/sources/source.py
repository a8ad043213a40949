"""Sources of records: one or several of files, folders, the standard library's docstrings, or made-up text.

A source is iterated as often as needed, in the same order each time, and holds one batch at a time. Its `fingerprint`
is a hash of every byte that it reads, not of times or sizes: a store is never reused for text that changed. Hashing
takes about 1.5 s per GB; `file_memory` remembers it while the files' sizes and times stay as they were.
"""

import collections
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ms_varlen.data.config import PYDOC, LognormalLengths, is_lognormal
from ms_varlen.data.sources.builtin import Lognormal, Pydoc
from ms_varlen.data.sources.file_kinds import files_of, source_fault
from ms_varlen.data.sources.file_memory import FileMemory, file_hash, settled, state_of
from ms_varlen.data.sources.record import Record
from ms_varlen.data.sources.record_batches import Batch
from ms_varlen.data.sources.tables import Parquet, SavedDataset
from ms_varlen.data.sources.text_files import JsonLines, TextFiles
from ms_varlen.data.sources.token_files import Megatron, MindRecord
from ms_varlen.errors import DataError


class Part(Protocol):
    """One file, or what is read like one.

    Attributes:
        name: for people; not part of the identity.
    """

    name: str

    @property
    def files(self) -> list[Path]:
        """The files whose content decides; none for made-up text."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Its records in order."""
        ...


class Source:
    """Parts, one after another.

    Attributes:
        name: for people; not part of the identity.
        parts: what is read, in order.
        field: the recipe's key that names it, for errors.
        skipped: how much was passed over, by reason, after an iteration.
    """

    def __init__(self, name: str, parts: Sequence[Part], other_files: int = 0, field: str = "data.source"):
        self.name = name
        self.parts = parts
        self.field = field
        self._other_files = other_files
        self.skipped: collections.Counter[str] = collections.Counter()

    @property
    def files(self) -> list[Path]:
        """The files whose content decides."""
        return [path for part in self.parts for path in part.files]

    def fingerprint(self) -> str:
        """A hash of the content; equal fingerprints mean equal records."""
        return _hash_of([_fingerprint(part) for part in self.parts])

    def state(self) -> str:
        """Changes when a file of the source does, or what reads it."""
        readers = [(type(part).__name__, len(part.files)) for part in self.parts]
        return f"source {_hash_of([platform.python_version(), str(readers), state_of(self.files)])}"

    @property
    def size(self) -> int:
        """Bytes to be read; at least 1."""
        return sum(_part_sizes(self.parts))

    def batches(self) -> Iterator[Batch]:
        """The records in order; `Batch.done` is a share of the whole source by bytes.

        `skipped` is complete when every batch's own was added to it.
        """
        self.skipped.clear()
        if self._other_files:
            self.skipped["other_files"] = self._other_files
        sizes = _part_sizes(self.parts)
        before = 0
        for part, size in zip(self.parts, sizes, strict=True):
            for batch in part.batches():
                batch.done = (before + batch.done * size) / sum(sizes)
                yield batch
            before += size

    def __iter__(self) -> Iterator[Record]:
        for batch in self.batches():
            yield from batch.records()
            self.skipped.update(batch.skipped)


def _part_sizes(parts: Sequence[Part]) -> list[int]:
    return [sum(path.stat().st_size for path in part.files) or 1 for part in parts]


def source_fingerprint(source: Source, memory: FileMemory) -> str:
    """The fingerprint of a source, without reading files that are those that were read before.

    Raises:
        DataError: a file is missing, or changes while it is read.
    """
    if not all(part.files for part in source.parts):
        return source.fingerprint()
    state = source.state()
    known = memory.recall(state)
    if known is not None:
        return known
    may_be_kept = settled(source.files)
    found = source.fingerprint()
    if source.state() != state:
        raise DataError(changed_source(source))
    if may_be_kept:
        memory.remember(state, found)
    return found


def changed_source(source: Source) -> str:
    """The message about a source that changes while it is read."""
    return f"{source.field} must not change while it is read, got another content of {source.name}; run again"


def _fingerprint(part: Part) -> str:
    if isinstance(part, Pydoc | Lognormal):
        return part.fingerprint()
    # The reader's name, for the same bytes read otherwise are other records.
    return _hash_of([type(part).__name__, *(file_hash(path) for path in part.files)])


def _hash_of(values: list[str]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def open_source(source: str | Sequence[str], field: str = "data.source") -> Source:
    """The source that a field of the recipe names: one or several of what `ms_varlen.data.config` describes.

    Args:
        source: `pydoc`, `lognormal(...)`, a path, or a list of them.
        field: the recipe's key, for errors.
    Raises:
        DataError: a path is missing, of no known kind, or holds files of several kinds.
    """
    names = [source] if isinstance(source, str) else list(source)
    parts: list[Part] = []
    others = 0
    for name in names:
        found, passed_over = _parts_of(name, field)
        parts += found
        others += passed_over
    name = Path(names[0]).name if len(names) == 1 and parts[0].files else ", ".join(part.name for part in parts[:3])
    return Source(name, parts, others, field)


def _parts_of(name: str, field: str) -> tuple[list[Part], int]:
    if is_lognormal(name):
        return [Lognormal(LognormalLengths.parse(name))], 0
    if name == PYDOC:
        return [Pydoc()], 0
    fault = source_fault(name)
    if fault is not None:
        raise DataError(f"{field} {fault}")
    kind, paths, others = files_of(Path(name).expanduser(), field)
    if kind == "text":
        return [TextFiles(paths)], others
    readers: dict[str, Callable[[Path], Part]] = {
        "jsonl": JsonLines,
        "parquet": Parquet,
        "saved": SavedDataset,
        "megatron": Megatron,
        "mindrecord": MindRecord,
    }
    return [readers[kind](path) for path in paths], others
