"""What a recipe amounts to before any graph exists: the corpus, the plan, the shapes. Imports no MindSpore."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ms_varlen.data.layouts import Layout
from ms_varlen.data.store import Progress, TokenStore, prepare_store
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.epoch_plan import EpochPlan, EpochPlans, PlanSettings, PlanState
from ms_varlen.train.recipe import Recipe


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


def prepare(recipe: Recipe, progress: Progress | None = None) -> Workload:
    """Open or build the token store of a recipe and plan on it.

    Args:
        recipe: a valid recipe.
        progress: called while a store is built; see `prepare_store`.
    Raises:
        DataError: the corpus, the tokenizer or the plan cannot be used.
    """
    store = prepare_store(recipe.data, recipe.model.seq_length, progress)
    shapes = recipe.token_shapes()
    settings = plan_settings(recipe, shapes)
    eval_settings = dataclasses.replace(settings, micro_batches=1)
    return Workload(
        recipe=recipe,
        store=store,
        shapes=shapes,
        layout=recipe_layout(recipe, shapes),
        plans=EpochPlans(store.train.lengths, store.train.lengths_fingerprint, settings),
        eval_plan=EpochPlan(store.eval.lengths, eval_settings, None) if len(store.eval) else None,
        model_config=recipe.model.config.with_vocab_size(store.vocab_size),
    )


def plan_settings(recipe: Recipe, shapes: TokenShapes) -> PlanSettings:
    """What a recipe's plans depend on. Segments of the padded tail are kept out of the planner's cap."""
    batch = recipe.batch
    padded = recipe.mode == "padded"
    return PlanSettings(
        policy="rows" if padded else "token_budget",
        size=batch.rows if padded else batch.token_budget,
        max_segments=batch.max_segments - (0 if padded else shapes.tail_segments(recipe.model.seq_length)),
        micro_batches=batch.micro_batches,
        seed=recipe.train.seed,
    )


def recipe_layout(recipe: Recipe, shapes: TokenShapes) -> Layout:
    """The layout of a recipe's mode."""
    if recipe.mode == "varlen":
        return Layout("varlen", shapes, recipe.model.seq_length)
    to_batch = recipe.batch.pad_to == "batch"
    return Layout(
        "padded",
        shapes,
        recipe.model.seq_length,
        rows=recipe.batch.rows,
        row_divisor=recipe.shapes.divisor if to_batch else None,
    )


def predicted_graphs(workload: Workload) -> dict[str, int]:
    """The number of graphs that a run compiles, by role."""
    per_cell = workload.shapes.predicted_graphs
    graphs = {"train": per_cell, "apply": 1}
    if workload.recipe.train.eval_every is not None and workload.eval_plan is not None:
        graphs["eval"] = per_cell
    return graphs


def describe_plan(workload: Workload) -> dict:
    """What a run of this recipe would do: the numbers of `ms-varlen plan` and of plan.json.

    Everything is counted on the plan of epoch 0, not estimated.
    """
    recipe, train = workload.recipe, workload.store.train
    plan = workload.plans.epoch(0)
    steps, per_step = plan.num_steps, recipe.batch.micro_batches
    offsets = plan.offsets[: steps * per_step + 1]
    lengths = np.asarray(train.lengths)[plan.order[: offsets[-1]]]
    computed = workload.layout.computed_tokens(lengths, offsets)
    real = int(lengths.sum(dtype=np.int64))
    eval_tokens = workload.store.eval.total_tokens
    return {
        "mode": recipe.mode,
        "shapes": dataclasses.asdict(workload.shapes),
        "graphs": predicted_graphs(workload),
        "steps_per_epoch": steps,
        "epochs": round(recipe.train.steps / steps, 3),
        "micro_batches_per_step": per_step,
        "samples": len(train),
        "eval_samples": len(workload.store.eval),
        "tokens_real": real,
        "tokens_computed": int(computed.sum()),
        "tokens_per_step": round(real / steps, 1),
        "pad_ratio": 1 - real / int(computed.sum()),
        "padding_overhead": int(computed.sum()) / real - 1,
        "sizes": int(np.unique(computed).size),
        "max_segments_used": int(np.diff(offsets).max()),
        "lengths": length_statistics(np.asarray(train.lengths)),
        "parameters": workload.model_config.parameter_count(),
        "ledger": {
            **dataclasses.asdict(workload.store.ledgers["train"]),
            "tokens_held_out": eval_tokens,
            "samples_left_over": int(plan.left_over.size),
            "tokens_left_over": int(np.asarray(train.lengths)[plan.left_over].sum(dtype=np.int64)),
        },
        "store": str(workload.store.folder),
        "data_fingerprint": workload.store.fingerprint,
        "plan_fingerprint": workload.plans.fingerprint,
    }


def length_statistics(lengths: np.ndarray) -> dict:
    """Count, median, P90, P99, maximum, mean and sum of [n] lengths, in tokens."""
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return {
        "samples": int(lengths.size),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(lengths.max()),
        "mean": float(lengths.mean(dtype=np.float64)),
        "tokens": int(lengths.sum(dtype=np.int64)),
    }
