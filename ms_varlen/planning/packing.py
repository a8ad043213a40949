"""Samples that fill a micro-batch together: best fit over a length histogram, and a shuffled variant.

Every packer puts each sample into exactly one pack, and never splits or joins samples.

- `pack_best_fit` makes almost the fewest packs, but puts hundreds of short samples of one length together, so a tight
  `max_segments` costs it several percent;
- `pack_shuffled` serves training: each pack is a random mixture, and the packs stand in random order.

The time depends on the number of different lengths; no Python loop runs over samples.
"""

import bisect
import dataclasses
import itertools
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ms_varlen.errors import DataError
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.buckets import BLOCK, length_counts

LONG_PART = 8
"""`pack_shuffled` places samples above capacity/8 by best fit and the others at random."""

SPREAD = 1.05
"""If short samples hold at least 25 % of all tokens, long samples may fill at most SPREAD times their token share of a
pack; the rest is left for short ones."""

RESERVE_PART = 128
"""capacity/128 of each pack is left for the samples that close its gap, so that they are more than the gaps."""

MAX_CLOSING = 16
"""Samples that close one gap at most. A small number keeps gaps alike, so that few groups describe them."""

WINDOW = 1 << 21
"""`pack_shuffled` packs this many samples at a time, drawn at random from all, so that memory does not grow."""

_NEW = -1
_EMPTY = "remove empty samples (data.min_tokens does)"
_OVERLONG = "raise batch.token_budget, or lower model.seq_length and choose a data.overlong policy"


class _Group(NamedTuple):
    """Packs that are alike: `packs` of them, room for `slots` samples more, begun as open group `origin`."""

    packs: int
    slots: int
    origin: int
    contents: tuple[tuple[int, int], ...]
    """(length, how many samples of it in each pack), in the order of placing."""


@dataclasses.dataclass(frozen=True)
class PackGroups:
    """Packs described by lengths: G groups of identical packs, with Q pieces (a length, and how often) in all.

    Attributes:
        packs: [G] int64, packs in each group.
        origins: [G] int64, the open group that the packs of a group were before; -1 for new packs.
        piece_group, piece_length, piece_times: [Q] int64, `times` samples of `length` in each pack of `group`; the
            pieces stand in the order of their groups.
    """

    packs: np.ndarray
    origins: np.ndarray
    piece_group: np.ndarray
    piece_length: np.ndarray
    piece_times: np.ndarray

    @property
    def num_packs(self) -> int:
        """The number of packs."""
        return int(self.packs.sum())

    @property
    def samples(self) -> np.ndarray:
        """[num_packs] int64, samples placed in each pack, group after group."""
        of_group = np.zeros(self.packs.size, np.int64)
        np.add.at(of_group, self.piece_group, self.piece_times)
        return np.repeat(of_group, self.packs)


def best_fit_histogram(counts: np.ndarray, capacity: int, max_segments: int) -> PackGroups:
    """Best fit decreasing over a histogram: how many packs a corpus needs, and the content of each.

    Identical packs are one group, so the time depends on the number of different lengths, not of samples: about 30 ms
    for 4096 lengths.

    Args:
        counts: [longest + 1] ints, how many samples have each length; ``counts[0]`` is 0.
        capacity: most tokens of a pack.
        max_segments: most samples of a pack.
    Raises:
        DataError: a length above the capacity, or a limit below 1.
    """
    if capacity < 1 or max_segments < 1:
        raise DataError(f"capacity and max_segments must be >= 1, got {capacity} and {max_segments}; raise them")
    if counts.size and counts[0]:
        raise DataError(f"counts[0] must be 0, got {int(counts[0])}; {_EMPTY}")
    if counts[capacity + 1 :].any():
        longest = int(np.flatnonzero(counts)[-1])
        raise DataError(f"counts[{longest}] must be 0, above the capacity of {capacity}; {_OVERLONG}")
    return _best_fit(counts, capacity, max_segments, np.zeros((0, 3), np.int64))


