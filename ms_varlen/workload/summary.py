"""What an epoch of a plan computes, from the lengths alone: padding, mixing of lengths, balance over ranks.

`ms-varlen plan` shows these numbers. 100 million samples take about 5 GB; see `scripts/measure/bench_planning.py`.
"""

import dataclasses

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.planning.balance import imbalance
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanSettings
from ms_varlen.planning.windows import batch_overhead, length_mixing

MOST_SAMPLES = 1_000_000
"""Samples that other plans than the recipe's own are made of; of a larger corpus as many are drawn at random."""


def sampled_lengths(lengths: np.ndarray, most: int = MOST_SAMPLES) -> np.ndarray:
    """The lengths, or `most` of them drawn at random, always the same."""
    return lengths if lengths.size <= most else np.random.default_rng(0).choice(lengths, most, replace=False)


def epoch_batches(plans: EpochPlans) -> tuple[np.ndarray, np.ndarray, EpochPlan]:
    """The whole steps of epoch 0: the lengths of their samples in order, and the offsets of their micro-batches."""
    plan = plans.epoch(0)
    offsets = plan.offsets[: plan.num_steps * plans.settings.per_step + 1]
    return np.asarray(plans.lengths)[plan.order[: offsets[-1]]], offsets, plan


def micro_batch_flops(layout: Layout, cost: CostModel, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[k] float64, FLOPs of micro-batches, padding included; arguments as in `Layout.needed_tokens`."""
    tokens, squared = layout.computed_tokens(lengths, offsets), layout.squared_tokens(lengths, offsets)
    return cost.linear * tokens + cost.quadratic * squared


def epoch_numbers(plans: EpochPlans, layout: Layout, cost: CostModel) -> dict[str, float]:
    """The numbers of the first epoch, counted on its plan: JSON values by name."""
    lengths, offsets, plan = epoch_batches(plans)
    computed = layout.computed_tokens(lengths, offsets)
    real, total = int(lengths.sum(dtype=np.int64)), int(computed.sum())
    balance = rank_balance(plans, layout, cost)
    order, row_lengths = np.arange(lengths.size), np.array(layout.row_lengths)
    return {
        "world_size": plans.settings.world_size,
        "steps_per_epoch": plan.num_steps,
        "tokens_real": real,
        "tokens_computed": total,
        "tokens_per_step": round(real / plan.num_steps, 1),
        "pad_ratio": 1 - real / total,
        "padding_overhead": total / real - 1,
        "sizes": int(np.unique(computed).size),
        "max_segments_used": int(np.diff(offsets).max()),
        # Padding of rows, before T is rounded up, against how well lengths are mixed.
        "batch_overhead": batch_overhead(lengths, order, offsets, row_lengths) if row_lengths.size else 0.0,
        "length_mixing": length_mixing(lengths, order, offsets),
        "length_mixing_of_steps": length_mixing(lengths, order, offsets[:: plans.settings.per_step]),
        "imbalance_mean": float(balance.after.mean()),
        "imbalance_max": float(balance.after.max()),
        "imbalance_mean_floor": float(balance.floor.mean()),
        "imbalance_mean_unbalanced": float(balance.before.mean()),
        "imbalance_max_unbalanced": float(balance.before.max()),
    }


@dataclasses.dataclass(frozen=True)
class RankBalance:
    """How far the slowest rank is over the mean in each step of the first epoch, by computed FLOPs.

    Attributes:
        after: [steps] float64, as the plan is.
        floor: [steps] float64, what the costliest part that stays whole (a sample, with the tokens that other ranks
            have no room for; a micro-batch of rows or packs) leaves possible.
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
    """[steps] float64, least FLOPs of the rank that has the longest sample of its step, whatever it is dealt else.

    It must take what the token budgets of the others leave: at best the shortest samples, here even a part of one.
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
