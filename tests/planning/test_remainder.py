import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.errors import CheckpointError, DataError
from ms_varlen.planning.plan import EpochPlan, PlanSettings
from ms_varlen.planning.remainder import TrainedSet, original_ids

ROWS = PlanSettings(policy="rows", size=1, max_segments=64, micro_batches=1, seed=0)


def trained_by(trained, lengths, settings, steps):
    """Sample ids of the first steps of a plan of what remains; steps beyond its end are not there."""
    remaining = trained.remaining_ids()
    try:
        plan = EpochPlan(lengths[remaining], settings, epoch=0)
    except DataError:  # less than a step remains
        return np.zeros(0, np.int64)
    return original_ids(plan.trained_ids(min(steps, plan.num_steps)), remaining)


def test_twelve_samples_on_four_ranks_then_on_two():
    lengths = np.full(12, 3, np.int32)
    trained = TrainedSet.none(12, "f")
    first = trained_by(trained, lengths, dataclasses.replace(ROWS, world_size=4), steps=1)
    trained = trained.with_ids(first)
    second = trained_by(trained, lengths, dataclasses.replace(ROWS, world_size=2), steps=4)
    assert (first.size, second.size) == (4, 8)
    assert sorted([*first, *second]) == list(range(12))


def test_a_changed_budget_loses_and_repeats_nothing():
    lengths = np.random.default_rng(0).integers(1, 1500, 64).astype(np.int32)
    settings = dataclasses.replace(ROWS, policy="token_budget", size=1536)
    trained = TrainedSet.none(64, "f")
    first = trained_by(trained, lengths, settings, steps=7)
    second = trained_by(trained.with_ids(first), lengths, dataclasses.replace(settings, size=1500), steps=64)
    assert first.size >= 7
    assert sorted([*first, *second]) == list(range(64))


def test_bits_begin_with_the_first_sample():
    trained = TrainedSet.none(10, "f").with_ids(np.array([9, 0, 2]))
    assert trained.bits.tolist() == [0b10100000, 0b01000000]
    assert (trained.count, trained.trained_ids().tolist()) == (3, [0, 2, 9])
    assert trained.remaining_ids().tolist() == [1, 3, 4, 5, 6, 7, 8]


def test_places_in_the_remainder_become_ids_of_the_corpus():
    assert original_ids(np.array([2, 0, 1]), np.array([4, 7, 9])).tolist() == [9, 4, 7]


def test_a_plan_of_something_else_is_refused():
    with pytest.raises(DataError, match=r"ids\[1\] must be from 0 to 2, got 3; make the plan from remaining_ids"):
        original_ids(np.array([2, 3]), np.array([4, 7, 9]))


@pytest.mark.parametrize("ids", [[5, 2], [1, 5, 5]])
def test_a_sample_trained_twice_is_refused(ids):
    trained = TrainedSet.none(8, "f").with_ids(np.array([2]))
    with pytest.raises(DataError, match=r"sample [25] must be trained at most once an epoch, got it again"):
        trained.with_ids(np.array(ids))


def test_a_set_of_another_corpus_is_refused():
    with pytest.raises(CheckpointError, match=r"lengths_fingerprint must be g .* the checkpoint has f"):
        TrainedSet.from_dict(TrainedSet.none(8, "f").to_dict(), "g")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 7}, "fingerprint must match its bits"),
        ({"fingerprint": "0"}, "fingerprint must match its bits"),
        ({"bits": TrainedSet.none(8, "f").with_ids(np.array([1])).to_dict()["bits"]}, "must match its bits"),
        ({"bits": "AAAA"}, "bits must be base64 of zlib"),
        ({"bits": "?"}, "bits must be base64 of zlib"),
    ],
)
def test_a_damaged_set_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        TrainedSet.from_dict(TrainedSet.none(8, "f").to_dict() | changes, "f")


@given(st.integers(0, 70).flatmap(lambda n: st.tuples(st.just(n), *[st.sets(st.integers(0, max(n - 1, 0)))] * 2)))
def test_sets_survive_json(case):
    samples, first, second = case
    first, second = (ids if samples else set() for ids in (first, second))
    one, two = (TrainedSet.none(samples, "f").with_ids(np.array(sorted(ids), int)) for ids in (first, second))
    back = TrainedSet.from_dict(json.loads(json.dumps(one.to_dict())), "f")
    assert back.trained_ids().tolist() == sorted(first)
    assert back.fingerprint == one.fingerprint
    assert (one.fingerprint == two.fingerprint) == (first == second)
    assert sorted([*back.trained_ids(), *back.remaining_ids()]) == list(range(samples))


changed_settings = st.tuples(
    st.builds(
        PlanSettings,
        policy=st.sampled_from(["token_budget", "rows"]),
        size=st.integers(9, 20),
        max_segments=st.integers(1, 8),
        micro_batches=st.integers(1, 3),
        seed=st.integers(0, 3),
        world_size=st.integers(1, 4),
    ),
    st.integers(0, 4),
)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=150), st.lists(changed_settings, max_size=6))
def test_an_epoch_trains_each_sample_once_whatever_changes(values, changes):
    lengths = np.array(values, np.int32)
    trained = TrainedSet.none(lengths.size, "f")
    seen: list[int] = []
    for settings, steps in changes:
        ids = trained_by(trained, lengths, settings, steps)
        trained = TrainedSet.from_dict(trained.with_ids(ids).to_dict(), "f")
        seen += ids.tolist()
    rest = trained_by(trained, lengths, ROWS, steps=lengths.size)
    assert len(set(seen)) == len(seen)
    assert sorted([*seen, *rest]) == list(range(lengths.size))