def _best_fit(counts: np.ndarray, capacity: int, max_segments: int, open_groups: np.ndarray) -> PackGroups:
    """Lengths from long to short, each into the smallest space that holds it; into new packs if none does.

    Args:
        open_groups: [g, 3] ints: space (1 to `capacity`), slots (>= 1) and number of packs that are begun already.
    """
    stacks: defaultdict[int, list[_Group]] = defaultdict(list)
    done: list[_Group] = []
    for origin, (space, slots, packs) in enumerate(open_groups.tolist()):
        stacks[space].append(_Group(packs, slots, origin, ()))
    spaces = sorted(stacks)  # occurring spaces only: few, however large the capacity
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(spaces, length)
            fitting = place < len(spaces)
            if fitting:
                space = spaces[place]
                group = stacks[space].pop()
            else:
                space, group = capacity, _Group(left, max_segments, _NEW, ())
            each = min(space // length, group.slots, left)
            packs = min(group.packs, left // each)
            left -= each * packs
            if fitting and packs < group.packs:
                stacks[space].append(group._replace(packs=group.packs - packs))
            elif fitting and not stacks[space]:
                del spaces[place]
            rest = space - each * length
            placed = _Group(packs, group.slots - each, group.origin, (*group.contents, (length, each)))
            if rest and placed.slots:
                if not stacks[rest]:
                    bisect.insort(spaces, rest)
                stacks[rest].append(placed)
            else:
                done.append(placed)
    return _as_arrays([*done, *(group for space in spaces for group in stacks[space])])


def _as_arrays(groups: list[_Group]) -> PackGroups:
    pieces = [(g, length, times) for g, group in enumerate(groups) for length, times in group.contents]
    heads = np.array([(group.packs, group.origin) for group in groups], np.int64).reshape(-1, 2)
    return PackGroups(*heads.T, *np.array(pieces, np.int64).reshape(-1, 3).T)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of several runs starts when they stand one after another."""
    return np.cumsum(sizes) - sizes


def _take(keys: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Where each taker starts in a pool that is sorted by key and used up, takers of one key in their order."""
    order = np.argsort(keys, kind="stable")
    starts = np.empty(keys.size, np.int64)
    starts[order] = _starts(amounts[order])
    return starts


def _runs(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The whole numbers of several runs, one run after another."""
    return np.arange(sizes.sum()) + np.repeat(starts - _starts(sizes), sizes)


def _write(groups: PackGroups, by_length: np.ndarray, slots: np.ndarray, order: np.ndarray) -> None:
    """Put samples in the places that the groups' pieces stand for.

    Args:
        by_length: [n] ints, the samples sorted by length.
        slots: [num_packs] ints, where in `order` the samples of each pack begin.
        order: written to.
    """
    taken = groups.packs[groups.piece_group] * groups.piece_times
    begins = _starts(taken)
    source = _take(groups.piece_length, taken)
    first_piece = _starts(np.bincount(groups.piece_group, minlength=groups.packs.size))
    columns = _starts(groups.piece_times)
    columns -= columns[first_piece[groups.piece_group]]
    first_pack = _starts(groups.packs)[groups.piece_group]
    for first in range(0, by_length.size, BLOCK):
        items = np.arange(first, min(first + BLOCK, by_length.size))
        piece = np.searchsorted(begins, items, side="right") - 1
        items -= begins[piece]
        pack, column = np.divmod(items, groups.piece_times[piece])
        order[slots[first_pack[piece] + pack] + columns[piece] + column] = by_length[source[piece] + items]


def _by_length(lengths: np.ndarray) -> np.ndarray:
    """[n] int64, places sorted by length; equal lengths keep their order."""
    # NumPy sorts integers of 16 bits by radix, in a fifth of the time.
    small = lengths.size and int(lengths.max()) < 1 << 16
    return np.argsort(lengths.astype(np.uint16) if small else lengths, kind="stable")


def _check(lengths: np.ndarray, capacity: int, max_segments: int) -> None:
    if lengths.size and int(lengths.max()) > capacity:
        place = int(np.argmax(lengths > capacity))
        raise DataError(
            f"sample {place} must fit a pack (batch.token_budget {capacity}), got {int(lengths[place])} tokens; "
            + _OVERLONG
        )
    if lengths.size and int(lengths.min()) < 1:
        place = int(np.argmax(lengths < 1))
        raise DataError(f"sample {place} must have tokens, got {int(lengths[place])}; {_EMPTY}")
    if max_segments < 1:
        raise DataError(f"max_segments must be >= 1, got {max_segments}; raise batch.max_segments")


def _fill(groups: PackGroups, lengths: np.ndarray) -> Batches:
    """Packs that hold samples of these lengths."""
    packs = Batches.of_sizes(np.empty(lengths.size, np.int64), groups.samples)
    _write(groups, _by_length(lengths), packs.offsets, packs.order)
    return packs


def pack_best_fit(lengths: np.ndarray, capacity: int, max_segments: int) -> Batches:
    """Best fit decreasing; samples of equal length are taken in their order, packs stand from long samples to short.

    Args:
        lengths: [n] ints, tokens per sample, 1 to `capacity`.
        capacity: most tokens of a pack.
        max_segments: most samples of a pack.
    Raises:
        DataError: a sample that is empty or above the capacity; the message gives its place.
    """
    _check(lengths, capacity, max_segments)
    return _fill(best_fit_histogram(length_counts(lengths), capacity, max_segments), lengths)


def pack_shuffled(lengths: np.ndarray, capacity: int, max_segments: int, rng: np.random.Generator) -> Batches:
    """Full packs of random samples in random order, for training.

    Samples are drawn into windows. In each window

    1. samples above capacity/8 are packed best fit, each pack up to the long samples' share of all tokens;
    2. the others, in random order, are laid end to end over what is left of these packs and over new ones::

           packs    |        |      |         |
           samples  aaabbbbcccddddeeffffgggghhh      b, d and g are cut: they wait for step 3

    3. those that an end cuts, and a reserve, go best fit into the gaps that are left;
    4. the packs are shuffled.

    Args:
        lengths: [n] ints, tokens per sample, 1 to `capacity`.
        capacity: most tokens of a pack.
        max_segments: most samples of a pack.
        rng: decides everything random, so the same state gives the same packs.
    Raises:
        DataError: a sample that is empty or above the capacity; the message gives its place.
    """
    _check(lengths, capacity, max_segments)
    order = rng.permutation(lengths.size)
    windows = np.linspace(0, lengths.size, max(1, -(-lengths.size // WINDOW)) + 1).astype(np.int64)
    sizes = []
    for first, last in itertools.pairwise(windows.tolist()):
        ids = order[first:last]
        places, window_sizes = _pack_window(lengths[ids], capacity, max_segments, rng)
        order[first:last] = ids[places]
        sizes.append(window_sizes)
    return Batches.of_sizes(order, np.concatenate(sizes))


def _pack_window(
    lengths: np.ndarray, capacity: int, max_segments: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`pack_shuffled` for samples that stand in random order.

    Returns:
        [n] int64 places of `lengths`, pack after pack, and [k] int64 samples in each pack.
    """
    is_long = lengths > capacity // LONG_PART
    long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    long_order, long_sizes, space = _pack_long(lengths, long, capacity, max_segments)
    new = _new_packs(lengths[short], max_segments - long_sizes, space, capacity, max_segments)
    long_sizes, space = np.append(long_sizes, np.zeros(new, np.int64)), np.append(space, np.full(new, capacity))

    starts, laid_sizes = _lay_end_to_end(lengths[short], max_segments - long_sizes, space, capacity)
    laid = _runs(starts, laid_sizes)
    ends = np.append(0, np.cumsum(lengths[short], dtype=np.int64))
    space -= ends[starts + laid_sizes] - ends[starts]
    rest = np.delete(short, laid)
    slots = max_segments - long_sizes - laid_sizes
    closing, closed = _close_gaps(lengths[rest], slots, space, capacity, max_segments)

    sizes = np.zeros(max(space.size, int(closed.max(initial=-1)) + 1), np.int64)
    sizes[: space.size] = long_sizes + laid_sizes
    before_closing = sizes[closed]
    sizes[closed] += closing.samples
    shuffled = rng.permutation(np.flatnonzero(sizes))
    begins = np.zeros(sizes.size, np.int64)
    begins[shuffled] = _starts(sizes[shuffled])

    places = np.empty(lengths.size, np.int64)
    begun = begins[: space.size]
    places[_runs(begun, long_sizes)] = long[long_order]
    places[_runs(begun + long_sizes, laid_sizes)] = short[laid]
    _write(closing, rest[_by_length(lengths[rest])], begins[closed] + before_closing, places)
    return places, sizes[shuffled]


def _pack_long(
    lengths: np.ndarray, long: np.ndarray, capacity: int, max_segments: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Long samples best fit, spread over all packs where enough short samples will fill these.

    Spreading keeps the packs alike (in samples, so that fewer meet the cap, and in attention), and is taken back
    step by step while it makes more packs than are needed.

    Args:
        lengths: [n] ints of all samples.
        long: [m] ints, places of the long ones.
    Returns:
        [m] int64 order of `long`, and [k] int64 each: samples and free tokens of each pack.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    long_tokens = int(lengths[long].sum(dtype=np.int64))
    fewest = max(-(-tokens // capacity), -(-lengths.size // max_segments))
    part = SPREAD * long_tokens / max(tokens, 1) if 4 * long_tokens <= 3 * tokens else 1.0
    while True:
        limit = max(1, int(capacity * min(part, 1.0)))
        limited = np.minimum(lengths[long], limit)
        groups = best_fit_histogram(length_counts(limited), limit, max_segments)
        if part >= 1.0 or groups.num_packs <= fewest:
            break
        part *= 1.25
    packs = _fill(groups, limited)
    ends = np.append(0, np.cumsum(lengths[long[packs.order]], dtype=np.int64))
    return packs.order, packs.sizes, capacity - np.diff(ends[packs.offsets])


def _new_packs(
    short_lengths: np.ndarray, slots: np.ndarray, space: np.ndarray, capacity: int, max_segments: int
) -> int:
    """How many packs short samples need in addition to those with `space` tokens and `slots` samples free."""
    tokens = int(short_lengths.sum(dtype=np.int64)) - int(space[slots > 0].sum())
    samples = short_lengths.size - int(slots[space > 0].sum())
    return max(0, -(-tokens // capacity), -(-samples // max_segments))


def _lay_end_to_end(
    lengths: np.ndarray, slots: np.ndarray, space: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut samples, in their order, where the packs' spaces end; a sample that a cut goes through is in no pack.

    Args:
        lengths: [n] ints, none above capacity/8.
        slots, space: [k] int64, samples and tokens that each pack can take.
    Returns:
        [k] int64 each: the first sample of each pack, and how many it takes.
    """
    mean = float(lengths.mean(dtype=np.float64)) if lengths.size else 0.0
    most = slots - slots // 16 - (slots > 1)  # leaves slots to close the gap with
    room = np.minimum(space - capacity // RESERVE_PART, most * mean).astype(np.int64)
    room[space <= capacity // LONG_PART] = 0
    cuts = np.cumsum(room)
    ends = np.cumsum(lengths, dtype=np.int64)
    first = np.searchsorted(ends - lengths, cuts - room, side="left")
    last = np.searchsorted(ends, cuts, side="right")
    return first, np.clip(last - first, 0, most)


def _close_gaps(
    lengths: np.ndarray, slots: np.ndarray, space: np.ndarray, capacity: int, max_segments: int
) -> tuple[PackGroups, np.ndarray]:
    """Best fit of the remaining samples into what is left of each pack, and into new packs.

    Returns:
        the groups, and [num_packs] int64, which pack each of theirs is; new packs are numbered after the others.
    """
    gaps = np.flatnonzero((space > 0) & (slots > 0))
    kinds, kind = np.unique(space[gaps] * MAX_CLOSING + np.minimum(slots[gaps], MAX_CLOSING) - 1, return_inverse=True)
    open_groups = np.stack([kinds // MAX_CLOSING, kinds % MAX_CLOSING + 1, np.bincount(kind, minlength=kinds.size)], 1)
    groups = _best_fit(length_counts(lengths), capacity, max_segments, open_groups)
    new = int(groups.packs[groups.origins == _NEW].sum())
    pool = np.append(gaps[np.argsort(kind, kind="stable")], np.arange(space.size, space.size + new))
    origins = np.where(groups.origins == _NEW, kinds.size, groups.origins)
    return groups, pool[_runs(_take(origins, groups.packs), groups.packs)]
