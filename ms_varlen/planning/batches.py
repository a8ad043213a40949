"""`Batches`: samples in the order of training, cut into micro-batches; and the cut at a token budget.

The budget is hard and counts real tokens; T is rounded up later, to a divisor of the budget.
"""

import dataclasses

import numpy as np

from ms_varlen.errors import DataError

CHUNK_BATCHES = 1_000_000
"""Micro-batches worked on together; bounds the temporaries at a fraction of the order itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Samples in the order of training, each in one micro-batch.

    Attributes:
        order: [n] int64, sample ids.
        offsets: [k+1] int64; micro-batch i holds ``order[offsets[i]:offsets[i + 1]]``.
    """

    order: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of_sizes(cls, order: np.ndarray, sizes: np.ndarray) -> "Batches":
        """Micro-batches of `sizes` [k] samples each."""
        return cls(order, np.append(0, np.cumsum(sizes)))

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def sizes(self) -> np.ndarray:
        """[k] int64, samples of each micro-batch."""
        return np.diff(self.offsets)

    def ids(self, first: int, last: int) -> np.ndarray:
        """Sample ids of micro-batches `first` up to `last`."""
        return self.order[self.offsets[first] : self.offsets[last]]

    def first(self, count: int) -> "Batches":
        """The first `count` micro-batches."""
        return Batches(self.order[: self.offsets[count]], self.offsets[: count + 1])

    def grouped(self, count: int) -> "Batches":
        """Each `count` micro-batches as one, e.g. the steps of a plan; the last may hold fewer."""
        return Batches(self.order, np.unique(np.append(self.offsets[::count], self.offsets[-1])))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[k] sums over each micro-batch of `values` [n], one a sample in the order of training."""
        kind = np.int64 if np.issubdtype(values.dtype, np.integer) else values.dtype
        return np.add.reduceat(values, self.offsets[:-1], dtype=kind)

    def maxima(self, values: np.ndarray) -> np.ndarray:
        """[k] maxima over each micro-batch; `values` as in `sums`."""
        return np.maximum.reduceat(values, self.offsets[:-1])

    def reordered(self, batches: np.ndarray) -> "Batches":
        """The same micro-batches in another order: `batches` [k] ints."""
        sizes = self.sizes[batches]
        offsets, order = np.append(0, np.cumsum(sizes)), np.empty_like(self.order)
        for first in range(0, batches.size, CHUNK_BATCHES):
            part = slice(first, first + CHUNK_BATCHES)
            begin, end = offsets[first], offsets[min(first + CHUNK_BATCHES, batches.size)]
            shift = np.repeat(self.offsets[batches[part]] - offsets[:-1][part], sizes[part])
            order[begin:end] = self.order[shift + np.arange(begin, end)]
        return Batches(order, offsets)


def token_budget_offsets(lengths: np.ndarray, token_budget: int, max_segments: int) -> np.ndarray:
    """Cut where the next sample would exceed the token budget or the number of segments.

    Args:
        lengths: [n] ints, tokens per sample in the order of training.
        token_budget: most real tokens of a micro-batch.
        max_segments: most samples of a micro-batch.
    Returns:
        [k+1] int64. Costs 16 bytes a sample and 2 us a micro-batch.
    Raises:
        DataError: a sample longer than the budget; the message gives its place.
    """
    if lengths.size and int(lengths.max()) > token_budget:
        place = int(np.argmax(lengths > token_budget))
        raise DataError(
            f"sample {place} must fit batch.token_budget ({token_budget}), got {int(lengths[place])} tokens; "
            "raise batch.token_budget, or lower model.seq_length and choose a data.overlong policy"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = [0]
    done = 0
    while offsets[-1] < lengths.size:
        first = offsets[-1]
        last = min(int(np.searchsorted(ends, done + token_budget, side="right")), first + max_segments)
        done = int(ends[last - 1])
        offsets.append(last)
    return np.array(offsets, np.int64)


def row_offsets(samples: int, rows: int) -> np.ndarray:
    """`rows` samples per micro-batch; the last may hold fewer.

    Returns:
        [k+1] int64.
    """
    return np.append(np.arange(0, samples, rows), samples).astype(np.int64)
