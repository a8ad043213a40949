"""The K sizes that waste least if each length is rounded up to one of them.

A histogram is enough, so the same functions choose lengths of rows (from the lengths of samples) and sizes of T (from
the tokens of micro-batches). Everywhere a length equal to a boundary belongs to that boundary::

    boundaries  64 128 256        lengths 64 65 256  ->  buckets 0 1 2
"""

from collections.abc import Callable

import numpy as np

from ms_varlen.errors import LengthsError, ShapesError

WORTH_A_BUCKET = 0.01
"""One more bucket, which is a graph to compile, must save this share of the work on real tokens."""

BLOCK = 1 << 20
"""Samples looked at together, so that memory does not grow with their number."""


def length_counts(lengths: np.ndarray) -> np.ndarray:
    """How many samples have each length.

    Args:
        lengths: [n] ints >= 1, tokens per sample.
    Returns:
        [longest + 1] int64; entry s counts the samples of s tokens.
    Raises:
        LengthsError: an empty sample; the message gives its place.
    """
    if lengths.size and int(lengths.min()) < 1:
        place = int(np.argmax(lengths < 1))
        raise LengthsError(
            f"lengths[{place}] must be >= 1, got {int(lengths[place])}; remove empty samples (data.min_tokens does)"
        )
    counts = np.zeros(int(lengths.max(initial=0)) + 1, np.int64)
    for first in range(0, lengths.size, BLOCK):
        counts += np.bincount(lengths[first : first + BLOCK], minlength=counts.size)
    return counts


def batch_maximum_counts(counts: np.ndarray, rows: int) -> np.ndarray:
    """How often each length is expected to be the longest of `rows` random samples, which rows are padded to.

    Args:
        counts: [longest + 1] ints, how many samples have each length, some of them the longest.
    Returns:
        [longest + 1] int64, rounded, about as many in all; the longest occurs.
    """
    samples = counts.sum()
    found = np.rint(samples * np.diff((np.cumsum(counts) / samples) ** rows, prepend=0.0)).astype(np.int64)
    found[-1] = max(found[-1], 1)
    return found


