"""Readers of text: JSON lines, plain or gzip, and folders of plain text."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ms_varlen.data.sources.record_batches import BATCH_BYTES, Batch, LineBatch, check_size, decoded, in_batches
from ms_varlen.errors import DataError, located


class JsonLines:
    """The objects of a JSON lines file; the name of a compressed one ends in .gz."""

    def __init__(self, path: Path):
        self.name = path.name
        self.files = [path]

    def batches(self) -> Iterator[Batch]:
        """Whole lines, about `BATCH_BYTES` at a time.

        Raises:
            DataError: a line is too large, or the compressed file is damaged.
        """
        (path,) = self.files
        size = max(path.stat().st_size, 1)
        number = 1
        with path.open("rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
            for data in _whole_lines(lines, path, number):
                yield LineBatch(data, str(path), number, min(raw.tell() / size, 1.0))
                number += data.count(b"\n")


def _whole_lines(file: BinaryIO | gzip.GzipFile, path: Path, number: int) -> Iterator[bytes]:
    """Blocks that end with a line; the first line of the first one has the given number."""
    begun: list[bytes] = []  # of a line whose end is not read yet
    held = 0
    while chunk := _read(file, path):
        end = chunk.rfind(b"\n") + 1
        if end:
            data = b"".join([*begun, chunk[:end]])
            begun, held = [], 0
            yield data
            number += data.count(b"\n")
        begun.append(chunk[end:])
        held += len(chunk) - end
        check_size(held, f"{path} line {number}")
    if held:
        yield b"".join(begun)


def _read(file: BinaryIO | gzip.GzipFile, path: Path) -> bytes:
    try:
        return file.read(BATCH_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"a source must be a whole gzip file, got {error}, in {path}; copy it again, or drop .gz from its name"
        ) from error


class TextFiles:
    """One document a file, whatever blank lines are in it."""

    def __init__(self, paths: list[Path]):
        self.name = paths[0].name if len(paths) == 1 else f"{len(paths)} text files"
        self.files = paths

    def batches(self) -> Iterator[Batch]:
        """The files as `text`.

        Raises:
            DataError: a file is too large or not UTF-8.
        """
        return in_batches(self._found())

    def _found(self) -> Iterator[tuple[dict[str, Any], str, int, float]]:
        for number, path in enumerate(self.files, 1):
            where = str(path)
            check_size(os.stat(path).st_size, where)
            data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
            with located(where):
                text = decoded(data, "a text file")
            yield {"text": text}, where, len(data), number / len(self.files)
