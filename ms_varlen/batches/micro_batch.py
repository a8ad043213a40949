"""`MicroBatch`: the columns of one micro-batch, and the counts that follow from them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np

from ms_varlen.limits import IGNORE_INDEX

COLUMNS = ("input_ids", "labels", "position_ids", "seq_lens", "actual_seq_qlen")
"""Columns that every layout produces, in their order."""

Columns = dict[str, np.ndarray]


def count_supervised(labels: np.ndarray) -> int:
    """Return the number of labels that have a loss."""
    return int(np.count_nonzero(labels != IGNORE_INDEX))


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch(Mapping[str, np.ndarray]):
    """One micro-batch. It is also a mapping of its columns by name.

    Attributes:
        columns: `COLUMNS` as in `ms_varlen.batches.layout`, and those of the attention body in use; int32 (host).
    """

    columns: Columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __or__(self, changes: Mapping[str, np.ndarray]) -> "MicroBatch":
        """Return a micro-batch with other columns in place of some, or with more."""
        return MicroBatch({**self.columns, **changes})

    @property
    def tokens(self) -> int:
        """T, the tokens that are computed, padding included."""
        return self.columns["input_ids"].size

    @property
    def seq_lens(self) -> np.ndarray:
        """[B] int32, tokens per sample, padding excluded."""
        return self.columns["seq_lens"]

    @functools.cached_property
    def supervised(self) -> int:
        """Tokens with a loss."""
        return count_supervised(self.columns["labels"])
