"""What a recipe amounts to before any graph exists: the corpus, the plan, the shapes. Imports no MindSpore."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.data.store.store import Progress, TokenStore, prepare_store
from ms_varlen.graph.compile_watch import check_graphs
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.buckets import auto_boundaries, batch_maximum_counts, length_counts
from ms_varlen.planning.cost import TOKENS, CostModel
from ms_varlen.planning.ledger import EpochLedger
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanSettings, PlanState, SharePlan
from ms_varlen.planning.statistics import length_histogram, length_statistics
from ms_varlen.planning.windows import bucket_rows, divisor_boundaries
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.recipe.rules import has_row_buckets, largest_tokens, tail_segments
from ms_varlen.workload.memory import check_memory, step_memory
from ms_varlen.workload.summary import epoch_numbers


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

    def schedule(self, start: PlanState, steps: int, rank: int = 0) -> Iterator[np.ndarray]:
        """Sample ids [B] of every micro-batch of a rank in `steps` steps from a place on."""
        for state, plan in self.plan_steps(start, steps):
            for micro_batch in range(self.recipe.batch.micro_batches):
                yield plan.micro_batch(state.step, micro_batch, rank)

    def plan_steps(self, start: PlanState, steps: int) -> Iterator[tuple[PlanState, EpochPlan]]:
        """The next `steps` places from `start` on, and the plans that hold them."""
        for _, step in zip(range(steps), self.plans.steps_from(start), strict=False):
            yield step

    def eval_schedule(self, rank: int = 0, ranks: int = 1) -> Iterator[np.ndarray]:
        """Sample ids [B] of every micro-batch of an evaluation that a rank takes: each `ranks`-th one."""
        if self.eval_plan is not None:
            for step in range(rank, self.eval_plan.num_steps, ranks):
                yield self.eval_plan.micro_batch(step, 0)

    def ledger(
        self, epoch: int, steps: int, skipped_tokens: int = 0, skipped_samples: int = 0
    ) -> dict[str, EpochLedger]:
        """Where the tokens and the samples of an epoch are after `steps` of its plan's steps, by unit.

        Samples that were trained before the rest of the epoch was planned anew count as trained. A document that
        cleaning removed never became a sample; it counts as one that was dropped.
        """
        store, plan = self.store, self.plans.epoch(epoch)
        lengths = np.asarray(store.train.lengths)
        reached = np.concatenate([self.plans.trained_before(epoch).trained_ids(), plan.trained_ids(steps)])
        left_over = plan.left_over
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
            total=len(store.train) + len(store.eval) + cleaning.documents_dropped,
            trained=reached.size - skipped_samples,
            skipped=skipped_samples,
            pending=len(store.train) - reached.size - left_over.size,
            left_over=left_over.size,
            held_out=len(store.eval),
            cut=0,  # what is cut off was no sample
            dropped=cleaning.documents_dropped,
        )
        return {"tokens": tokens, "samples": samples}


def prepare(
    recipe: Recipe, progress: Progress | None = None, world_size: int = 1, share: SharePlan | None = None
) -> Workload:
    """Open or build the token store of a recipe and plan on it.

    Args:
        recipe: a valid recipe.
        progress: called while a store is built; see `prepare_store`.
        world_size: ranks to plan for.
        share: see `EpochPlans`.
    Raises:
        DataError: the corpus, the tokenizer or the plan cannot be used.
    """
    return prepare_on(recipe, prepare_store(recipe.data, recipe.model.seq_length, progress), world_size, share)


def prepare_on(recipe: Recipe, store: TokenStore, world_size: int = 1, share: SharePlan | None = None) -> Workload:
    """Plan on the token store that the recipe's `data` and `model.seq_length` ask for; see `prepare`."""
    config = recipe.model.config.with_vocab_size(store.vocab_size)
    lengths, cost = SampleLengths.of(store), CostModel.of_decoder(config)
    plans, shapes, layout = plan_lengths(recipe, lengths, cost, world_size, share)
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
    check_memory(recipe, config, shapes)
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

    @classmethod
    def of(cls, store: TokenStore) -> "SampleLengths":
        """Those of a token store."""
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
    """Lengths that rows may have, increasing; none where samples lie one after another."""
    divisor, seq_length = recipe.shapes.divisor, recipe.model.seq_length
    if not recipe.mode.in_rows:
        return ()
    if not has_row_buckets(recipe.mode, recipe.shapes.kind):
        if recipe.batch.pad_to == "max":
            return (seq_length,)
        return tuple(divisor_boundaries(min(seq_length, lengths.longest), divisor).tolist())
    if isinstance(recipe.shapes.row_buckets, list):
        return tuple(recipe.shapes.row_buckets)
    return auto_row_lengths(recipe, lengths, cost)


