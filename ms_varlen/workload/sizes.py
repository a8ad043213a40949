"""From a recipe and its samples' lengths to plan settings, sizes of T and the layout."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.data.store.store import TokenStore
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.planning.buckets import auto_boundaries, batch_maximum_counts, length_counts
from ms_varlen.planning.cost import TOKENS, CostModel
from ms_varlen.planning.plan import EpochPlans, PlanSettings, SharePlan
from ms_varlen.planning.rows import bucket_rows, divisor_boundaries
from ms_varlen.recipe.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class SampleLengths:
    """The lengths that a plan is made from.

    Attributes:
        train: [n] ints, tokens per sample.
        fingerprint: a hash of them.
        longest_held_out: of the samples for evaluation, in tokens; 0 without any.
    """

    train: np.ndarray
    fingerprint: str
    longest_held_out: int

    @classmethod
    def of(cls, store: TokenStore) -> "SampleLengths":
        """The lengths of a token store."""
        return cls(np.asarray(store.train.lengths), store.train.lengths_fingerprint, store.eval.longest)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, those for evaluation included."""
        return max(int(self.train.max(initial=0)), self.longest_held_out)

    @property
    def counts(self) -> np.ndarray:
        """[longest + 1] int64, how many samples have each length. Evaluation must fit too, so the longest held-out
        sample counts as one of them.
        """
        counts = length_counts(self.train)
        counts = np.pad(counts, (0, max(0, self.longest_held_out + 1 - counts.size)))
        if self.longest_held_out:
            counts[self.longest_held_out] += 1
        return counts


def plan_lengths(
    recipe: Recipe, lengths: SampleLengths, cost: CostModel, world_size: int = 1, share: SharePlan | None = None
) -> tuple[EpochPlans, TokenShapes, Layout]:
    """The plans of a recipe on some lengths, the sizes of T, and how micro-batches are laid out."""
    row_lengths = recipe_row_lengths(recipe, lengths, cost)
    settings = plan_settings(recipe, row_lengths, cost, world_size)
    plans = EpochPlans(lengths.train, lengths.fingerprint, settings, share)
    shapes = recipe_shapes(recipe, plans, row_lengths, most_sizes(recipe, lengths))
    rows = recipe.batch.size if recipe.mode.sized_by_rows else 0
    return plans, shapes, Layout(recipe.mode, shapes, recipe.model.seq_length, rows=rows, row_lengths=row_lengths)


def recipe_row_lengths(recipe: Recipe, lengths: SampleLengths, cost: CostModel) -> tuple[int, ...]:
    """Lengths that rows may have, increasing; empty if samples lie one after another."""
    divisor, seq_length = recipe.shapes.divisor, recipe.model.seq_length
    if not recipe.mode.in_rows:
        return ()
    if not recipe.sizes.has_row_buckets:
        if recipe.batch.pad_to == "max":
            return (seq_length,)
        return tuple(divisor_boundaries(min(seq_length, lengths.longest), divisor).tolist())
    if isinstance(recipe.shapes.row_buckets, list):
        return tuple(recipe.shapes.row_buckets)
    return auto_row_lengths(recipe, lengths, cost)


def auto_row_lengths(recipe: Recipe, lengths: SampleLengths, cost: CostModel) -> tuple[int, ...]:
    """The lengths of rows, increasing, that cost least FLOPs on a corpus: `shapes.row_buckets: auto`."""
    counts, of_row = lengths.counts, cost.of_row
    if not recipe.mode.follows_lengths:
        of_row = cost
        if recipe.batch.window is None:  # rows of a window are padded to about their own lengths
            counts = batch_maximum_counts(counts, recipe.batch.size)
    num_buckets, most = recipe.shapes.num_buckets, most_sizes(recipe, lengths)
    return tuple(auto_boundaries(counts, of_row.cost, num_buckets, most, recipe.shapes.divisor).tolist())


