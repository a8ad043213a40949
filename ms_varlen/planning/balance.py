"""The samples of a step dealt to ranks and micro-batches so that all ranks finish together.

A step waits for its slowest rank, and a rank's time is the sum over its micro-batches. So ranks are balanced by cost.
Micro-batches are not balanced; each keeps to the token budget and the cap of segments, and none is empty.
The longest processing time first (LPT) goes to the least loaded rank; then the slowest rank shares some samples
again with a faster one, the best of all ways to do so, and so on. That gets further than swaps of two samples where
budgets are nearly full, and where padding grows in jumps. What a step trains stays the same, so the loss and the
gradient do too.

Many steps are worked on at once: 0.3 us a sample with 8 parts, 0.4 us with 32. More parts than that are divided into
groups: whole ranks are dealt to groups of equal work, then the samples of a group to its ranks. On lognormal lengths
(median 180, P99 2048) the slowest of 8 ranks with 16 samples each is 0.22 % over the mean. A budget that is nearly full
leaves less choice: the rank with a sample as long as the budget takes no other, and the others cannot take more.

Axis letters: `S` steps worked on together, `N` samples of the fullest step, `P` parts (micro-batches of all ranks),
`R` ranks.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ms_varlen.planning.batches import CHUNK_BATCHES, Batches

GOOD_ENOUGH = 0.003
"""A step whose slowest rank is at most this much over the mean is left alone; less is lost in the noise of a step."""

ATTEMPTS = 32
"""Most times that a step's slowest rank shares samples again."""

SHARED = 10
"""Samples of two ranks that are shared again at a time: each of the 2 ** 10 ways is tried. One more takes twice the
time; on the built-in corpus the slowest of two ranks is then 0.02 % faster."""

STEPS_AT_ONCE = 8
"""Steps in which samples are shared again together: their 2 ** `SHARED` ways stay in the cache."""

CHUNK_SAMPLES = 400_000
"""Samples worked on together: enough that NumPy's overhead vanishes, few enough to stay in the cache."""

GROUP_PARTS = 32
"""Parts whose samples are dealt together at most; the time for a sample grows with them."""

FEWEST_RANKS = 8
"""Fewest ranks of a group; with fewer, its work depends too much on the samples that it happens to get."""

STEPS_TOGETHER = 32
"""Steps whose whole micro-batches are sorted by cost together: more are balanced better and mixed less."""

Costs = Callable[[np.ndarray], np.ndarray]
"""Sample ids [m] -> work of each, [m] floats above 0. A function, for an array of 100 million samples takes 0.8 GB."""


@dataclasses.dataclass(frozen=True)
class StepGrid:
    """The parts of a step and the limits of each. Part p is micro-batch ``p % micro_batches`` of rank
    ``p // micro_batches``.

    Attributes:
        world_size: number of ranks.
        micro_batches: per step and rank.
        token_budget: most tokens of a part.
        max_segments: most samples of a part.
        padding: [token_budget + 1] floats, work of a part's padding by its tokens; by default there is none.
    """

    world_size: int
    micro_batches: int
    token_budget: int
    max_segments: int
    padding: np.ndarray | None = None

    @property
    def parts(self) -> int:
        """P, micro-batches of a step over all ranks."""
        return self.world_size * self.micro_batches

    @property
    def groups(self) -> int:
        """Groups of ranks that are balanced one by one: the fewest that `GROUP_PARTS` allows, or 1."""
        most = GROUP_PARTS // self.micro_batches
        sizes = [size for size in range(FEWEST_RANKS, most + 1) if self.world_size % size == 0]
        return self.world_size // max(sizes) if self.world_size > most and sizes else 1


def imbalance(costs: np.ndarray) -> np.ndarray:
    """How much longer the slowest rank takes than the mean: max / mean - 1 over the last axis.

    Args:
        costs: [..., R] floats above 0, work per rank.
    Returns:
        [...] float64; 0 is balanced.
    """
    return costs.max(axis=-1) / costs.mean(axis=-1) - 1


