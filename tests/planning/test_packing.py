import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.errors import DataError
from ms_varlen.planning import packing
from ms_varlen.planning.buckets import length_counts
from ms_varlen.planning.packing import best_fit_histogram, pack_best_fit, pack_shuffled


def arrays(packs):
    return packs.order, packs.offsets


def best_fit(lengths, capacity, max_segments):
    return arrays(pack_best_fit(lengths, capacity, max_segments))


def shuffled(lengths, capacity, max_segments):
    return arrays(pack_shuffled(lengths, capacity, max_segments, np.random.default_rng(0)))


packers = pytest.mark.parametrize("pack", [best_fit, shuffled])
limits = st.tuples(st.integers(1, 300), st.integers(1, 40))


def lognormal(samples):
    lengths = np.random.default_rng(0).lognormal(np.log(180), 1.0453, samples)
    return np.clip(np.round(lengths), 1, 4096).astype(np.int32)


def packed_lengths(lengths, order, offsets):
    return [lengths[order[a:b]].tolist() for a, b in itertools.pairwise(offsets)]


def check(lengths, order, offsets, capacity, max_segments):
    """Each sample exactly once, no empty pack, both limits kept."""
    assert (order.dtype, offsets.dtype) == (np.int64, np.int64)
    assert np.array_equal(np.sort(order), np.arange(lengths.size))
    assert (offsets[0], offsets[-1]) == (0, lengths.size)
    sizes = np.diff(offsets)
    if lengths.size:
        assert (sizes.min() >= 1, sizes.max() <= max_segments) == (True, True)
        assert np.add.reduceat(lengths[order].astype(np.int64), offsets[:-1]).max() <= capacity


def naive_best_fit(lengths, capacity, max_segments):
    """Best fit decreasing, one sample at a time; returns the packs' free tokens."""
    spaces, sizes = [], []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [p for p, space in enumerate(spaces) if space >= length and sizes[p] < max_segments]
        if not fitting:
            spaces.append(capacity)
            sizes.append(0)
            fitting = [len(spaces) - 1]
        best = min(fitting, key=lambda p: spaces[p])
        spaces[best] -= length
        sizes[best] += 1
    return sorted(spaces)


@packers
@pytest.mark.parametrize("capacity", [5, 96])
def test_a_capacity_that_is_no_power_of_two_is_filled(pack, capacity):
    lengths = np.array([3, 2, 3, 2]) * capacity // 5
    lengths[1::2] = capacity - lengths[::2]
    order, offsets = pack(lengths, capacity, 64)
    check(lengths, order, offsets, capacity, 64)
    assert [sum(pack) for pack in packed_lengths(lengths, order, offsets)] == [capacity, capacity]


@packers
def test_everything_fits_in_one_pack(pack):
    lengths = np.array([3, 3], np.int32)
    order, offsets = pack(lengths, 8, 64)
    assert (packed_lengths(lengths, order, offsets), offsets.tolist()) == ([[3, 3]], [0, 2])


@packers
def test_segments_per_pack_are_capped(pack):
    assert pack(np.full(4, 2, np.int32), 8, 2)[1].tolist() == [0, 2, 4]


@packers
def test_a_sample_above_the_capacity_is_refused_by_place(pack):
    with pytest.raises(DataError, match=r"sample 2 must fit a pack \(batch.token_budget 8\), got 9 tokens"):
        pack(np.array([3, 8, 9, 12], np.int32), 8, 64)


@packers
def test_an_empty_sample_or_a_cap_of_zero_is_refused(pack):
    with pytest.raises(DataError, match=r"sample 1 must have tokens, got 0"):
        pack(np.array([3, 0], np.int32), 8, 64)
    with pytest.raises(DataError, match=r"max_segments must be >= 1, got 0"):
        pack(np.array([3], np.int32), 8, 0)


@packers
def test_no_samples_make_no_packs(pack):
    order, offsets = pack(np.zeros(0, np.int32), 8, 64)
    assert (order.tolist(), offsets.tolist()) == ([], [0])


@packers
@settings(max_examples=150, deadline=None)
@given(st.data(), limits)
def test_ends_on_every_input_and_keeps_every_sample_once(pack, data, limits):
    capacity, max_segments = limits
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=120)), np.int32)
    check(lengths, *pack(lengths, capacity, max_segments), *limits)


