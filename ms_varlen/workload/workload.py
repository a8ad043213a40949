"""`Workload`: a recipe on its corpus, with its plans, sizes and layout, before any graph exists."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.data.store.store import Progress, TokenStore, prepare_store
from ms_varlen.graph.compile_watch import check_graphs
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.ledger import EpochLedger
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanState, SharePlan
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.workload.memory import check_memory
from ms_varlen.workload.sizes import SampleLengths, plan_lengths


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
    def predicted_graphs(self) -> dict[str, int]:
        """The number of graphs that a run compiles, by role."""
        graphs = {"train": self.shapes.predicted_graphs, "apply": 1}
        if self.recipe.train.eval_every is not None and self.eval_plan is not None:
            graphs["eval"] = self.eval_shapes.predicted_graphs
        return graphs

    @property
    def eval_shapes(self) -> TokenShapes:
        """The sizes of T in evaluation, which runs rarely: one dynamic-shape graph serves all buckets."""
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

        Samples that were trained before the rest of the epoch was planned again count as trained. A document that
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
        check_graphs(workload.predicted_graphs, recipe.graph.max_graphs)
    check_memory(recipe, config, shapes)
    return workload
