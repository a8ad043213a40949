import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.errors import DataError
from ms_varlen.planning import batches as batches_module
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.rows import (
    batch_overhead,
    bucket_rows,
    bucketed_batches,
    divisor_boundaries,
    length_mixing,
    window_trade,
    windowed_batches,
)

EXACT = divisor_boundaries(64, 1)  # rows as long as their longest sample


def groups(batches):
    return [batches.ids(i, i + 1).tolist() for i in range(len(batches))]


corpora = st.lists(st.integers(1, 64), max_size=120).map(lambda values: np.array(values, np.int32))


def test_windows_are_sorted_and_cut_one_by_one():
    lengths = np.array([2, 9, 4, 4, 8, 1, 3])
    batches = windowed_batches(lengths, np.arange(7), 4, 3, EXACT, None)
    assert groups(batches) == [[1, 2, 3], [0], [4, 6, 5]]


def test_rows_of_the_same_rounded_length_keep_their_shuffled_order():
    lengths = np.array([5, 8, 6, 3])
    batches = windowed_batches(lengths, np.array([2, 3, 0, 1]), 4, 3, divisor_boundaries(8, 4), None)
    assert groups(batches) == [[2, 0, 1], [3]]


def test_the_last_micro_batch_may_be_short():
    batches = bucketed_batches(np.full(249, 3), np.arange(249), np.array([4]), np.array([2]), np.random.default_rng(0))
    assert np.sort(batches.sizes).tolist() == [1] + [2] * 124


def test_epochs_differ_repeat_and_are_not_sorted():
    lengths = np.random.default_rng(3).integers(1, 65, 500)

    def epoch(number):
        rng = np.random.default_rng([0, number])
        return windowed_batches(lengths, rng.permutation(500), 100, 4, EXACT, rng)

    first, second, again = epoch(0), epoch(1), epoch(0)
    assert groups(first) == groups(again) != groups(second)
    means = first.sums(lengths[first.order]) / first.sizes
    assert set(np.sign(np.diff(means))) >= {-1, 1}


def test_a_length_equal_to_a_boundary_belongs_to_it():
    lengths = np.array([4, 5, 8, 1, 9, 4])
    batches = bucketed_batches(lengths, np.array([5, 4, 3, 2, 1, 0]), np.array([4, 8, 16]), np.array([2, 2, 1]), None)
    assert groups(batches) == [[5, 3], [0], [2, 1], [4]]


def test_rows_of_a_bucket_fill_the_budget_up_to_a_cap():
    assert bucket_rows(np.array([16, 48, 100]), 100, 5).tolist() == [5, 2, 1]


def test_what_no_micro_batch_holds_is_refused_by_name():
    lengths = np.array([3, 40])
    for refused in (
        lambda: bucketed_batches(lengths, np.array([1, 0]), np.array([8, 16]), np.array([2, 1]), None),
        lambda: windowed_batches(lengths, np.array([1, 0]), 10, 2, np.array([8, 16]), None),
    ):
        with pytest.raises(DataError, match=r"sample 1 must fit the last row length \(16\), got 40 tokens"):
            refused()
    with pytest.raises(DataError, match=r"row length 48 must fit batch.token_budget \(40\), which counts padded rows"):
        bucket_rows(divisor_boundaries(40, 16), 40, 64)


