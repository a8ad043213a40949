"""Runs of records that travel: a source cuts what it reads into batches, and any process makes records of them.

A batch holds about `BATCH_BYTES` of the source as it lies on disk. Making records of it (parsing JSON, say) is the
dearer half, so it is left to whoever asks for `records`, a worker process for large sources.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ms_varlen.data.sources.record import Record
from ms_varlen.errors import DataError, located

BATCH_BYTES = 1 << 20
"""A batch ends with the record that reaches this size, or ..."""
BATCH_RECORDS = 4096
"""... this number of records."""
MAX_RECORD_BYTES = 1 << 25
"""The largest record: a batch, and so the memory of a build, grows with it."""


ARRAY_HINT = "write one object a line (jq -c '.[]' does)"
OBJECT_HINT = "write one object a line (jq -c . does)"
FIX_HINT = "fix or remove the line"


class Batch(Protocol):
    """Consecutive records of a source; can be pickled.

    Attributes:
        done: share of the source that is read with this batch, 0 to 1.
        skipped: how much was passed over, by reason; complete after `records`.
    """

    done: float
    skipped: collections.Counter[str]

    def records(self) -> Iterator[Record]:
        """The records in order, once.

        Raises:
            DataError: one cannot be read; the message names its place.
        """
        ...


@dataclasses.dataclass
class RecordBatch:
    """Records that are there already."""

    found: list[tuple[dict[str, Any], str]]
    done: float
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def records(self) -> Iterator[Record]:
        """See `Batch`."""
        for fields, where in self.found:
            yield Record(fields, where, self.done)


@dataclasses.dataclass
class LineBatch:
    """Whole lines of a JSON lines file.

    Attributes:
        data: the lines, UTF-8.
        path: the file's name, for errors.
        first_line: number of the first of them, from 1.
    """

    data: bytes
    path: str
    first_line: int
    done: float
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def records(self) -> Iterator[Record]:
        """See `Batch`; a record is the object of a line, blank lines count in ``skipped["blank_lines"]``."""
        self.skipped.clear()
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, self.first_line):
            if not line.strip():
                self.skipped["blank_lines"] += 1
                continue
            where = f"{self.path} line {number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # put there by editors on Windows
            with located(where):
                fields = _object_of(line)
            yield Record(fields, where, self.done)


def _object_of(line: bytes) -> dict[str, Any]:
    """The object of one JSON line, or a DataError that says what is wrong with it."""
    try:
        entry = json.loads(decoded(line, "a line"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"a line must be a JSON object, got {json_fault(error)}; {_hint(line)}") from error
    if not isinstance(entry, dict):
        of_objects = isinstance(entry, list) and entry and all(isinstance(part, dict) for part in entry)
        found = "an array" if isinstance(entry, list) else type(entry).__name__
        hint = ARRAY_HINT if of_objects else FIX_HINT
        raise DataError(f"a line must be a JSON object, got {found}; {hint}")
    return entry


def _hint(line: bytes) -> str:
    """What to do about a line that is no JSON."""
    line = line.strip()
    if re.match(rb"\[\s*(\{|$)", line):
        return ARRAY_HINT
    return OBJECT_HINT if line[:1] == b"{" and line[-1:] in b"{[," else FIX_HINT


def json_fault(error: ValueError | RecursionError) -> str:
    """What `json.loads` found, for an error message.

    Args:
        error: what it raised for a text.
    """
    if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
        return f"{error.msg} at character {error.pos}"  # "line 1" would contradict the number of a line of a file
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "arrays or objects nested too deeply"
    return "an integer of more digits than can be read"  # Python's limit, 4300: the only other fault that it has


def decoded(data: bytes, what: str) -> str:
    """`data` as text.

    Raises:
        DataError: it is not UTF-8; the message gives the byte.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{what} must be UTF-8, got byte 0x{data[error.start]:02x} at byte {error.start}; save the file as UTF-8"
        ) from error


@dataclasses.dataclass
class TableBatch:
    """Rows of an Arrow table.

    Attributes:
        table: a `pyarrow.RecordBatch` or `pyarrow.Table`.
        path: the file's name, for errors.
        first_row: number of the first of them, from 0.
        unread: columns of the file that are left out.
    """

    table: Any
    path: str
    first_row: int
    done: float
    unread: tuple[str, ...] = ()
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def records(self) -> Iterator[Record]:
        """See `Batch`; lists of whole numbers become arrays, which is many times faster than lists."""
        names = self.table.column_names if hasattr(self.table, "column_names") else self.table.schema.names
        columns = [_values(self.table.column(place)) for place in range(len(names))]
        for number, values in enumerate(zip(*columns, strict=True), self.first_row):
            where = f"{self.path} row {number}"
            yield Record(dict(zip(names, values, strict=True)), where, self.done, self.unread)


def _values(column: Any) -> Iterable[Any]:
    """The values of an Arrow column; lists of integers without nulls as views of one array."""
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # a table without rows, or with more than one chunk can hold
        return array.to_pylist()
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if not is_list or not pa.types.is_integer(array.type.value_type) or array.null_count or array.values.null_count:
        return array.to_pylist()
    values, offsets = array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def in_batches(found: Iterable[tuple[dict[str, Any], str, int, float]]) -> Iterator[RecordBatch]:
    """Records that a source makes itself, in batches.

    Args:
        found: fields, place, size in bytes, and the share of the source that is read with it, for each record.
    """
    batch: list[tuple[dict[str, Any], str]] = []
    held = 0
    share = 0.0
    for fields, where, size, share in found:
        check_size(size, where)
        batch.append((fields, where))
        held += size
        if held >= BATCH_BYTES or len(batch) == BATCH_RECORDS:
            yield RecordBatch(batch, share)
            batch, held = [], 0
    if batch:
        yield RecordBatch(batch, share)


def check_size(size: int, where: str) -> None:
    """Refuse a record that no memory is planned for.

    Args:
        size: its bytes, or those that were read before its end was found.
    Raises:
        DataError: more than `MAX_RECORD_BYTES`.
    """
    if size > MAX_RECORD_BYTES:
        raise DataError(
            f"a record must be <= {MAX_RECORD_BYTES} bytes, got {size} or more, in {where}; write one document a "
            "record (a whole corpus in one is none), or cut it into several"
        )
