"""Readers of tokens: Megatron's .bin/.idx pairs, and MindRecord files. Their records have `input_ids`.

A Megatron index, little-endian::

    9 bytes  MMIDIDX\\0\\0       8  version, 1      1  code of the token type
    8  sequences S             8  documents + 1
    [S] int32 tokens of each sequence, [S] int64 where it starts in the .bin, [documents + 1] int64 first sequences

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.sources.record_batches import Batch, in_batches
from ms_varlen.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""By code; 6 and 7 are floating point, which no token is."""


@dataclasses.dataclass(frozen=True)
class _Index:
    """What an .idx file says.

    Attributes:
        dtype: of the tokens.
        lengths: [S] int32, tokens of each sequence.
        starts: [S] int64, where each starts, in bytes.
        documents: [D + 1] int64, the first sequence of each document, and the end.
    """

    dtype: np.dtype
    lengths: np.ndarray
    starts: np.ndarray
    documents: np.ndarray


class Megatron:
    """The documents of a Megatron data set; the sequences of a document are put together again."""

    def __init__(self, bin_path: Path):
        self.name = bin_path.name
        self.files = [bin_path, bin_path.with_suffix(".idx")]

    def batches(self) -> Iterator[Batch]:
        """The documents as `input_ids`.

        Raises:
            DataError: the pair is damaged, or does not belong together.
        """
        return in_batches(self._found())

    def _found(self) -> Iterator[tuple[dict[str, Any], str, int, float]]:
        bin_path, index_path = self.files
        index = _read_index(index_path)
        tokens = np.memmap(bin_path, np.uint8, "r") if bin_path.stat().st_size else np.zeros(0, np.uint8)
        ends = index.starts + index.lengths.astype(np.int64) * index.dtype.itemsize
        told = int(ends.max(initial=0))
        outside = told != tokens.size or (index.starts < 0).any() or (index.lengths < 0).any()
        if outside or int(index.lengths.sum(dtype=np.int64)) * index.dtype.itemsize != tokens.size:
            raise DataError(
                f"{bin_path} must hold the {told} bytes that {index_path.name} tells of, each in one sequence, got "
                f"{tokens.size}; copy both files again"
            )
        documents = len(index.documents) - 1
        for number in range(documents):
            spans = range(int(index.documents[number]), int(index.documents[number + 1]))
            parts = [tokens[index.starts[i] : ends[i]].view(index.dtype) for i in spans]
            ids = np.concatenate(parts) if parts else np.zeros(0, index.dtype)
            yield {"input_ids": ids}, f"{bin_path} document {number}", ids.nbytes, (number + 1) / documents


def _read_index(path: Path) -> _Index:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise DataError(
            f"a Megatron index must begin with {MAGIC!r}, got {header[:9]!r}, in {path}; write it with preprocess_data"
        )
    _, version, code, sequences, bounds = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES:
        raise DataError(
            f"a Megatron index must be of version 1 with integers as tokens, got version {version} and type {code}, in "
            f"{path}; write it again with Megatron's preprocess_data"
        )
    needed = HEADER.size + 12 * sequences + 8 * bounds
    if size < needed or bounds < 1:
        raise DataError(
            f"a Megatron index of {sequences} sequences must have {needed} bytes or more, got {size}, in {path}; "
            "copy it again"
        )
    content = np.memmap(path, np.uint8, "r", HEADER.size)
    documents = content[12 * sequences : 12 * sequences + 8 * bounds].view("<i8")
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(
            f"the documents of a Megatron index must be in order from sequence 0 to its end, {sequences}, got "
            f"{documents[0]} to {documents[-1]}{'' if (np.diff(documents) >= 0).all() else ' out of order'}, in "
            f"{path}; copy it again"
        )
    return _Index(
        dtype=np.dtype(TOKEN_TYPES[code]),
        lengths=content[: 4 * sequences].view("<i4"),
        starts=content[4 * sequences : 12 * sequences].view("<i8"),
        documents=documents,
    )


class MindRecord:
    """The records of one MindRecord file, as MindSpore's FileReader gives them; its .db file lies next to it."""

    def __init__(self, path: Path):
        self.name = path.name
        self.files = [path, path.with_name(path.name + ".db")]

    def batches(self) -> Iterator[Batch]:
        """The records with all their fields; imports MindSpore.

        Raises:
            DataError: the file is damaged.
        """
        return in_batches(self._found())

    def _found(self) -> Iterator[tuple[dict[str, Any], str, int, float]]:
        from mindspore.mindrecord import FileReader

        path = self.files[0]
        try:
            # A list reads this file alone, one thread keeps the order.
            reader = FileReader([str(path)], num_consumer=1)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(
                f"a source must be a whole MindRecord file, got {reason}, in {path}; copy it and its .db again"
            ) from error
        try:
            total = max(reader.len(), 1)
            for number, fields in enumerate(reader.get_next()):
                size = sum(getattr(value, "nbytes", 8) for value in fields.values())
                yield fields, f"{path} record {number}", size, (number + 1) / total
        finally:
            reader.close()
