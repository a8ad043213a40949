"""What a recipe amounts to before any graph exists: the corpus, the plan, the shapes. Imports no MindSpore."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from ms_varlen.data.layouts import Layout
from ms_varlen.data.store import Progress, TokenStore, prepare_store
from ms_varlen.graph.compile_watch import check_graphs
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.balance import imbalance
from ms_varlen.planning.buckets import length_counts, optimal_boundaries
from ms_varlen.planning.cost import TOKENS, CostModel
from ms_varlen.planning.epoch_plan import EpochPlan, EpochPlans, PlanSettings, PlanState
from ms_varlen.planning.ledger import EpochLedger
from ms_varlen.planning.statistics import length_histogram, length_statistics
from ms_varlen.planning.windows import batch_overhead, bucket_rows, divisor_boundaries, length_mixing
from ms_varlen.train.recipe import Recipe
from ms_varlen.train.recipe_rules import has_row_buckets, largest_tokens, tail_segments

DEFAULT_NUM_BUCKETS = 8

POLICIES: dict[str, Literal["token_budget", "packed", "bucketed", "rows"]] = {
    "padded": "rows",
    "bucketed": "bucketed",
    "packed": "packed",
    "varlen": "token_budget",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A recipe with its corpus, ready to be planned or trained.

    Attributes:
        recipe: the recipe.
        store: the token store.
        shapes: sizes of T, for the layouts and for the graphs.
        layout: where samples lie on T.
        plans: the training plan of each epoch.
        eval_plan: the fixed plan of an evaluation; None without held-out samples.
        model_config: the decoder, with the vocabulary filled in.
    """

    recipe: Recipe
    store: TokenStore
    shapes: TokenShapes
    layout: Layout
    plans: EpochPlans
    eval_plan: EpochPlan | None
    model_config: DecoderConfig

    @property
    def eval_shapes(self) -> TokenShapes:
        """The sizes of T in evaluation: of many buckets one graph for all of them, since evaluation is seldom."""
        return self.shapes.as_range() if self.shapes.kind == "buckets" else self.shapes

    @property
    def eval_layout(self) -> Layout:
        """The layout with the sizes of evaluation."""
        return dataclasses.replace(self.layout, shapes=self.eval_shapes)

    def schedule(self, start: PlanState, steps: int) -> Iterator[np.ndarray]:
        """Sample ids [B] of every micro-batch of `steps` steps from a place on."""
        for state, plan in self.plan_steps(start, steps):
            for micro_batch in range(self.recipe.batch.micro_batches):
                yield plan.micro_batch(state.step, micro_batch)

    def plan_steps(self, start: PlanState, steps: int) -> Iterator[tuple[PlanState, EpochPlan]]:
        """The next `steps` places from `start` on, and the plans that hold them."""
        for _, step in zip(range(steps), self.plans.steps_from(start), strict=False):
            yield step

    def eval_schedule(self) -> Iterator[np.ndarray]:
        """Sample ids [B] of every micro-batch of an evaluation."""
        if self.eval_plan is not None:
            for step in range(self.eval_plan.num_steps):
                yield self.eval_plan.micro_batch(step, 0)

    def ledger(
        self, epoch: int, steps: int, skipped_tokens: int = 0, skipped_samples: int = 0
    ) -> dict[str, EpochLedger]:
        """Where the tokens and the samples of an epoch are after `steps` of its steps, by unit."""
        store, plan = self.store, self.plans.epoch(epoch)
        lengths = np.asarray(store.train.lengths)
        reached, left_over = plan.trained_ids(steps), plan.left_over
        reached_tokens, left_over_tokens = (int(lengths[ids].sum(dtype=np.int64)) for ids in (reached, left_over))
        cleaning = store.ledgers["train"] + store.ledgers["eval"]
        tokens = EpochLedger(
            total=cleaning.tokens_in,
            trained=reached_tokens - skipped_tokens,
            skipped=skipped_tokens,
            pending=store.train.total_tokens - reached_tokens - left_over_tokens,
            left_over=left_over_tokens,
            held_out=store.eval.total_tokens,
            cut=cleaning.tokens_cut,
            dropped=cleaning.tokens_dropped,
        )
        samples = EpochLedger(
            total=len(store.train) + len(store.eval),
            trained=reached.size - skipped_samples,
            skipped=skipped_samples,
            pending=len(store.train) - reached.size - left_over.size,
            left_over=left_over.size,
            held_out=len(store.eval),
            cut=0,
            dropped=0,
        )
        return {"tokens": tokens, "samples": samples}


def prepare(recipe: Recipe, progress: Progress | None = None, world_size: int = 1) -> Workload:
    """Open or build the token store of a recipe and plan on it.

    Args:
        recipe: a valid recipe.
        progress: called while a store is built; see `prepare_store`.
        world_size: ranks to plan for.
    Raises:
        DataError: the corpus, the tokenizer or the plan cannot be used.
    """
    return prepare_on(recipe, prepare_store(recipe.data, recipe.model.seq_length, progress), world_size)