@given(corpora, st.integers(1, 50), st.integers(1, 9), st.integers(1, 16))
def test_every_window_is_sorted_and_cut_into_rows(lengths, window, rows, divisor):
    order = np.random.default_rng(1).permutation(lengths.size)
    found = windowed_batches(lengths, order, window, rows, divisor_boundaries(64, divisor), None)
    windows = [order[i : i + window].tolist() for i in range(0, lengths.size, window)]
    by_row = [sorted(ids, key=lambda i: -(-lengths[i] // divisor), reverse=True) for ids in windows]
    assert groups(found) == [ids[i : i + rows] for ids in by_row for i in range(0, len(ids), rows)]


@given(corpora, st.integers(1, 50), st.integers(1, 9), st.integers(0, 9))
def test_shuffled_micro_batches_hold_each_sample_once(lengths, window, rows, seed):
    def plan(rng):
        order = np.random.default_rng(1).permutation(lengths.size)
        return windowed_batches(lengths, order, window, rows, EXACT, rng)

    batches = plan(np.random.default_rng(seed))
    assert sorted(batches.order) == list(range(lengths.size))
    assert sorted(groups(batches)) == sorted(groups(plan(None)))
    assert groups(plan(np.random.default_rng(seed))) == groups(batches)


@given(corpora, st.sets(st.integers(1, 63)), st.integers(64, 300), st.integers(0, 9))
def test_buckets_are_kept_apart_and_lose_nothing(lengths, inner, budget, seed):
    boundaries = np.array([*sorted(inner), 64])
    rows = bucket_rows(boundaries, budget, 128)
    shuffled = np.random.default_rng(1).permutation(lengths.size)
    batches = bucketed_batches(lengths, shuffled, boundaries, rows, np.random.default_rng(seed))
    assert sorted(batches.order) == list(range(lengths.size))
    buckets = np.array([np.searchsorted(boundaries, lengths[ids[0]]) for ids in groups(batches)], np.int64)
    counts = batches.sizes
    assert np.searchsorted(boundaries, lengths[batches.order]).tolist() == np.repeat(buckets, counts).tolist()
    assert (counts <= rows[buckets]).all()
    short = buckets[counts < rows[buckets]]
    assert np.unique(short).size == short.size
    assert (counts * boundaries[buckets] <= budget).all()


def test_the_order_of_micro_batches_does_not_depend_on_the_chunk(monkeypatch):
    lengths = np.random.default_rng(3).integers(1, 65, 100)
    whole = windowed_batches(lengths, np.arange(100), 20, 3, EXACT, np.random.default_rng(0))
    monkeypatch.setattr(batches_module, "CHUNK_BATCHES", 3)
    parts = windowed_batches(lengths, np.arange(100), 20, 3, EXACT, np.random.default_rng(0))
    assert groups(whole) == groups(parts)


def test_overhead_counts_rows_padded_to_their_longest():
    overhead = batch_overhead(
        np.array([3, 5, 8]), Batches(np.array([2, 0, 1]), np.array([0, 1, 3])), np.array([4, 6, 8])
    )
    assert overhead == (8 + 6 + 6) / 16 - 1


def test_mixing_is_nothing_when_sorted_apart_and_one_by_chance():
    lengths = np.array([1, 1, 8, 8])
    assert length_mixing(lengths, Batches(np.arange(4), np.array([0, 2, 4]))) == 0
    assert length_mixing(lengths, Batches(np.array([0, 2, 1, 3]), np.array([0, 2, 4]))) == 1.5
    assert length_mixing(np.full(4, 3), Batches(np.arange(4), np.array([0, 2, 4]))) == 1
    assert length_mixing(lengths, Batches(np.arange(4), np.arange(5))) == 1
    many = np.random.default_rng(0).integers(1, 1000, 20_000)
    assert abs(length_mixing(many, Batches(np.arange(20_000), np.arange(0, 20_001, 8))) - 1) < 0.02


def test_wider_windows_pad_less_and_mix_less():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(180), 1.0453, 20_000).round(), 1, 4096).astype(int)
    boundaries = divisor_boundaries(4096, 16)
    order = np.random.default_rng(1).permutation(20_000)
    plans = [
        windowed_batches(lengths, order, window, 4, boundaries, np.random.default_rng(0))
        for window in (100, 1000, 10_000)
    ]
    padding = [batch_overhead(lengths, plan, boundaries) for plan in plans]
    mixing = [length_mixing(lengths, plan) for plan in plans]
    assert 0.2 > padding[0] > padding[1] > padding[2]
    assert mixing[0] > mixing[1] > mixing[2] > 0
    assert padding[2] < 0.04


def test_a_window_of_one_micro_batch_sorts_nothing_and_a_larger_one_trades_mixing_for_padding():
    lengths = np.random.default_rng(0).integers(1, 65, 4000).astype(np.int32)
    rows = window_trade(lengths, 8, EXACT, [8, 80, 4000], per_step=4, seed=0)
    assert [row.window for row in rows] == [8, 80, 4000]
    padding, mixing = ([getattr(row, name) for row in rows] for name in ("batch_overhead", "length_mixing"))
    assert padding == sorted(padding, reverse=True)
    assert padding[-1] < 0.01 < 0.5 < padding[0]
    assert mixing == sorted(mixing, reverse=True)
    assert mixing[-1] < 0.01
    assert mixing[0] == pytest.approx(1, abs=0.05)
    assert all(row.length_mixing_of_steps > 0.7 for row in rows)


def test_window_trade_of_a_few_samples_has_whole_values():
    rows = window_trade(np.array([4, 1, 4, 1], np.int32), 2, np.array([4]), [4], per_step=1, seed=0)
    expected = {"window": 4, "batch_overhead": 0.6, "length_mixing": 0.0, "length_mixing_of_steps": 0.0}
    assert [dataclasses.asdict(row) for row in rows] == [pytest.approx(expected, abs=1e-12)]