def auto_row_lengths(recipe: Recipe, lengths: SampleLengths, cost: CostModel) -> tuple[int, ...]:
    """The lengths of rows, increasing, that cost least FLOPs on a corpus; what `shapes.row_buckets` auto means."""
    counts, of_row = lengths.counts, cost.of_row
    if not recipe.mode.follows_lengths:
        of_row = cost
        if recipe.batch.window is None:  # rows of a window are padded to about their own lengths
            counts = batch_maximum_counts(counts, recipe.batch.size)
    num_buckets, most = recipe.shapes.num_buckets, most_sizes(recipe, lengths)
    return tuple(auto_boundaries(counts, of_row.cost, num_buckets, most, recipe.shapes.divisor).tolist())


def most_sizes(recipe: Recipe, lengths: SampleLengths) -> int:
    """The most sizes of T, a graph each, that `graph.max_graphs` allows beside the optimizer and the evaluation."""
    evaluates = recipe.train.eval_every is not None and lengths.longest_held_out > 0
    return max(1, recipe.graph.max_graphs - 1 - evaluates)


def plan_settings(recipe: Recipe, row_lengths: tuple[int, ...], cost: CostModel, world_size: int = 1) -> PlanSettings:
    """What a recipe's plans depend on. Segments that padding forms are kept out of the planner's cap.

    The sizes of T decide only how samples are dealt to several ranks, and never which samples make a step.
    """
    batch, mode, shapes = recipe.batch, recipe.mode, recipe.shapes
    segments = batch.max_segments
    if not mode.sized_by_rows:
        segments -= tail_segments(
            shapes.kind, shapes.min or shapes.divisor, batch.size, shapes.divisor, recipe.model.seq_length
        )
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
    """The sizes of T of a varlen recipe before it is planned; none where each multiple of the divisor is one, or where
    they are picked on the plan.
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
    tokens = largest_tokens(recipe.mode, recipe.batch.token_budget, recipe.batch.rows, recipe.model.seq_length)
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
            needed = np.add.reduceat(plans.lengths[plan.order], plan.offsets[:-1], dtype=np.int64)
            # Another epoch may fill a micro-batch further, so the budget is one of the sizes.
            lengths, counts = np.unique(np.append(needed, tokens), return_counts=True)
            num_buckets, divisor = recipe.shapes.num_buckets, recipe.shapes.divisor
            # Segments do not grow with T, so its padding costs tokens alone.
            sizes = auto_boundaries(counts, TOKENS.cost, num_buckets, most, divisor, lengths).tolist()
    return TokenShapes.from_config(recipe.shapes, tokens, recipe.batch.max_segments, sizes)


def predicted_graphs(workload: Workload) -> dict[str, int]:
    """The number of graphs that a run compiles, by role."""
    graphs = {"train": workload.shapes.predicted_graphs, "apply": 1}
    if workload.recipe.train.eval_every is not None and workload.eval_plan is not None:
        graphs["eval"] = workload.eval_shapes.predicted_graphs
    return graphs


def describe_plan(workload: Workload) -> dict:
    """What a run of this recipe would do: the numbers of `ms-varlen plan` and of plan.json.

    Everything is counted on the plan of epoch 0, not estimated.
    """
    recipe, train = workload.recipe, workload.store.train
    cost = CostModel.of_decoder(workload.model_config)
    numbers = epoch_numbers(workload.plans, workload.layout, cost)
    steps = workload.plans.epoch(0).num_steps
    return {
        "mode": recipe.mode,
        "shapes": dataclasses.asdict(workload.shapes),
        "graphs": predicted_graphs(workload),
        "epochs": round(recipe.train.steps / steps, 3),
        "micro_batches_per_step": recipe.batch.micro_batches,
        "samples": len(train),
        "eval_samples": len(workload.store.eval),
        **numbers,
        "lengths": {
            **length_statistics(np.asarray(train.lengths)),
            "histogram": length_histogram(np.asarray(train.lengths)),
        },
        "parameters": workload.model_config.parameter_count(),
        "memory_gb": step_memory(recipe, workload.model_config, workload.shapes),
        "cleaning": dataclasses.asdict(workload.store.ledgers["train"] + workload.store.ledgers["eval"]),
        "ledger": {unit: part.to_dict() for unit, part in workload.ledger(epoch=0, steps=steps).items()},
        "store": str(workload.store.folder),
        "data_fingerprint": workload.store.fingerprint,
        "plan_fingerprint": workload.plans.fingerprint,
    }