def prepare_on(recipe: Recipe, store: TokenStore, world_size: int = 1) -> Workload:
    """Plan on the token store that the recipe's `data` and `model.seq_length` ask for; see `prepare`."""
    config = recipe.model.config.with_vocab_size(store.vocab_size)
    lengths = SampleLengths(store.train.lengths, store.train.lengths_fingerprint, store.eval.longest)
    plans, shapes, layout = plan_lengths(recipe, lengths, CostModel.of_decoder(config), world_size)
    eval_settings = dataclasses.replace(plans.settings, micro_batches=1, world_size=1)
    workload = Workload(
        recipe=recipe,
        store=store,
        shapes=shapes,
        layout=layout,
        plans=plans,
        eval_plan=EpochPlan(store.eval.lengths, eval_settings, None) if len(store.eval) else None,
        model_config=config,
    )
    if recipe.graph.mode == "graph":
        check_graphs(predicted_graphs(workload), recipe.graph.max_graphs)
    return workload


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


def plan_lengths(
    recipe: Recipe, lengths: SampleLengths, cost: CostModel, world_size: int = 1
) -> tuple[EpochPlans, TokenShapes, Layout]:
    """The plans of a recipe on some lengths, the sizes of T, and how micro-batches are laid out."""
    row_lengths = recipe_row_lengths(recipe, lengths)
    settings = dataclasses.replace(plan_settings(recipe, row_lengths, cost), world_size=world_size)
    plans = EpochPlans(lengths.train, lengths.fingerprint, settings)
    shapes = recipe_shapes(recipe, plans, row_lengths)
    rows = recipe.batch.size if recipe.mode == "padded" else 0
    return plans, shapes, Layout(recipe.mode, shapes, recipe.model.seq_length, rows=rows, row_lengths=row_lengths)


def recipe_row_lengths(recipe: Recipe, lengths: SampleLengths) -> tuple[int, ...]:
    """Lengths that rows may have, increasing; none where samples lie one after another."""
    divisor, seq_length = recipe.shapes.divisor, recipe.model.seq_length
    if recipe.mode in ("varlen", "packed"):
        return ()
    if not has_row_buckets(recipe.mode, recipe.shapes.kind):
        return (
            (seq_length,) if recipe.batch.pad_to == "max" else tuple(divisor_boundaries(seq_length, divisor).tolist())
        )
    if isinstance(recipe.shapes.row_buckets, list):
        return tuple(recipe.shapes.row_buckets)
    # Evaluation must fit too, so the longest held-out sample counts as one of the corpus.
    counts = length_counts(np.append(lengths.train, max(lengths.longest_held_out, 1)))
    num_buckets = recipe.shapes.num_buckets or DEFAULT_NUM_BUCKETS
    return tuple(optimal_boundaries(counts, TOKENS.cost, num_buckets, divisor).tolist())


def plan_settings(recipe: Recipe, row_lengths: tuple[int, ...], cost: CostModel) -> PlanSettings:
    """What a recipe's plans depend on. Segments that padding forms are kept out of the planner's cap."""
    batch, mode = recipe.batch, recipe.mode
    segments = batch.max_segments
    if mode != "padded":
        shapes = recipe.shapes
        segments -= tail_segments(
            shapes.kind, shapes.min or shapes.divisor, batch.size, shapes.divisor, recipe.model.seq_length
        )
    if mode == "bucketed":
        segments //= 2  # a row is two segments, its sample and its tail
    return PlanSettings(
        policy=POLICIES[mode],
        size=batch.size,
        max_segments=segments,
        micro_batches=batch.micro_batches,
        seed=recipe.train.seed,
        row_lengths=row_lengths if mode == "bucketed" or batch.window is not None else (),
        window=batch.window,
        quadratic_cost=cost.quadratic / cost.linear,
    )


def recipe_shapes(recipe: Recipe, plans: EpochPlans, row_lengths: tuple[int, ...]) -> TokenShapes:
    """The sizes of T, for the layouts and for the graphs alike; `auto` sizes waste least on the plan of epoch 0."""
    tokens = largest_tokens(recipe.mode, recipe.batch.token_budget, recipe.batch.rows, recipe.model.seq_length)
    assert tokens is not None, "the rules of a recipe see to it"
    sizes: Sequence[int] = ()
    if recipe.shapes.kind == "buckets":
        if recipe.mode == "padded":
            sizes = [recipe.batch.size * row_length for row_length in row_lengths]
            tokens = sizes[-1]
        elif recipe.mode == "bucketed":
            rows = bucket_rows(np.array(row_lengths), recipe.batch.size, plans.settings.max_segments)
            sizes = (rows * np.array(row_lengths)).tolist()
            tokens = max(sizes)
        elif isinstance(recipe.shapes.token_sizes, list):
            sizes = recipe.shapes.token_sizes
        else:
            plan = plans.epoch(0)
            needed = np.add.reduceat(plans.lengths[plan.order], plan.offsets[:-1], dtype=np.int64)
            # Another epoch may fill a micro-batch further, so the budget is one of the sizes.
            counts = length_counts(np.append(needed, tokens))
            num_buckets = recipe.shapes.num_buckets or DEFAULT_NUM_BUCKETS
            sizes = optimal_boundaries(counts, TOKENS.cost, num_buckets, recipe.shapes.divisor).tolist()
    return TokenShapes.from_config(recipe.shapes, tokens, recipe.batch.max_segments, sizes)


