"""Readers of Arrow tables: Parquet files, and Hugging Face data sets saved on disk.

Both are read a few rows at a time, and only the columns that are ever looked at, where there are any of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ms_varlen.data.sources.file_kinds import SAVED_DATASET
from ms_varlen.data.sources.record import FIELDS, mask_like
from ms_varlen.data.sources.record_batches import BATCH_BYTES, BATCH_RECORDS, Batch, TableBatch, json_fault
from ms_varlen.errors import DataError

DESCRIPTIONS = ("state.json", SAVED_DATASET)
"""Of a saved data set: its Arrow files in order, and the types of its columns."""
SHOWN = 300
"""Characters that are shown of what a reader says."""


class Parquet:
    """The rows of a Parquet file, its columns as fields."""

    def __init__(self, path: Path):
        self.name = path.name
        self.files = [path]

    def batches(self) -> Iterator[Batch]:
        """Row groups, a few rows at a time.

        Raises:
            DataError: it is no Parquet file, or a damaged one.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        (path,) = self.files
        try:
            # Read in pieces: a row group may be as large as the file.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=BATCH_BYTES) as file:
                rows = file.metadata.num_rows
                size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
                done = 0
                columns, unread = _columns(file.schema_arrow.names)
                for table in file.iter_batches(_rows_of(size, rows), columns=columns):
                    yield TableBatch(table, str(path), done, (done + table.num_rows) / rows, unread)
                    done += table.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable("a whole Parquet file", error, path) from error


class SavedDataset:
    """The rows of what `datasets.Dataset.save_to_disk` wrote."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.folder = folder

    @property
    def files(self) -> list[Path]:
        """The Arrow files, what says which of them belong to it, and what says how their columns are meant."""
        return [self.folder / name for name in DESCRIPTIONS] + sorted(self.folder.glob("*.arrow"))

    def batches(self) -> Iterator[Batch]:
        """A few rows at a time, memory-mapped.

        Raises:
            DataError: a file of it is missing or damaged.
        """
        import pyarrow as pa
        from datasets import load_from_disk

        for name in DESCRIPTIONS:
            _require_object(self.folder / name)
        try:
            dataset = load_from_disk(str(self.folder)).with_format("arrow")
            columns, unread = _columns(dataset.column_names)
            dataset = dataset.select_columns(columns)
            step = _rows_of(dataset.data.nbytes, len(dataset))
            for start in range(0, len(dataset), step):
                table = dataset[start : start + step]
                yield TableBatch(table, str(self.folder), start, (start + table.num_rows) / len(dataset), unread)
        # The last four are what datasets raises for descriptions that are objects with anything else in them.
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable("a whole saved data set", error, self.folder) from error


def _columns(names: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The columns to read and the others; those that may mean a mask are read, so that they can be refused."""
    if not any(name in FIELDS for name in names):
        return names, ()
    refused = mask_like(names) if "input_ids" in names else []
    read = [name for name in names if name in FIELDS or name in refused]
    return read, tuple(name for name in names if name not in read)


def _require_object(path: Path) -> None:
    """Refuse a description of a saved data set that is no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        fault = error.strerror if isinstance(error, OSError) else json_fault(error)
        raise _unreadable(f"a whole saved data set with a {path.name} of JSON", fault, path.parent) from error
    if not isinstance(found, dict):
        found = type(found).__name__
        raise _unreadable(f"a whole saved data set with an object in {path.name}", found, path.parent)


def _rows_of(size: int, rows: int) -> int:
    """Rows that a batch takes of a table of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_RECORDS, rows * BATCH_BYTES // max(size, 1)))


def _unreadable(rule: str, found: Any, path: Path) -> DataError:
    if isinstance(found, Exception):
        found = " ".join(f"{type(found).__name__}: {found}".split()).partition(". Available")[0]
    return DataError(f"a source must be {rule}, got {found[:SHOWN]}, in {path}; write or copy it again")
