"""Readers of Arrow tables: Parquet files, and Hugging Face data sets saved on disk.

Both are read a few rows at a time, and only the columns that are ever looked at, where there are any of them.
"""

import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ms_varlen.data.batches import BATCH_BYTES, BATCH_RECORDS, Batch, TableBatch
from ms_varlen.data.records import FIELDS
from ms_varlen.errors import DataError


class Parquet:
    """The rows of a Parquet file, its columns as fields."""

    def __init__(self, path: Path):
        self.name = path.name
        self.files = [path]
        self.skipped: collections.Counter[str] = collections.Counter()

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
                for table in file.iter_batches(_rows_of(size, rows), columns=_columns(file.schema_arrow.names)):
                    yield TableBatch(table, str(path), done, (done + table.num_rows) / rows)
                    done += table.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable("a whole Parquet file", error, path) from error


class SavedDataset:
    """The rows of what `datasets.Dataset.save_to_disk` wrote."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.folder = folder
        self.skipped: collections.Counter[str] = collections.Counter()

    @property
    def files(self) -> list[Path]:
        """The Arrow files, and what says which of them belong to it."""
        return [self.folder / "state.json", *sorted(self.folder.glob("*.arrow"))]

    def batches(self) -> Iterator[Batch]:
        """A few rows at a time, memory-mapped.

        Raises:
            DataError: a file of it is missing or damaged.
        """
        import pyarrow as pa
        from datasets import load_from_disk

        try:
            dataset = load_from_disk(str(self.folder)).with_format("arrow")
            dataset = dataset.select_columns(_columns(dataset.column_names))
            step = _rows_of(dataset.data.nbytes, len(dataset))
            for start in range(0, len(dataset), step):
                table = dataset[start : start + step]
                yield TableBatch(table, str(self.folder), start, (start + table.num_rows) / len(dataset))
        except (pa.ArrowInvalid, OSError, KeyError, json.JSONDecodeError) as error:
            raise _unreadable("a whole saved data set", error, self.folder) from error


def _columns(names: list[str]) -> list[str]:
    return [name for name in names if name in FIELDS] or names


def _rows_of(size: int, rows: int) -> int:
    """Rows that a batch takes of a table of `rows` rows and `size` bytes."""
    return max(1, min(BATCH_RECORDS, rows * BATCH_BYTES // max(size, 1)))


def _unreadable(rule: str, error: Any, path: Path) -> DataError:
    return DataError(f"data.source must be {rule}, got {error}, in {path}; write or copy it again")