@packers
@pytest.mark.parametrize("capacity", [64, 4096, 100_000])
@pytest.mark.parametrize("max_segments", [1, 5, 32, 1024])
def test_keeps_its_limits_on_all_kinds_of_lengths(pack, capacity, max_segments):
    rng = np.random.default_rng(1)
    kinds = [
        rng.integers(1, capacity + 1, 3000),
        np.full(3000, capacity // 10 + 1),
        np.where(rng.random(3000) < 0.1, capacity // 2 + 1, rng.integers(1, 9, 3000)),
        np.minimum(lognormal(3000), capacity),
    ]
    for lengths in kinds:
        check(lengths, *pack(lengths, capacity, max_segments), capacity, max_segments)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60).map(lambda values: np.array(values, np.int32)))
def test_the_histogram_gives_the_packs_of_one_sample_at_a_time(lengths):
    order, offsets = best_fit(lengths, 50, 64)
    spaces = sorted(50 - sum(pack) for pack in packed_lengths(lengths, order, offsets))
    assert spaces == naive_best_fit(lengths, 50, 64)
    assert best_fit_histogram(length_counts(lengths), 50, 64).num_packs == len(spaces)


def test_identical_packs_are_one_group():
    groups = best_fit_histogram(length_counts(np.array([5, 3] * 1000)), 8, 64)
    assert groups.packs.tolist() == [1000]
    assert list(zip(groups.piece_length, groups.piece_times, strict=True)) == [(5, 1), (3, 1)]


def test_best_fit_takes_equal_lengths_in_their_order():
    order, offsets = best_fit(np.array([2, 6, 2, 6, 4]), 8, 64)
    assert (order.tolist(), offsets.tolist()) == ([1, 0, 3, 2, 4], [0, 2, 4, 5])


def test_a_bad_histogram_is_refused_by_length():
    with pytest.raises(DataError, match=r"counts\[9\] must be 0, above the capacity of 8"):
        best_fit_histogram(length_counts(np.array([3, 9])), 8, 64)
    with pytest.raises(DataError, match=r"counts\[0\] must be 0, got 2"):
        best_fit_histogram(np.array([2, 1]), 8, 64)
    with pytest.raises(DataError, match=r"capacity and max_segments must be >= 1, got 0 and 64"):
        best_fit_histogram(np.array([0, 1]), 0, 64)


def test_shuffled_packs_of_the_known_spread_are_full():
    lengths = lognormal(300_000)
    order, offsets = shuffled(lengths, 4096, 32)
    check(lengths, order, offsets, 4096, 32)
    assert lengths.sum() / ((offsets.size - 1) * 4096) >= 0.999


def test_a_tight_cap_on_segments_is_met_by_mixing_long_and_short_samples():
    lengths = lognormal(100_000)  # 13 samples a pack on the average
    counts = length_counts(lengths)
    assert shuffled(lengths, 4096, 16)[1].size - 1 < 0.85 * best_fit_histogram(counts, 4096, 16).num_packs


def test_the_same_seed_repeats_the_packs_and_another_does_not():
    lengths = lognormal(5000)
    first, again, other = (arrays(pack_shuffled(lengths, 4096, 64, np.random.default_rng(seed))) for seed in (7, 7, 8))
    assert [a.tolist() for a in first] == [a.tolist() for a in again]
    assert first[0].tolist() != other[0].tolist()


def test_packs_stand_in_random_order_and_share_few_pairs_between_seeds():
    lengths = lognormal(20_000)
    neighbours, means = [], []
    for seed in (0, 1):
        order, offsets = arrays(pack_shuffled(lengths, 4096, 64, np.random.default_rng(seed)))
        packs = [frozenset(order[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        neighbours.append({pair for pack in packs for pair in itertools.combinations(sorted(pack), 2)})
        means.append(lengths[order[: lengths.size // 2]].mean() / lengths.mean())
    assert len(neighbours[0] & neighbours[1]) < 0.01 * len(neighbours[0])
    assert means == pytest.approx([1.0, 1.0], abs=0.03)


def test_windows_hold_random_samples_and_lose_none(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 1000)
    monkeypatch.setattr(packing, "BLOCK", 64)
    lengths = np.sort(lognormal(3500))
    order, offsets = shuffled(lengths, 4096, 64)
    check(lengths, order, offsets, 4096, 64)
    quarter = lengths[order[: lengths.size // 4]]
    assert quarter.mean() == pytest.approx(lengths.mean(), rel=0.15)
