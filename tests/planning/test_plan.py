import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen import CheckpointError, DataError, LengthsError
from ms_varlen.batches.layout import Layout, lay_out
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.planning.batches import row_offsets, token_budget_offsets
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanSettings, PlanState


def plan_settings(**changes):
    return PlanSettings(
        **{"policy": "token_budget", "size": 8, "max_segments": 64, "micro_batches": 1, "seed": 0} | changes
    )


def groups(offsets, values):
    return [list(values[a:b]) for a, b in itertools.pairwise(offsets)]


def test_budget_is_hard_and_filled_in_order():
    lengths = np.array([5, 3, 4, 4, 1, 8, 2], np.int32)
    assert groups(token_budget_offsets(lengths, 8, 64), lengths.tolist()) == [[5, 3], [4, 4], [1], [8], [2]]


def test_segment_cap_closes_a_micro_batch():
    assert token_budget_offsets(np.full(5, 2, np.int32), 100, 2).tolist() == [0, 2, 4, 5]


def test_more_segments_than_the_operator_takes_are_spread():
    offsets = token_budget_offsets(np.ones(3000, np.int32), 4096, 1024)
    assert np.diff(offsets).tolist() == [1024, 1024, 952]


def test_a_sample_above_the_budget_is_refused_by_name():
    with pytest.raises(DataError, match=r"sample 1 must fit batch.token_budget \(25\), got 40 tokens"):
        token_budget_offsets(np.array([3, 40], np.int32), 25, 64)


def test_rows_keep_the_short_last_micro_batch():
    sizes = np.diff(row_offsets(249, 2))
    assert (sizes.size, sizes[-1], sizes.sum()) == (125, 1, 249)


def test_epochs_differ_and_the_same_seed_repeats_them():
    lengths = np.random.default_rng(3).integers(1, 9, 200).astype(np.int32)
    orders = [EpochPlan(lengths, plan_settings(), epoch).trained_ids(50) for epoch in (0, 1, 0)]
    assert orders[0].tolist() != orders[1].tolist()
    assert orders[0].tolist() == orders[2].tolist()
    assert set(np.sign(np.diff(lengths[orders[0]]))) == {-1, 0, 1}


def test_resumes_at_the_sample_after_the_last_step():
    plan = EpochPlan(np.full(12, 2, np.int32), plan_settings(policy="rows", size=3), epoch=None)
    assert plan.micro_batch(step=2, micro_batch=0).tolist() == [6, 7, 8]


@pytest.mark.parametrize("epoch", [0, 1])
def test_next_pack_after_the_first_holds_the_rest(epoch):
    lengths = np.array([5, 5, 3], np.int32)
    plans = EpochPlans(lengths, "f", plan_settings())
    order = plans.epoch(epoch).trained_ids(plans.epoch(epoch).num_steps).tolist()
    first = plans.epoch(epoch).step_ids(0).tolist()
    resumed = [plan.step_ids(state.step).tolist() for state, plan in _steps(plans, PlanState(epoch, 1), 1)]
    assert resumed == [order[len(first) :][: len(resumed[0])]]
    assert sorted(order) == [0, 1, 2]


def test_order_5_5_3_packs_the_last_two_together():  # in the given order
    plan = EpochPlan(np.array([5, 5, 3], np.int32), plan_settings(), epoch=None)
    assert [plan.step_ids(s).tolist() for s in range(plan.num_steps)] == [[0], [1, 2]]


def test_the_first_pack_has_no_pad_as_a_target():
    samples = [[1, 2, 3], [11, 12, 13], [21, 22, 23, 24, 25]]
    lengths = np.array([len(sample) for sample in samples], np.int32)
    ids = EpochPlan(lengths, plan_settings(), epoch=None).micro_batch(0, 0)
    layout = Layout("packed", TokenShapes("static", 8, 8, 8, max_segments=8), seq_length=8)
    columns = lay_out(layout.place(lengths[ids]), np.concatenate([samples[i] for i in ids]), pad_id=0)
    assert ids.tolist() == [0, 1]
    assert columns["labels"].tolist() == [2, 3, -100, 12, 13, -100, -100, -100]