def most_sizes(recipe: Recipe, lengths: SampleLengths) -> int:
    """The most sizes of T, a graph each, that `graph.max_graphs` leaves after the optimizer and the evaluation."""
    evaluates = recipe.train.eval_every is not None and lengths.longest_held_out > 0
    return max(1, recipe.graph.max_graphs - 1 - evaluates)


def plan_settings(recipe: Recipe, row_lengths: tuple[int, ...], cost: CostModel, world_size: int = 1) -> PlanSettings:
    """The plan settings of a recipe. The cap of segments leaves room for those that padding forms.

    Sizes of T decide how samples are dealt to several ranks, never which samples make a step.
    """
    batch, mode, shapes = recipe.batch, recipe.mode, recipe.shapes
    segments = batch.max_segments
    if not mode.sized_by_rows:
        segments -= recipe.sizes.tail_segments
    if mode.splits_rows:
        segments //= 2
    deals_samples = mode.deals_samples and world_size > 1
    return PlanSettings(
        policy=mode.policy,
        size=batch.size,
        max_segments=segments,
        micro_batches=batch.micro_batches,
        seed=recipe.train.seed,
        world_size=world_size,
        row_lengths=row_lengths if mode.splits_rows or batch.window is not None else (),
        window=batch.window,
        quadratic_cost=cost.quadratic / cost.linear,
        divisor=shapes.divisor if deals_samples else 1,
        token_sizes=_known_token_sizes(recipe) if deals_samples else (),
        seq_length=recipe.model.seq_length if deals_samples else 1,
    )


def _known_token_sizes(recipe: Recipe) -> tuple[int, ...]:
    """The sizes of T that a varlen recipe declares; empty if every multiple of the divisor is one, or if the plan
    decides.
    """
    shapes = recipe.shapes
    if shapes.kind == "range" and shapes.min:
        smallest = round_up(shapes.min, shapes.divisor)
        return tuple(range(smallest, max(smallest, recipe.batch.size) + 1, shapes.divisor))
    if shapes.kind == "static":
        return (round_up(shapes.max or recipe.batch.size, shapes.divisor),)
    return tuple(shapes.token_sizes) if isinstance(shapes.token_sizes, list) else ()


def recipe_shapes(recipe: Recipe, plans: EpochPlans, row_lengths: tuple[int, ...], most: int) -> TokenShapes:
    """The sizes of T, for the layouts and for the graphs alike; `auto` sizes waste least on the plan of epoch 0.

    Args:
        most: sizes that may be picked; see `most_sizes`.
    """
    tokens = recipe.sizes.largest
    assert tokens is not None, "the rules of a recipe see to it"
    sizes: Sequence[int] = ()
    if recipe.shapes.kind == "buckets":
        if recipe.mode.sized_by_rows:
            sizes = [recipe.batch.size * row_length for row_length in row_lengths]
            tokens = sizes[-1]
        elif recipe.mode.in_rows:
            rows = bucket_rows(np.array(row_lengths), recipe.batch.size, plans.settings.max_segments)
            sizes = (rows * np.array(row_lengths)).tolist()
            tokens = max(sizes)
        elif isinstance(recipe.shapes.token_sizes, list):
            sizes = recipe.shapes.token_sizes
        else:
            plan = plans.epoch(0)
            needed = plan.batches.sums(plans.lengths[plan.batches.order])
            # Another epoch may fill a micro-batch further, so the budget is one of the sizes.
            lengths, counts = np.unique(np.append(needed, tokens), return_counts=True)
            num_buckets, divisor = recipe.shapes.num_buckets, recipe.shapes.divisor
            # Segments do not grow with T, so its padding costs tokens alone.
            sizes = auto_boundaries(counts, TOKENS.cost, num_buckets, most, divisor, lengths).tolist()
    return TokenShapes.from_config(recipe.shapes, tokens, recipe.batch.max_segments, sizes)
