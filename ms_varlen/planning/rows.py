"""Micro-batches of rows of similar length: sorted within shuffled windows, or grouped by bucket.

Rows are padded to the longest of their micro-batch, so similar lengths waste less; but a micro-batch of similar lengths
is not a random sample. A window trades one for the other, and two numbers show it: `batch_overhead` and
`length_mixing`. A length equal to a boundary belongs to that boundary. Every sample is in exactly one micro-batch.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ms_varlen.errors import DataError
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.buckets import bucket_of

CHUNK_SAMPLES = 1_000_000
"""Samples whose buckets are looked up together; bounds the temporaries at a fraction of the order itself."""


def divisor_boundaries(longest: int, divisor: int) -> np.ndarray:
    """[K] int64, the multiples of `divisor` up to the first that holds `longest`."""
    return np.arange(1, -(-longest // divisor) + 1) * divisor


def bucket_rows(boundaries: np.ndarray, token_budget: int, max_rows: int) -> np.ndarray:
    """[K] int64, the rows of each bucket that a padded token budget holds, at most `max_rows`.

    Raises:
        DataError: a boundary above the budget, which is hard.
    """
    longest = int(boundaries[-1])
    if longest > token_budget:
        raise DataError(
            f"row length {longest} must fit batch.token_budget ({token_budget}), which counts padded rows; raise "
            "batch.token_budget, or lower model.seq_length and choose a data.overlong policy"
        )
    return np.minimum(token_budget // boundaries, max_rows)


def bucketed_batches(
    lengths: np.ndarray, order: np.ndarray, boundaries: np.ndarray, rows: np.ndarray, rng: np.random.Generator | None
) -> Batches:
    """Samples of the same bucket together; the last of each bucket form a smaller micro-batch.

    Args:
        lengths: [n] ints, tokens per sample, by id.
        order: [m] sample ids, shuffled; within a bucket they keep this order.
        boundaries: [K] ints, ascending; a row of bucket k is `boundaries[k]` tokens long.
        rows: [K] ints >= 1, most rows of a micro-batch of each bucket; see `bucket_rows`.
        rng: shuffles the micro-batches; None leaves them by bucket, as an evaluation may.
    Raises:
        DataError: a sample longer than the last boundary; the message gives its id.
    """
    buckets = _row_indices(lengths[order], order, boundaries)
    by_bucket = np.argsort(buckets, kind="stable")  # small integers: a radix sort, linear
    counts = np.bincount(buckets, minlength=len(boundaries))
    firsts = np.cumsum(counts) - counts
    starts = [np.arange(first, first + count, most) for first, count, most in zip(firsts, counts, rows, strict=True)]
    batches = Batches(order[by_bucket], np.append(np.concatenate(starts), order.size))
    return batches if rng is None else batches.reordered(rng.permutation(len(batches)))


def windowed_batches(
    lengths: np.ndarray,
    order: np.ndarray,
    window: int,
    rows: int,
    boundaries: np.ndarray,
    rng: np.random.Generator | None,
) -> Batches:
    """Samples sorted by row length within windows of a shuffled order, `rows` to a micro-batch.

    Args:
        lengths: [n] ints, tokens per sample, by id.
        order: [m] sample ids, shuffled; samples with rows of the same length keep this order.
        window: samples per window: few mix most, all pad least. No micro-batch reaches beyond its window's end.
        rows: samples of a micro-batch; the last of a window may hold fewer.
        boundaries: [K] ints, ascending, the lengths that rows are padded to.
        rng: shuffles the micro-batches; None leaves them in the windows' order.
    Raises:
        DataError: a sample longer than the last boundary; the message gives its id.
    """
    order = order[_sort_windows(_row_indices(lengths[order], order, boundaries), window)]
    starts = [np.arange(first, min(first + window, order.size), rows) for first in range(0, order.size, window)]
    batches = Batches(order, np.append(np.concatenate([*starts, np.zeros(0, np.int64)]), order.size))
    return batches if rng is None else batches.reordered(rng.permutation(len(batches)))


def batch_overhead(lengths: np.ndarray, batches: Batches, boundaries: np.ndarray) -> float:
    """computed / real - 1 of micro-batches whose rows are padded to the smallest boundary that holds their longest."""
    sizes = lengths[batches.order]
    row_lengths = boundaries[bucket_of(batches.maxima(sizes), boundaries)].astype(np.int64)
    return float((row_lengths * batches.sizes).sum() / sizes.sum(dtype=np.int64) - 1)


def length_mixing(lengths: np.ndarray, batches: Batches) -> float:
    """How much of the lengths' spread is found inside a micro-batch: 1 as by chance, 0 if lengths are sorted apart.

    One minus the correlation ratio (the share of the variance of log length that lies between micro-batches), divided
    by its expectation for a random partition into micro-batches of the same sizes, (n - k) / (n - 1). Pass steps
    (`Batches.grouped`) to measure steps, which the shuffle of micro-batches mixes again.

    Args:
        lengths: [n] ints >= 1, tokens per sample, by id.
        batches: micro-batches, or steps.
    Returns:
        about 0 to 1; 1 where there is nothing to mix: a single length, or one sample each.
    Source: correlation ratio, R. A. Fisher, Statistical Methods for Research Workers (1925).
    """
    spread, counts = np.log(lengths[batches.order].astype(np.float64)), batches.sizes
    if counts.size == spread.size or spread.min() == spread.max():
        return 1.0
    within_by_chance = (spread.size - counts.size) / (spread.size - 1)
    spread -= spread.mean()
    total = float(spread @ spread)
    between = float((batches.sums(spread) ** 2 / counts).sum())
    return (1 - between / total) / within_by_chance


@dataclasses.dataclass(frozen=True)
class WindowTrade:
    """What sorting within windows of `window` samples saves (padding of rows) and costs (mixing of lengths)."""

    window: int
    batch_overhead: float
    length_mixing: float
    length_mixing_of_steps: float


def window_trade(
    lengths: np.ndarray, rows: int, row_lengths: np.ndarray, windows: Sequence[int], per_step: int, seed: int
) -> list[WindowTrade]:
    """The trade of each window, for rows padded to the longest of their micro-batch.

    Args:
        lengths: [n] ints, tokens per sample.
        rows: samples of a micro-batch.
        row_lengths: [K] ints, ascending, the lengths that rows are padded to.
        windows: samples that are sorted together.
        per_step: micro-batches of a step, over all ranks.
        seed: of the shuffle.
    """
    found = []
    for window in windows:
        rng = np.random.default_rng(seed)
        batches = windowed_batches(lengths, rng.permutation(lengths.size), window, rows, row_lengths, rng)
        found.append(
            WindowTrade(
                window,
                batch_overhead(lengths, batches, row_lengths),
                length_mixing(lengths, batches),
                length_mixing(lengths, batches.grouped(per_step)),
            )
        )
    return found


def _row_indices(sizes: np.ndarray, order: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """[m] small unsigned ints: the bucket of each sample."""
    limit = int(boundaries[-1])
    if sizes.size and int(sizes.max()) > limit:
        place = int(np.argmax(sizes > limit))
        raise DataError(
            f"sample {int(order[place])} must fit the last row length ({limit}), got {int(sizes[place])} tokens; raise "
            "it or lower model.seq_length and choose a data.overlong policy"
        )
    indices = np.empty(sizes.size, np.min_scalar_type(len(boundaries)))
    for first in range(0, sizes.size, CHUNK_SAMPLES):
        part = slice(first, first + CHUNK_SAMPLES)
        indices[part] = bucket_of(sizes[part], boundaries)
    return indices


def _sort_windows(sizes: np.ndarray, window: int) -> np.ndarray:
    """[m] int64 places: within each window the largest first, equal ones in their order."""
    places = np.empty(sizes.size, np.int64)
    for first in range(0, sizes.size, window):
        part = sizes[first : first + window]
        smaller_by = (part.max() - part).astype(np.min_scalar_type(part.max()))  # 16 bits sort in linear time
        places[first : first + window] = np.argsort(smaller_by, kind="stable") + first
    return places