def optimal_boundaries(
    counts: np.ndarray,
    cost: Callable[[np.ndarray], np.ndarray],
    num_buckets: int | None,
    divisor: int,
    cost_per_bucket: float = 0.0,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """The boundaries that cost least over a histogram.

    By dynamic programming over multiples of `divisor`: with N_j lengths up to candidate b_j, k buckets cost at least
    ``f_k[j] = min_i f_(k-1)[i] + cost(b_j) * (N_j - N_i)``. The best i never falls as j grows, because cost grows; so a
    layer takes M log M steps for M candidates. 4096/16 candidates and 32 buckets take 10 ms.

    Args:
        counts: [longest + 1] ints, how many samples have each length; ``counts[0]`` is 0.
        cost: of one sequence padded to each length, [n] ints -> [n] float64, increasing; ``CostModel.cost`` or
            ``TOKENS.cost``.
        num_buckets: the most boundaries; None: as many as `cost_per_bucket` allows.
        divisor: boundaries are multiples of it.
        cost_per_bucket: what one more bucket must save at least, in units of `cost` over the histogram: the price of
            compiling its graph.
        lengths: [k] ints, increasing, the length that each of [k] `counts` belongs to; None: its place.
    Returns:
        [K] int64, increasing, the last at least the longest length; K is below `num_buckets` where more save nothing.
    Raises:
        ShapesError: no limit on the buckets, or a cost that does not increase.
        LengthsError: an empty histogram, or lengths of 0.
    """
    if num_buckets is None and cost_per_bucket <= 0:
        raise ShapesError("cost_per_bucket must be > 0 when num_buckets is None, got 0; set one of them")
    if num_buckets is not None and num_buckets < 1:
        raise ShapesError(f"num_buckets must be >= 1, got {num_buckets}; raise shapes.num_buckets")
    candidates, reached = _candidates(counts, divisor, lengths)
    costs = np.concatenate([[0.0], cost(candidates[1:])])
    if (np.diff(costs) <= 0).any():
        raise ShapesError("cost must increase with the length; pass the cost of one sequence of each length")
    best, splits = costs * reached, [np.zeros(candidates.size, np.int64)]
    while num_buckets is None or len(splits) < num_buckets:
        split = _best_splits(best, costs, reached)
        layer = best[split] + costs * (reached - reached[split])
        # Each further bucket saves at most as much as the one before it: stop at the first that does not pay.
        if best[-1] - layer[-1] <= cost_per_bucket:
            break
        best = layer
        splits.append(split)
    return _trace(candidates, splits)


def auto_boundaries(
    counts: np.ndarray,
    cost: Callable[[np.ndarray], np.ndarray],
    num_buckets: int | None,
    most: int,
    divisor: int,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """The boundaries that `auto` in a recipe picks: optimal ones, as many as pay unless a number is given.

    A bench's measurements have no part in it: a plan must stay the same from one run to the next.

    Args:
        counts, cost, divisor, lengths: as in `optimal_boundaries`.
        num_buckets: the most boundaries; None for as many as save `WORTH_A_BUCKET` each.
        most: the most boundaries if `num_buckets` is None: graphs that are allowed.
    Returns:
        [K] int64, increasing.
    """
    if num_buckets is not None:
        return optimal_boundaries(counts, cost, num_buckets, divisor, lengths=lengths)
    real = counts[1:] @ cost(np.arange(1, counts.size)) if lengths is None else counts @ cost(lengths)
    return optimal_boundaries(counts, cost, most, divisor, WORTH_A_BUCKET * float(real), lengths)


def _candidates(counts: np.ndarray, divisor: int, lengths: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Multiples of `divisor` that some length is rounded up to, and how many lengths each reaches; both start at 0."""
    counts = np.asarray(counts, np.int64)
    occurring = np.flatnonzero(counts)
    counts = counts[occurring]
    if lengths is not None:
        occurring = lengths[occurring]
    if not occurring.size or occurring[0] == 0:
        raise LengthsError(
            "counts must hold at least one length, and none of 0 tokens, "
            f"got {int(counts.sum())} lengths, {int(counts[:1].sum())} of them 0"
        )
    multiples, cells = np.unique(-(-occurring // divisor), return_inverse=True)
    reached = np.cumsum(np.bincount(cells, counts))
    return np.append(0, multiples * divisor), np.append(0.0, reached)


def _best_splits(best: np.ndarray, costs: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """For every j the first i <= j where ``best[i] - costs[j] * reached[i]`` is least.

    Solved on a grid that is halved again and again: i of a new j lies between those of its neighbours.

    Args:
        best, costs, reached: [M] float64, all increasing.
    Returns:
        [M] int64, never falling.
    """
    last = best.size - 1
    splits = np.full(last + 2, last)
    splits[0] = 0
    step = 1 << last.bit_length()
    while step > 1:
        step //= 2
        middle = np.arange(step, last + 1, 2 * step)
        low = splits[middle - step]
        high = np.minimum(splits[np.minimum(middle + step, last + 1)], middle)
        width = high - low + 1
        begin = np.cumsum(width) - width
        i = np.arange(begin[-1] + width[-1]) + np.repeat(low - begin, width)
        value = best[i] - np.repeat(costs[middle], width) * reached[i]
        least = np.flatnonzero(value == np.repeat(np.minimum.reduceat(value, begin), width))
        splits[middle] = i[least[np.searchsorted(least, begin)]]
    return splits[:-1]


def _trace(candidates: np.ndarray, splits: list[np.ndarray]) -> np.ndarray:
    """The boundaries behind the last entry of the last layer."""
    at = [candidates.size - 1]
    for split in reversed(splits):
        at.append(int(split[at[-1]]))
    return np.setdiff1d(candidates[at], [0])


def bucket_of(lengths: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """The smallest bucket that holds each length; equal to a boundary belongs to that boundary.

    Args:
        lengths: [n] ints >= 1, tokens.
        boundaries: [K] ints, increasing.
    Returns:
        [n] int64, each from 0 to K - 1.
    Raises:
        LengthsError: a length above the last boundary; the message gives its place.
    """
    buckets = np.searchsorted(boundaries, lengths, side="left")
    if lengths.size and int(lengths.max()) > boundaries[-1]:
        place = int(np.argmax(lengths > boundaries[-1]))
        raise LengthsError(
            f"lengths[{place}] must be <= {int(boundaries[-1])}, the last bucket, got {int(lengths[place])}; "
            "append a larger bucket, or lower model.seq_length and choose a data.overlong policy"
        )
    return buckets