def rank_costs(costs: Costs, batches: Batches, grid: StepGrid) -> np.ndarray:
    """[steps, R] float64, the work of each rank in each whole step of a plan."""
    work = micro_batch_costs(costs, batches.first(len(batches) // grid.parts * grid.parts))
    return work.reshape(-1, grid.world_size, grid.micro_batches).sum(axis=2)


def micro_batch_costs(costs: Costs, batches: Batches) -> np.ndarray:
    """[k] float64, the work of each micro-batch of a plan."""
    work, offsets = np.zeros(len(batches)), batches.offsets
    for first in range(0, work.size, CHUNK_BATCHES):
        last = min(first + CHUNK_BATCHES, work.size)
        values = costs(batches.ids(first, last)).astype(np.float64)
        work[first:last] = np.add.reduceat(values, offsets[first:last] - offsets[first])
    return work


def balance_plan(lengths: np.ndarray, costs: Costs, batches: Batches, grid: StepGrid) -> Batches:
    """Deal the samples of every whole step of a plan again; each step keeps its samples, and no step gets worse.

    The micro-batches after the last whole step stay as they are. Within a micro-batch samples keep their order.

    Args:
        lengths: [n] ints, tokens per sample, by id.
        costs: work per sample.
        batches: each holds to the limits of `grid`.
    """
    steps = len(batches) // grid.parts
    if grid.world_size == 1 or steps == 0:
        return batches
    if grid.groups > 1:
        batches = _deal_to_groups(costs, batches, grid)
        steps, grid = steps * grid.groups, dataclasses.replace(grid, world_size=grid.world_size // grid.groups)
    order, offsets = batches.order.copy(), batches.offsets.astype(np.int64)
    step_offsets = offsets[: steps * grid.parts + 1 : grid.parts].copy()
    per_chunk = max(1, int(CHUNK_SAMPLES / np.diff(step_offsets).mean()))
    for first in range(0, steps, per_chunk):
        last = min(first + per_chunk, steps)
        bounds = slice(first * grid.parts, last * grid.parts + 1)
        ids = order[step_offsets[first] : step_offsets[last]]
        counts, sizes = np.diff(step_offsets[first : last + 1]), np.diff(offsets[bounds])
        parts = _balance_chunk(lengths[ids], costs(ids), counts, sizes, grid)
        order[step_offsets[first] : step_offsets[last]] = ids[np.argsort(parts, kind="stable")]
        filled = np.bincount(parts, minlength=sizes.size)
        offsets[bounds.start + 1 : bounds.stop] = step_offsets[first] + np.cumsum(filled)
    return Batches(order, offsets)


def balance_micro_batches(costs: np.ndarray, world_size: int, micro_batches: int) -> np.ndarray:
    """Deal whole micro-batches to the ranks of their step, for plans whose micro-batches must stay as they are.

    Args:
        costs: [k] floats above 0, work per micro-batch; those after the last whole step stay where they are.
    Returns:
        [k] int64, the micro-batches in their new order: every step keeps its own, each rank `micro_batches` of them.
    """
    if micro_batches == 1:
        return np.arange(costs.size)  # the slowest rank has the costliest micro-batch, wherever it is
    # Here a micro-batch is a sample of one token, and a rank is a part that takes `micro_batches` of them.
    grid = StepGrid(world_size, 1, micro_batches, micro_batches)
    whole = costs.size // (world_size * micro_batches) * world_size * micro_batches
    offsets = np.arange(0, whole + 1, micro_batches)
    dealt = balance_plan(np.ones(whole, np.int32), costs.take, Batches(np.arange(whole), offsets), grid)
    return np.append(dealt.order, np.arange(whole, costs.size))


def steps_of_like_costs(costs: np.ndarray, per_step: int, rng: np.random.Generator) -> np.ndarray:
    """Micro-batches in an order in which those of a step cost about the same, for plans that keep them whole.

    Within windows of `STEPS_TOGETHER` steps they are sorted by cost and cut into steps, which are shuffled. On the
    built-in corpus, 8 ranks, a model of hidden size 256, the slowest rank is 0.9 % over the mean instead of 11 (packs),
    5 instead of 152 (random rows padded to their longest), 2 instead of 27 (buckets). Steps of packs and of rows mix
    lengths as before (0.98, 0.96); steps of several buckets become steps of one, mostly (0.15 instead of 0.76).

    Args:
        costs: [k] floats above 0, work per micro-batch; those after the last whole step stay where they are.
        per_step: micro-batches of a step over all ranks.
    Returns:
        [k] int64.
    """
    whole = costs.size // per_step * per_step
    windows = np.arange(whole) // (STEPS_TOGETHER * per_step)
    steps = np.lexsort((costs[:whole], windows)).reshape(-1, per_step)
    shuffled = np.lexsort((rng.random(len(steps)), np.arange(len(steps)) // STEPS_TOGETHER))
    return np.append(steps[shuffled], np.arange(whole, costs.size))


def _deal_to_groups(costs: Costs, batches: Batches, grid: StepGrid) -> Batches:
    """The ranks of each step in another order, so that each group of ranks has about the same work."""
    work = rank_costs(costs, batches, grid).ravel()
    ranks = balance_micro_batches(work, grid.groups, grid.world_size // grid.groups)
    dealt = (ranks[:, None] * grid.micro_batches + np.arange(grid.micro_batches)).ravel()
    return batches.reordered(np.append(dealt, np.arange(dealt.size, len(batches))))


def _balance_chunk(
    lengths: np.ndarray, costs: np.ndarray, counts: np.ndarray, sizes: np.ndarray, grid: StepGrid
) -> np.ndarray:
    """Parts, numbered over all steps, of the samples of some steps.

    Args:
        lengths, costs: samples one after another, as they are grouped now.
        counts: [S] samples per step.
        sizes: [S*P] samples per part, as they are grouped now.
    """
    real = np.arange(counts.max()) < counts[:, None]
    square_lengths, square_costs = (np.zeros(real.shape, values.dtype) for values in (lengths, costs))
    square_lengths[real], square_costs[real] = lengths, costs
    before = np.full(real.shape, -1)
    before[real] = np.repeat(np.tile(np.arange(grid.parts), counts.size), sizes)
    steps = _Steps(square_lengths, square_costs, counts, grid)
    parts = steps.longest_first()
    worse = ((parts < 0) & real).any(axis=1)
    parts[worse] = before[worse]
    worse = steps.loads(parts).max(axis=1) > steps.loads(before).max(axis=1)
    parts[worse] = before[worse]
    return (steps.share_again(parts) + np.arange(counts.size)[:, None] * grid.parts)[real]


class _Steps:
    """The samples of S steps, in a rectangle whose rows are filled up with nothing.

    Args:
        lengths, costs: [S, N].
        counts: [S], samples per step.
        grid: what a part may hold.
    """

    def __init__(self, lengths: np.ndarray, costs: np.ndarray, counts: np.ndarray, grid: StepGrid):
        self.lengths, self.costs = lengths.astype(np.int64), costs.astype(np.float64)
        self.counts, self.grid = counts, grid

    def _padding(self, tokens: np.ndarray) -> np.ndarray:
        """Work of the padding of parts that hold so many tokens, [...]; more than the budget counts as the budget."""
        if self.grid.padding is None:
            return np.zeros(tokens.shape)
        return self.grid.padding.take(tokens.astype(np.int64), mode="clip")

    def _per_part(self, values: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """[S, P] sums of [S, N] values; part -1 counts nowhere."""
        keys = parts + 1 + np.arange(parts.shape[0])[:, None] * (self.grid.parts + 1)
        sums = np.bincount(keys.ravel(), values.ravel(), parts.shape[0] * (self.grid.parts + 1))
        return sums.reshape(-1, self.grid.parts + 1)[:, 1:]

    def loads(self, parts: np.ndarray, steps: np.ndarray | slice = slice(None)) -> np.ndarray:
        """[s, R] work per rank, padding included, of some steps."""
        work = self._per_part(self.costs[steps], parts[steps])
        work = work + self._padding(self._per_part(self.lengths[steps], parts[steps]))
        return work.reshape(-1, self.grid.world_size, self.grid.micro_batches).sum(axis=2)

    def longest_first(self) -> np.ndarray:
        """[S, N] parts: costly samples first, each to the least loaded rank that has room, -1 without room."""
        grid, (steps, samples) = self.grid, self.costs.shape
        rows = np.arange(steps)
        by_cost = np.argsort(-self.costs, axis=1, kind="stable")
        lengths = np.take_along_axis(self.lengths, by_cost, axis=1).T.copy()
        costs = np.take_along_axis(self.costs, by_cost, axis=1).T.copy()
        room = np.full((steps, grid.parts), grid.token_budget)
        segments = np.zeros((steps, grid.parts), np.int64)
        loads = np.zeros((steps, grid.world_size, grid.micro_batches))  # a rank's load, repeated for each of its parts
        empty = np.full(steps, grid.parts)
        parts = np.full((steps, samples), -1)
        for j in range(samples):
            free = room >= lengths[j, :, None]
            scarce = np.flatnonzero((self.counts - j <= empty) & (empty > 0))
            free[scarce] &= segments[scarce] == 0  # as many samples as empty parts are left: one each
            part = np.where(free, loads.reshape(steps, -1), np.inf).argmin(axis=1)
            placed = free[rows, part] & (j < self.counts)
            s, p = rows[placed], part[placed]
            parts[s, j] = p
            room[s, p] -= lengths[j, s]
            segments[s, p] += 1
            empty[s] -= segments[s, p] == 1
            room[s, p] = np.where(segments[s, p] < grid.max_segments, room[s, p], -1)
            loads[s, p // grid.micro_batches] += costs[j, s, None]
        result = np.empty_like(parts)
        np.put_along_axis(result, by_cost, parts, axis=1)
        return result

    def share_again(self, parts: np.ndarray) -> np.ndarray:
        """[S, N] parts, improved: no step's slowest rank gets slower."""
        parts = parts.copy()
        active = np.arange(parts.shape[0])
        for attempt in range(ATTEMPTS if self.grid.world_size > 1 else 0):
            loads = self.loads(parts, active)
            floor = self.costs[active].max(axis=1)  # a single sample; what pads it may go to others
            active = active[(imbalance(loads) > GOOD_ENOUGH) & (loads.max(axis=1) > floor)]
            for piece in np.array_split(active, np.arange(STEPS_AT_ONCE, active.size, STEPS_AT_ONCE)):
                parts[piece] = self._shared_once(parts, piece, attempt)
        return parts

    def _shared_once(self, parts: np.ndarray, chosen: np.ndarray, attempt: int) -> np.ndarray:
        """Try all ways to share some samples of the slowest rank and a faster one.

        Args:
            parts: [S, N].
            chosen: [s] ints, the steps.
            attempt: each takes other samples, the next rank from the fastest on, and other micro-batches of the two.
        Returns:
            [s, N] parts of the chosen steps, with the best way where it makes the slowest rank faster.
        """
        grid, now, rows = self.grid, parts[chosen], np.arange(chosen.size)[:, None]
        loads = self.loads(parts, chosen)
        ranks = loads.argsort(axis=1, kind="stable")[:, [-1, attempt % (grid.world_size - 1)]]
        micro_batches = np.array([attempt, attempt // grid.micro_batches]) % grid.micro_batches
        slow, fast = np.split(ranks * grid.micro_batches + micro_batches, 2, axis=1)

        # Multiples of a large odd number, modulo a power of two, are scattered: some samples from all over the step.
        pooled = (now == slow) | (now == fast)
        scattered = np.arange(1, now.shape[1] + 1) * (2654435761 * (2 * attempt + 1) % 2**32) % 2**32
        picked = np.where(pooled, scattered, 2**32).argsort(axis=1, kind="stable")[:, :SHARED]
        pooled, before = (np.take_along_axis(values, picked, axis=1) for values in (pooled, now))

        # A part holds tokens, work, samples. Bit k of a way says whether the slow part gets the k-th picked sample.
        held = np.stack([self.lengths[chosen], self.costs[chosen], np.ones(now.shape)])
        samples = np.where(pooled, np.take_along_axis(held, picked[None], axis=2), 0)  # [3, s, SHARED]
        totals = np.stack([self._per_part(values, now) for values in held])
        gets = totals[:, rows, slow]
        both = gets + totals[:, rows, fast]
        for k in range(picked.shape[1]):
            without = gets - samples[:, :, k, None] * (before[:, k, None] == slow)
            gets = np.concatenate([without, without + samples[:, :, k, None]], axis=2)  # [3, s, 2 ** (k + 1)]
        leaves = both - gets

        padded = totals[1] + self._padding(totals[0])
        after = np.maximum(
            *(
                loads[rows, ranks[:, side, None]] - padded[rows, part] + way[1] + self._padding(way[0])
                for side, (part, way) in enumerate([(slow, gets), (fast, leaves)])
            )
        )
        tokens, _, segments = np.maximum(gets, leaves)
        empty = np.minimum(gets[2], leaves[2]) == 0
        after[(tokens > grid.token_budget) | (segments > grid.max_segments) | empty] = np.inf
        best = after.argmin(axis=1)[:, None]
        better = after[rows, best] < loads.max(axis=1)[:, None] * (1 - 1e-9)  # float noise is no gain
        dealt = np.where(best >> np.arange(picked.shape[1]) & 1, slow, fast)
        np.put_along_axis(now, picked, np.where(pooled & better, dealt, before), axis=1)
        return now
