"""The numbers of `ms-varlen plan`: padding, mixing of lengths and balance over ranks, counted on the first epoch."""

import dataclasses
from typing import Any

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.data.tokens.cleaning import Ledger as CleaningLedger
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.modes import Mode
from ms_varlen.planning.balance import imbalance
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.ledger import EpochLedger
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanSettings
from ms_varlen.planning.rows import batch_overhead, length_mixing
from ms_varlen.planning.statistics import length_histogram, length_statistics
from ms_varlen.workload.memory import StepMemory, step_memory
from ms_varlen.workload.workload import Workload

MOST_SAMPLES = 1_000_000
"""Most samples for plans other than the recipe's own; of a larger corpus as many are drawn at random."""


def sampled_lengths(lengths: np.ndarray, most: int = MOST_SAMPLES) -> np.ndarray:
    """The lengths, or `most` of them drawn at random, always the same."""
    return lengths if lengths.size <= most else np.random.default_rng(0).choice(lengths, most, replace=False)


def epoch_batches(plans: EpochPlans) -> tuple[np.ndarray, np.ndarray, EpochPlan]:
    """The whole steps of epoch 0: the lengths of their samples in order, and the offsets of their micro-batches."""
    plan = plans.epoch(0)
    whole = plan.batches.first(plan.num_steps * plans.settings.per_step)
    return np.asarray(plans.lengths)[whole.order], whole.offsets, plan