def predicted_graphs(workload: Workload) -> dict[str, int]:
    """The number of graphs that a run compiles, by role."""
    graphs = {"train": workload.shapes.predicted_graphs, "apply": 1}
    if workload.recipe.train.eval_every is not None and workload.eval_plan is not None:
        graphs["eval"] = workload.eval_shapes.predicted_graphs
    return graphs


def epoch_batches(plans: EpochPlans) -> tuple[np.ndarray, np.ndarray, EpochPlan]:
    """The whole steps of epoch 0: the lengths of their samples in order, and the offsets of their micro-batches."""
    plan = plans.epoch(0)
    offsets = plan.offsets[: plan.num_steps * plans.settings.per_step + 1]
    return np.asarray(plans.lengths)[plan.order[: offsets[-1]]], offsets, plan


def micro_batch_flops(layout: Layout, cost: CostModel, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[k] float64, FLOPs of micro-batches, padding included; arguments as in `Layout.needed_tokens`."""
    tokens, squared = layout.computed_tokens(lengths, offsets), layout.squared_tokens(lengths, offsets)
    return cost.linear * tokens + cost.quadratic * squared


def describe_plan(workload: Workload) -> dict:
    """What a run of this recipe would do: the numbers of `ms-varlen plan` and of plan.json.

    Everything is counted on the plan of epoch 0, not estimated.
    """
    recipe, train = workload.recipe, workload.store.train
    lengths, offsets, plan = epoch_batches(workload.plans)
    steps = plan.num_steps
    computed = workload.layout.computed_tokens(lengths, offsets)
    real = int(lengths.sum(dtype=np.int64))
    return {
        "mode": recipe.mode,
        "shapes": dataclasses.asdict(workload.shapes),
        "graphs": predicted_graphs(workload),
        "world_size": plan.settings.world_size,
        "steps_per_epoch": steps,
        "epochs": round(recipe.train.steps / steps, 3),
        "micro_batches_per_step": recipe.batch.micro_batches,
        "samples": len(train),
        "eval_samples": len(workload.store.eval),
        "tokens_real": real,
        "tokens_computed": int(computed.sum()),
        "tokens_per_step": round(real / steps, 1),
        "pad_ratio": 1 - real / int(computed.sum()),
        "padding_overhead": int(computed.sum()) / real - 1,
        "sizes": int(np.unique(computed).size),
        "max_segments_used": int(np.diff(offsets).max()),
        **_order_numbers(workload, lengths, offsets),
        **_rank_numbers(workload),
        "lengths": {
            **length_statistics(np.asarray(train.lengths)),
            "histogram": length_histogram(np.asarray(train.lengths)),
        },
        "parameters": workload.model_config.parameter_count(),
        "cleaning": dataclasses.asdict(workload.store.ledgers["train"] + workload.store.ledgers["eval"]),
        "ledger": {unit: part.to_dict() for unit, part in workload.ledger(epoch=0, steps=steps).items()},
        "store": str(workload.store.folder),
        "data_fingerprint": workload.store.fingerprint,
        "plan_fingerprint": workload.plans.fingerprint,
    }


def _order_numbers(workload: Workload, lengths: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
    """Padding of rows, before T is rounded up, against how well lengths are mixed."""
    order, row_lengths = np.arange(lengths.size), np.array(workload.layout.row_lengths)
    per_step = workload.plans.settings.per_step
    return {
        "batch_overhead": batch_overhead(lengths, order, offsets, row_lengths) if row_lengths.size else 0.0,
        "length_mixing": length_mixing(lengths, order, offsets),
        "length_mixing_of_steps": length_mixing(lengths, order, offsets[::per_step]),
    }


def rank_imbalance(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """How far the slowest rank is over the mean in each step of epoch 0, by computed FLOPs.

    Returns:
        [steps] float64 as the plan is, and as it was before samples were dealt over the ranks.
    """
    settings, plans = workload.plans.settings, workload.plans
    if settings.world_size == 1:
        return np.zeros(plans.epoch(0).num_steps), np.zeros(plans.epoch(0).num_steps)
    alone = EpochPlans(plans.lengths, "", dataclasses.replace(settings, world_size=1))
    cost, found = CostModel.of_decoder(workload.model_config), []
    for part in (plans, alone):
        lengths, offsets, _ = epoch_batches(part)
        flops = micro_batch_flops(workload.layout, cost, lengths, offsets)
        whole = flops[: flops.size // settings.per_step * settings.per_step]
        found.append(imbalance(whole.reshape(-1, settings.world_size, settings.micro_batches).sum(axis=2)))
    return found[0], found[1]


def _rank_numbers(workload: Workload) -> dict[str, float]:
    after, before = rank_imbalance(workload)
    return {
        "imbalance_mean": float(after.mean()),
        "imbalance_max": float(after.max()),
        "imbalance_mean_unbalanced": float(before.mean()),
        "imbalance_max_unbalanced": float(before.max()),
    }