@pytest.mark.parametrize(("policy", "micro_batches"), [("packed", 2), ("rows", 2), ("token_budget", 2), ("packed", 4)])
def test_a_step_holds_the_same_samples_however_many_ranks_share_it(policy, micro_batches):
    lengths = np.random.default_rng(5).integers(1, 9, 400).astype(np.int32)
    chosen = plan_settings(policy=policy, size=2 if policy == "rows" else 8, quadratic_cost=0.1)
    one, several = (
        EpochPlan(lengths, dataclasses.replace(chosen, world_size=ranks, micro_batches=micro_batches // ranks), 1)
        for ranks in (1, 2)
    )
    assert one.num_steps == several.num_steps > 10
    for step in range(one.num_steps):
        assert sorted(one.step_ids(step)) == sorted(several.step_ids(step))


def test_a_state_of_other_settings_is_refused():
    lengths = np.full(9, 3, np.int32)
    old = EpochPlans(lengths, "f", plan_settings(size=1536))
    with pytest.raises(CheckpointError, match=r"plan.fingerprint must be"):
        EpochPlans(lengths, "f", plan_settings(size=1500)).resume(old.to_dict(old.start()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_from_before_plans_knew_the_sizes_continues(ranks):
    lengths = np.random.default_rng(0).integers(1, 9, 200).astype(np.int32)
    before = EpochPlans(lengths, "f", plan_settings(world_size=ranks))
    saved = before.to_dict(PlanState(0, 3))
    for name in ("divisor", "token_sizes", "seq_length"):
        del saved["settings"][name]
    sizes = {"divisor": 4, "seq_length": 8} if ranks > 1 else {}
    now = EpochPlans(lengths, "f", plan_settings(world_size=ranks, **sizes))
    state = now.resume(saved) if ranks == 1 else now.resume_changed(json.loads(json.dumps(saved)))
    assert (now.fingerprint == before.fingerprint) == (ranks == 1)
    plan = now.epoch(0)
    rest = plan.batches.order[plan.batches.offsets[state.step * ranks] :]
    assert sorted([*before.epoch(0).trained_ids(3), *rest]) == list(range(200))


def test_the_sizes_of_t_decide_who_trains_a_sample_and_never_when():
    lengths = np.random.default_rng(0).integers(1, 9, 200).astype(np.int32)
    declared = [{}, {"divisor": 16}, {"token_sizes": (24, 36, 48)}]
    chosen = [plan_settings(size=48, world_size=2, quadratic_cost=0.1, **sizes) for sizes in declared]
    plans = [EpochPlan(lengths, settings, 0) for settings in chosen]
    assert len({plan.batches.order.tobytes() for plan in plans}) == 3
    for step in range(plans[0].num_steps):
        assert len({tuple(sorted(plan.step_ids(step))) for plan in plans}) == 1


def test_resume_in_the_second_epoch_equals_the_uninterrupted_run():
    lengths = np.random.default_rng(0).integers(1, 9, 40).astype(np.int32)
    plans = EpochPlans(lengths, "f", plan_settings())
    whole = [(s.epoch, s.step, p.step_ids(s.step).tolist()) for s, p in _steps(plans, plans.start(), 70)]
    at = next(i for i, (epoch, step, _) in enumerate(whole) if (epoch, step) == (1, 2))
    fresh = EpochPlans(lengths, "f", plan_settings())
    state = fresh.resume(plans.to_dict(PlanState(1, 2)))
    rest = [(s.epoch, s.step, p.step_ids(s.step).tolist()) for s, p in _steps(fresh, state, 70 - at)]
    assert rest == whole[at:]
    assert next(step for epoch, step, _ in whole if epoch == 2) == 0


def _steps(plans, state, count):
    steps = plans.steps_from(state)
    return [next(steps) for _ in range(count)]


@pytest.mark.parametrize("policy", ["token_budget", "packed", "bucketed", "rows"])
def test_unknown_lengths_are_refused_in_every_policy(policy):
    chosen = plan_settings(policy=policy, row_lengths=(4, 8))
    for lengths in ([0, 0, 0], [2, 0, 3]):
        with pytest.raises(LengthsError, match=r"lengths\[\d\] must be >= 1, got 0"):
            EpochPlan(np.array(lengths, np.int32), chosen, 0)


def test_an_epoch_that_fills_no_step_is_refused():
    with pytest.raises(DataError, match=r"at least one step \(4 micro-batches\), got 1"):
        EpochPlan(np.array([3, 2], np.int32), plan_settings(micro_batches=4), 0)


CHANGES = st.sampled_from(
    [
        {"policy": "token_budget"},
        {"policy": "packed"},
        {"policy": "bucketed", "row_lengths": (2, 5, 8)},
        {"policy": "rows", "size": 2},
        {"policy": "rows", "size": 3, "row_lengths": (4, 8), "window": 7},
        {"policy": "token_budget", "size": 11},
        {"policy": "token_budget", "world_size": 2},
        {"policy": "packed", "world_size": 3, "quadratic_cost": 0.1},
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=40, max_size=80), st.lists(CHANGES, min_size=2, max_size=4), st.data())
def test_changes_within_an_epoch_lose_and_repeat_nothing(lengths, changes, data):
    lengths = np.array(lengths, np.int32)
    trained, saved = [], None
    for change in changes:
        plans = EpochPlans(lengths, "f", plan_settings(**change))
        state = plans.start() if saved is None else plans.resume_changed(saved)
        if state.epoch:
            break  # nothing was left that fills a step
        for _ in range(data.draw(st.integers(0, plans.epoch(0).num_steps - 1), label="steps")):
            trained += plans.epoch(0).step_ids(state.step).tolist()
            state = plans.after(state)
        saved = plans.to_dict(state)
        again = EpochPlans(lengths, "f", plan_settings(**change))
        assert again.resume(saved) == state
        assert again.epoch(0).batches.order.tolist() == plans.epoch(0).batches.order.tolist()
    plan = plans.epoch(0)
    rest = (
        plan.batches.order[plan.batches.offsets[state.step * plan.settings.per_step] :]
        if not state.epoch
        else plan.batches.order
    )
    assert sorted(trained + rest.tolist()) == list(range(lengths.size))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=30, max_size=60),  # at least 6 micro-batches: 5 samples each at most
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(["token_budget", "rows", "packed", "bucketed"]),
    st.integers(0, 3),
)
def test_each_sample_is_trained_or_left_over_exactly_once(lengths, micro_batches, world_size, policy, epoch):
    lengths = np.array(lengths, np.int32)
    chosen = plan_settings(
        policy=policy,
        size=2 if policy == "rows" else 8,
        max_segments=5,
        micro_batches=micro_batches,
        world_size=world_size,
        row_lengths=(3, 8) if policy == "bucketed" else (),
        quadratic_cost=0.01,
    )
    plan = EpochPlan(lengths, chosen, epoch)
    seen = []
    for step in range(plan.num_steps):
        ids = [plan.micro_batch(step, m, rank) for rank in range(world_size) for m in range(micro_batches)]
        assert np.concatenate(ids).tolist() == plan.step_ids(step).tolist()
        for part in ids:
            assert 1 <= part.size <= (2 if policy == "rows" else 5)
            if policy in ("token_budget", "packed"):
                assert lengths[part].sum() <= 8
            if policy == "bucketed":
                assert part.size * (3 if lengths[part].max() <= 3 else 8) <= 8
        seen += np.concatenate(ids).tolist()
    assert seen == plan.trained_ids(plan.num_steps).tolist()
    assert sorted(seen + plan.left_over.tolist()) == list(range(lengths.size))
