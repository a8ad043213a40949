import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.planning import balance
from ms_varlen.planning.balance import (
    StepGrid,
    balance_micro_batches,
    balance_plan,
    imbalance,
    rank_costs,
    steps_of_like_costs,
)
from ms_varlen.planning.batches import Batches, token_budget_offsets

NO_LIMIT = 10**9


def transformer_cost(lengths, hidden=4096):
    return lengths + lengths.astype(np.float64) ** 2 / (6 * hidden)


def lognormal_lengths(samples):
    normal = np.random.default_rng(0).standard_normal(samples)
    return np.clip(np.round(180 * np.exp(1.0453 * normal)), 1, 4096).astype(np.int32)


def groups(batches):
    return [batches.ids(i, i + 1).tolist() for i in range(len(batches))]


def cut(lengths, order, budget, segments):
    return Batches(order, token_budget_offsets(lengths[order], budget, segments))


def balance_step(lengths, costs, grid):
    """The part of each sample of one step."""
    steps = balance._Steps(lengths[None], costs[None], np.array([lengths.size]), grid)
    parts = steps.longest_first()
    assert (parts >= 0).all()
    return steps.share_again(parts)[0]


@st.composite
def plans(draw):
    """A plan within its limits, made of samples in their order."""
    lengths = np.array(draw(st.lists(st.integers(1, 20), min_size=1, max_size=80)), np.int32)
    grid = StepGrid(
        draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(20, 60)), draw(st.integers(1, 6))
    )
    order = np.random.default_rng(draw(st.integers(0, 9))).permutation(lengths.size)
    return lengths, cut(lengths, order, grid.token_budget, grid.max_segments), grid


