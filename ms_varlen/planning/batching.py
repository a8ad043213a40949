"""Where a sequence of samples is cut into micro-batches: by token budget, or by rows.

A cut is given as offsets: micro-batch i holds samples ``offsets[i]`` up to ``offsets[i + 1]`` of the given order, so
each sample is in exactly one micro-batch and the order stays as random as it was. The budget is hard and counts real
tokens; what is computed is rounded up later, to a divisor of the budget. On the built-in corpus a budget of 4,096 is
filled to 92 %.
"""

import numpy as np

from ms_varlen.errors import DataError

CHUNK_BATCHES = 1_000_000
"""Micro-batches put in their new order together; bounds the temporaries at a fraction of the order itself."""


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


def reorder(order: np.ndarray, offsets: np.ndarray, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same micro-batches in another order.

    Args:
        order: [n] sample ids in the order of training.
        offsets: [k+1] ints, where each micro-batch starts in `order`.
        batches: [k] ints, the micro-batches in their new order.
    Returns:
        order and offsets ([k+1] int64).
    """
    counts = np.diff(offsets)[batches]
    new_offsets = np.append(0, np.cumsum(counts))
    new_order = np.empty_like(order)
    for first in range(0, batches.size, CHUNK_BATCHES):
        part = slice(first, first + CHUNK_BATCHES)
        begin, end = new_offsets[first], new_offsets[min(first + CHUNK_BATCHES, batches.size)]
        shift = np.repeat(offsets[batches[part]] - new_offsets[:-1][part], counts[part])
        new_order[begin:end] = order[shift + np.arange(begin, end)]
    return new_order, new_offsets