def micro_batch_flops(layout: Layout, cost: CostModel, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[k] float64, FLOPs of micro-batches, padding included; arguments as in `Layout.needed_tokens`."""
    tokens, squared = layout.computed_tokens(lengths, offsets), layout.squared_tokens(lengths, offsets)
    return cost.linear * tokens + cost.quadratic * squared


@dataclasses.dataclass(frozen=True)
class EpochNumbers:
    """The numbers of the first epoch, counted on its plan.

    Attributes:
        world_size: ranks.
        steps_per_epoch: optimizer steps.
        tokens_real, tokens_computed: of samples, and with padding.
        tokens_per_step: real tokens of a step over all ranks, on average.
        pad_ratio, padding_overhead: 1 - real / computed, and computed / real - 1.
        sizes: different T that occur.
        max_segments_used: samples of the fullest micro-batch.
        batch_overhead: padding of rows, before T is rounded up.
        length_mixing, length_mixing_of_steps: how well lengths are mixed; see `planning.rows.length_mixing`.
        imbalance_mean, imbalance_max: how far the slowest rank is over the mean.
        imbalance_mean_floor: the mean that is possible; see `RankBalance`.
        imbalance_mean_unbalanced, imbalance_max_unbalanced: the same before samples were dealt over the ranks.
    """

    world_size: int
    steps_per_epoch: int
    tokens_real: int
    tokens_computed: int
    tokens_per_step: float
    pad_ratio: float
    padding_overhead: float
    sizes: int
    max_segments_used: int
    batch_overhead: float
    length_mixing: float
    length_mixing_of_steps: float
    imbalance_mean: float
    imbalance_max: float
    imbalance_mean_floor: float
    imbalance_mean_unbalanced: float
    imbalance_max_unbalanced: float


def epoch_numbers(plans: EpochPlans, layout: Layout, cost: CostModel) -> EpochNumbers:
    """Count the first epoch of a plan."""
    lengths, offsets, plan = epoch_batches(plans)
    computed = layout.computed_tokens(lengths, offsets)
    real, total = int(lengths.sum(dtype=np.int64)), int(computed.sum())
    balance = rank_balance(plans, layout, cost)
    batches, row_lengths = Batches(np.arange(lengths.size), offsets), np.array(layout.row_lengths)
    return EpochNumbers(
        world_size=plans.settings.world_size,
        steps_per_epoch=plan.num_steps,
        tokens_real=real,
        tokens_computed=total,
        tokens_per_step=round(real / plan.num_steps, 1),
        pad_ratio=1 - real / total,
        padding_overhead=total / real - 1,
        sizes=int(np.unique(computed).size),
        max_segments_used=int(np.diff(offsets).max()),
        batch_overhead=batch_overhead(lengths, batches, row_lengths) if row_lengths.size else 0.0,
        length_mixing=length_mixing(lengths, batches),
        length_mixing_of_steps=length_mixing(lengths, batches.grouped(plans.settings.per_step)),
        imbalance_mean=float(balance.after.mean()),
        imbalance_max=float(balance.after.max()),
        imbalance_mean_floor=float(balance.floor.mean()),
        imbalance_mean_unbalanced=float(balance.before.mean()),
        imbalance_max_unbalanced=float(balance.before.max()),
    )


@dataclasses.dataclass(frozen=True)
class RankBalance:
    """How far the slowest rank is over the mean in each step of the first epoch, by computed FLOPs.

    Attributes:
        after: [steps] float64, of the plan.
        floor: [steps] float64, lower bound: no assignment can beat it, because a sample (or a micro-batch of rows or
            packs) cannot be split over ranks.
        before: [n] float64, the same before samples were dealt over the ranks, of at most about `MOST_SAMPLES`.
    """

    after: np.ndarray
    floor: np.ndarray
    before: np.ndarray


def rank_balance(plans: EpochPlans, layout: Layout, cost: CostModel) -> RankBalance:
    """The balance of a plan over its ranks, all zeros with one rank."""
    settings = plans.settings
    lengths, offsets, plan = epoch_batches(plans)
    if settings.world_size == 1:
        return RankBalance(*(np.zeros(plan.num_steps) for _ in range(3)))
    flops = micro_batch_flops(layout, cost, lengths, offsets)
    if settings.policy == "token_budget":
        largest = _longest_rank(lengths, offsets, settings, layout, cost)
    else:
        largest = flops.reshape(-1, settings.per_step).max(axis=1)
    work = flops.reshape(-1, settings.world_size, settings.micro_batches).sum(axis=2)
    floor = np.maximum(largest / work.mean(axis=1) - 1, 0)
    most = max(MOST_SAMPLES, 10 * lengths.size // plan.num_steps)
    part = sampled_lengths(np.asarray(plans.lengths), most)
    alone = EpochPlans(part, "", dataclasses.replace(settings, world_size=1))
    lengths, offsets, _ = epoch_batches(alone)
    whole = (offsets.size - 1) // settings.per_step * settings.per_step
    flops = micro_batch_flops(layout, cost, lengths[: offsets[whole]], offsets[: whole + 1])
    before = flops.reshape(-1, settings.world_size, settings.micro_batches).sum(axis=2)
    return RankBalance(imbalance(work), floor, imbalance(before))


def _longest_rank(
    lengths: np.ndarray, offsets: np.ndarray, settings: PlanSettings, layout: Layout, cost: CostModel
) -> np.ndarray:
    """[steps] float64, least FLOPs of the rank that has the longest sample of its step.

    It must take the tokens that the budgets of the others have no room for: at best the shortest samples.
    """
    starts = offsets[: -1 : settings.per_step]
    longest = np.maximum.reduceat(lengths, starts).astype(np.int64)
    totals = np.add.reduceat(lengths, starts, dtype=np.int64)
    rest = totals - longest - (settings.world_size - 1) * settings.micro_batches * settings.size
    rest = np.maximum(rest, 0)
    tokens = longest + rest
    if settings.micro_batches == 1:
        tokens = layout.computed_tokens(tokens, np.arange(tokens.size + 1))
    smallest = settings.micro_batches * layout.computed_tokens(np.ones(1, np.int64), np.arange(2))[0]
    work = cost.linear * np.maximum(tokens, smallest) + cost.quadratic * longest.astype(np.float64) ** 2
    ends = offsets[settings.per_step :: settings.per_step]
    for step in np.flatnonzero(rest):
        others = np.sort(lengths[starts[step] : ends[step]])[:-1]
        taken = np.diff(np.minimum(np.cumsum(others), rest[step]), prepend=0)
        work[step] += cost.quadratic * float((taken * others).sum())
    return work


@dataclasses.dataclass(frozen=True)
class PlanSummary:
    """What a run of a recipe would do: the numbers of `ms-varlen plan` and of plan.json.

    Attributes:
        mode, shapes: as in `Workload`.
        graphs: compiled, by role.
        epochs: passes over the corpus in the whole run.
        micro_batches_per_step: of each rank.
        samples, eval_samples: of the corpus.
        epoch: counted on the plan of epoch 0, not estimated.
        lengths: `length_statistics` of the training samples, and their `histogram`.
        parameters: of the model.
        memory_gb: see `step_memory`.
        cleaning: documents and tokens that cleaning read, kept, cut and dropped.
        ledger: where the tokens and the samples of epoch 0 are after its last step, by unit.
        store: folder of the token store.
        data_fingerprint, plan_fingerprint: of the corpus, and of the plans.
    """

    mode: Mode
    shapes: TokenShapes
    graphs: dict[str, int]
    epochs: float
    micro_batches_per_step: int
    samples: int
    eval_samples: int
    epoch: EpochNumbers
    lengths: dict[str, Any]
    parameters: int
    memory_gb: StepMemory
    cleaning: CleaningLedger
    ledger: dict[str, EpochLedger]
    store: str
    data_fingerprint: str
    plan_fingerprint: str

    @classmethod
    def of(cls, workload: Workload) -> "PlanSummary":
        """The summary of a workload."""
        recipe, store, plans = workload.recipe, workload.store, workload.plans
        numbers = epoch_numbers(plans, workload.layout, CostModel.of_decoder(workload.model_config))
        steps, lengths = numbers.steps_per_epoch, np.asarray(store.train.lengths)
        return cls(
            mode=recipe.mode,
            shapes=workload.shapes,
            graphs=workload.predicted_graphs,
            epochs=round(recipe.train.steps / steps, 3),
            micro_batches_per_step=recipe.batch.micro_batches,
            samples=len(store.train),
            eval_samples=len(store.eval),
            epoch=numbers,
            lengths={**length_statistics(lengths), "histogram": length_histogram(lengths)},
            parameters=workload.model_config.parameter_count(),
            memory_gb=step_memory(recipe, workload.model_config, workload.shapes),
            cleaning=store.ledgers["train"] + store.ledgers["eval"],
            ledger=workload.ledger(epoch=0, steps=steps),
            store=str(store.folder),
            data_fingerprint=store.fingerprint,
            plan_fingerprint=plans.fingerprint,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values by name; those of `epoch` stand among the others."""
        found: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            found |= value if name == "epoch" else {name: value}
        return found | {"ledger": {unit: part.to_dict() for unit, part in self.ledger.items()}}