def padded_costs(lengths, costs, batches, grid):
    """[steps, R] work of each rank in each whole step, padding included."""
    whole = batches.first(len(batches) // grid.parts * grid.parts)
    work = [costs[ids].sum() + grid.padding[lengths[ids].sum()] for ids in groups(whole)]
    return np.reshape(work, (-1, grid.world_size, grid.micro_batches)).sum(axis=2)


def test_imbalance_is_the_excess_of_the_slowest_over_the_mean():
    assert imbalance(np.array([[3.0, 1.0], [2.0, 2.0]])).tolist() == [0.5, 0.0]


def test_nine_samples_over_four_ranks():
    parts = balance_step(np.ones(9, np.int32), np.ones(9), StepGrid(4, 1, NO_LIMIT, NO_LIMIT))
    assert np.bincount(parts).tolist() == [3, 2, 2, 2]


def test_longest_first_is_improved_by_sharing_again():
    costs = np.array([5, 5, 4, 4, 3, 3, 3])  # longest first alone ends at 11, 8, 8
    parts = balance_step(costs, costs, StepGrid(3, 1, NO_LIMIT, NO_LIMIT))
    assert parts.tolist() == [0, 2, 0, 2, 1, 1, 1]  # 9, 9, 9


def test_padding_counts_as_work():
    lengths, costs = np.array([3, 3, 2, 2]), np.array([5, 5, 6, 4])
    grid = StepGrid(2, 1, 10, 9)
    assert balance_step(lengths, costs, grid).tolist() == [1, 1, 0, 0]  # 10, 10
    # In fives, 3 + 3 tokens are 4 of padding, 14; 3 + 2 are none.
    grid = dataclasses.replace(grid, padding=-np.arange(11) % 5)
    assert balance_step(lengths, costs, grid).tolist() == [0, 1, 0, 1]  # 11, 9


def test_what_pads_a_single_sample_may_go_to_others():
    lengths = np.array([1100, 300, 300, 300, 300, 300])
    padding = np.where(np.arange(2049) > 1024, 2048, 1024) - np.arange(2049)
    grid = StepGrid(2, 1, 2048, 9, transformer_cost(padding, hidden=256))
    parts = balance_step(lengths, transformer_cost(lengths, hidden=256), grid)
    # Alone the longest is slowest, since its tail of 948 attends too; with 900 more it is 48.
    assert sorted(np.bincount(parts, lengths).tolist()) == [600, 2000]


def test_ranks_are_balanced_and_not_their_micro_batches():
    costs = np.array([9, 1, 5, 5])
    parts = balance_step(costs, costs, StepGrid(2, 2, NO_LIMIT, NO_LIMIT))
    assert parts.tolist() == [0, 1, 2, 3]


def test_a_costly_sample_leaves_no_micro_batch_of_its_rank_empty():
    costs = np.array([100, 1, 1, 1, 1])
    parts = balance_step(costs, costs, StepGrid(2, 2, NO_LIMIT, NO_LIMIT))
    assert sorted(np.bincount(parts, minlength=4).tolist()) == [1, 1, 1, 2]


def test_fewer_samples_than_parts_are_spread():
    assert balance_step(np.array([4, 2]), np.array([4, 2]), StepGrid(4, 1, 8, 8)).tolist() == [0, 1]


def test_each_rank_has_the_same_steps_and_the_rest_stays_behind():
    lengths = np.array([8, 8, 8, 1, 1, 1], np.int32)
    grid = StepGrid(2, 1, 8, 8)
    dealt = balance_plan(lengths, lengths.take, cut(lengths, np.arange(6), 8, 8), grid)
    assert groups(dealt) == [[0], [1], [2], [3, 4, 5]]
    dealt = balance_plan(lengths, lengths.take, cut(lengths, np.array([0, 3, 4, 1, 2, 5]), 8, 8), grid)
    assert groups(dealt) == [[0], [3, 4], [1], [2], [5]]
    assert rank_costs(lengths.take, dealt, grid).tolist() == [[8, 2], [8, 8]]


def test_a_step_is_dealt_again_and_samples_keep_their_order():
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    dealt = balance_plan(lengths, lengths.take, Batches(np.arange(8), np.array([0, 4, 8])), StepGrid(2, 1, 99, 99))
    assert groups(dealt) == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_a_full_budget_keeps_the_grouping_that_fits():
    # Longest first makes 5 + 2 and 4 + 3 of at most 8, and has no place for the other 2.
    lengths = np.array([5, 3, 4, 2, 2], np.int32)
    dealt = balance_plan(lengths, lengths.take, Batches(np.arange(5), np.array([0, 2, 5])), StepGrid(2, 1, 8, 8))
    assert groups(dealt) == [[0, 1], [2, 3, 4]]


def test_no_swap_breaks_the_budget_of_either_rank():
    lengths, costs = np.array([6, 2, 5, 3]), np.array([9, 9, 1, 1])
    # Any swap of two samples, and any move of one, gives a rank 9 tokens or more.
    dealt = balance_plan(lengths, costs.take, Batches(np.arange(4), np.array([0, 2, 4])), StepGrid(2, 1, 8, 8))
    assert groups(dealt) == [[0, 1], [2, 3]]


@settings(deadline=None)
@given(plans(), st.integers(1, 7))
def test_steps_keep_their_samples_and_parts_their_limits(plan, divisor):
    lengths, batches, grid = plan
    grid = dataclasses.replace(grid, padding=-np.arange(grid.token_budget + 1) % divisor)
    costs = np.random.default_rng(0).integers(1, 50, lengths.size)  # not by length, so that limits and balance conflict
    dealt = balance_plan(lengths, costs.take, batches, grid)
    whole = len(batches) // grid.parts * grid.parts
    steps, dealt_steps = (b.first(whole).grouped(grid.parts) for b in (batches, dealt))
    assert dealt_steps.offsets.tolist() == steps.offsets.tolist()
    assert [sorted(g) for g in groups(dealt_steps)] == [sorted(g) for g in groups(steps)]
    assert groups(dealt)[whole:] == groups(batches)[whole:]
    assert dealt.sizes.min() >= 1
    assert dealt.sizes.max() <= grid.max_segments
    assert dealt.sums(lengths[dealt.order]).max() <= grid.token_budget
    before, after = (padded_costs(lengths, costs, b, grid) for b in (batches, dealt))
    assert (after.max(axis=1) <= before.max(axis=1) * (1 + 1e-9)).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=balance.SHARED), st.integers(1, 9), st.integers(0, 9))
def test_few_samples_of_two_ranks_are_dealt_in_the_best_way(lengths, divisor, seed):
    lengths = np.array(lengths)
    costs = lengths + np.random.default_rng(seed).integers(1, 50, lengths.size)  # a token is work, as padding is
    grid = StepGrid(2, 1, 120, 8, -np.arange(121) % divisor)
    ways = np.array(list(itertools.product([0, 1], repeat=lengths.size)))
    tokens, work, samples = (np.stack([(1 - ways) @ v, ways @ v]) for v in (lengths, costs, np.ones(lengths.size, int)))
    possible = (tokens <= 120).all(axis=0) & (samples >= 1).all(axis=0) & (samples <= 8).all(axis=0)
    slowest = (work + grid.padding[np.minimum(tokens, 120)]).max(axis=0)[possible].min()
    parts = balance_step(lengths, costs, grid)
    found = np.bincount(parts, costs) + grid.padding[np.bincount(parts, lengths).astype(int)]
    assert found.max() <= max(slowest, found.mean() * (1 + balance.GOOD_ENOUGH)) + 1e-9


@settings(deadline=None)
@given(plans())
def test_a_step_does_not_depend_on_those_worked_on_with_it(plan):
    lengths, batches, grid = plan
    together = balance_plan(lengths, lengths.take, batches, grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "CHUNK_SAMPLES", 1)
        alone = balance_plan(lengths, lengths.take, batches, grid)
    assert groups(together) == groups(alone)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3))
def test_no_part_of_a_step_is_empty_and_none_repeats(costs, world_size, micro_batches):
    costs = np.array(costs)
    grid = StepGrid(world_size, micro_batches, NO_LIMIT, NO_LIMIT)
    parts = balance_step(costs, costs, grid)
    used = np.unique(parts)
    assert used.size == min(grid.parts, costs.size)
    assert 0 <= used.min() <= used.max() < grid.parts


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_whole_micro_batches_stay_in_their_step(costs, world_size, micro_batches):
    costs = np.array(costs, np.int64)
    order = balance_micro_batches(costs, world_size, micro_batches)
    per_step = world_size * micro_batches
    whole = costs.size // per_step * per_step
    in_steps = order[:whole].reshape(-1, per_step)
    assert np.sort(in_steps, axis=1).tolist() == np.arange(whole).reshape(-1, per_step).tolist()
    assert order[whole:].tolist() == list(range(whole, costs.size))
    before, after = (
        c.reshape(-1, world_size, micro_batches).sum(2).max(1) for c in (costs[:whole], costs[order[:whole]])
    )
    assert (after <= before).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=90), st.integers(1, 4), st.integers(0, 9))
def test_steps_of_like_costs_hold_each_micro_batch_of_their_window_once(costs, per_step, seed):
    costs = np.array(costs, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "STEPS_TOGETHER", 3)
        order = steps_of_like_costs(costs, per_step, np.random.default_rng(seed))
    whole = costs.size // per_step * per_step
    for first in range(0, whole, 3 * per_step):
        last = min(first + 3 * per_step, whole)
        assert sorted(order[first:last]) == list(range(first, last))
        steps = sorted(costs[order[first:last]].reshape(-1, per_step).tolist(), key=lambda step: (min(step), max(step)))
        assert sorted(costs[first:last]) == [cost for step in steps for cost in sorted(step)]
    assert order[whole:].tolist() == list(range(whole, costs.size))


def test_many_ranks_are_balanced_in_groups():
    lengths = lognormal_lengths(30_000)
    grid = StepGrid(96, 1, 16384, 1024)
    assert (grid.groups, StepGrid(97, 1, 1, 1).groups, StepGrid(8, 2, 1, 1).groups) == (3, 1, 1)
    assert (StepGrid(1024, 1, 1, 1).groups, StepGrid(1024, 4, 1, 1).groups, StepGrid(50, 1, 1, 1).groups) == (
        32,
        128,
        2,
    )
    order = np.random.default_rng(1).permutation(lengths.size)
    plan = cut(lengths, order, 16384, 1024)
    costs = transformer_cost(lengths).take
    dealt = balance_plan(lengths, costs, plan, grid)
    assert np.sort(dealt.order).tolist() == list(range(lengths.size))
    assert dealt.sums(lengths[dealt.order]).max() <= 16384
    steps, dealt_steps = plan.grouped(grid.parts), Batches(dealt.order, plan.grouped(grid.parts).offsets)
    assert [sorted(g) for g in groups(dealt_steps)] == [sorted(g) for g in groups(steps)]
    before, after = imbalance(rank_costs(costs, plan, grid)), imbalance(rank_costs(costs, dealt, grid))
    assert before.mean() > 0.03
    assert after.mean() < 0.005


def test_micro_batches_of_two_ranks_are_paired():
    assert balance_micro_batches(np.array([8, 7, 2, 1, 5]), 2, 2).tolist() == [0, 3, 1, 2, 4]


def test_eight_ranks_wait_for_at_most_one_percent():
    lengths = lognormal_lengths(100 * 8 * 16)
    grid = StepGrid(8, 1, NO_LIMIT, NO_LIMIT)
    plan = Batches(np.arange(lengths.size), np.arange(0, lengths.size + 1, 16))
    costs = transformer_cost(lengths)
    before = imbalance(rank_costs(costs.take, plan, grid))
    after = imbalance(rank_costs(costs.take, balance_plan(lengths, costs.take, plan, grid), grid))
    assert before.mean() > 0.5
    assert after.mean() <= 0.01
    means = costs.reshape(100, 8, 16).sum(axis=(1, 2)) / 8
    floor = np.maximum(costs.reshape(100, -1).max(axis=1) / means - 1, 0)
    assert (after <= floor + 0.01).all()
