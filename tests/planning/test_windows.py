import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.errors import DataError
from ms_varlen.planning.windows import (
    batch_overhead,
    bucket_rows,
    bucketed_batches,
    divisor_boundaries,
    length_mixing,
    window_trade,
    windowed_batches,
)

EXACT = divisor_boundaries(64, 1)  # rows as long as their longest sample


def groups(order, offsets):
    return [order[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def fill_one_window(ids, sizes, token_budget, max_segments, padded):
    """Micro-batches of one window by the plainest loop: the largest first, close one when the next does not fit."""
    batches = []
    for i in sorted(ids, key=lambda i: -sizes[i]):
        batch = batches[-1] if batches else []
        tokens = (len(batch) + 1) * sizes[batch[0]] if padded and batch else sum(sizes[j] for j in [*batch, i])
        if batch and tokens <= token_budget and len(batch) < max_segments:
            batch.append(i)
        else:
            batches.append([i])
    return batches


corpora = st.lists(st.integers(1, 64), max_size=120).map(lambda values: np.array(values, np.int32))


def test_a_padded_budget_counts_what_is_computed():  # B01
    order, offsets = windowed_batches(np.array([7, 11]), np.arange(2), 10, 20, 64, EXACT, None)
    assert groups(order, offsets) == [[1], [0]]


def test_a_real_budget_counts_tokens():
    order, offsets = windowed_batches(np.array([7, 11, 3]), np.arange(3), 10, 20, 64, None, None)
    assert groups(order, offsets) == [[1, 0], [2]]


def test_windows_are_sorted_and_cut_one_by_one():
    lengths = np.array([2, 9, 4, 4, 8, 1, 3])
    order, offsets = windowed_batches(lengths, np.arange(7), 4, 9, 64, EXACT, None)
    assert groups(order, offsets) == [[1], [2, 3], [0], [4], [6, 5]]


def test_rows_of_the_same_rounded_length_keep_their_shuffled_order():
    lengths = np.array([5, 8, 6, 3])
    order, offsets = windowed_batches(lengths, np.array([2, 3, 0, 1]), 4, 24, 64, divisor_boundaries(8, 4), None)
    assert groups(order, offsets) == [[2, 0, 1], [3]]


def test_rounding_the_rows_loses_no_sample():  # B03
    order, offsets = windowed_batches(np.full(13, 4), np.arange(13), 100, 50, 64, EXACT, None, row_multiple=8)
    assert groups(order, offsets) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]


def test_the_last_micro_batch_may_be_short():  # B05
    order, offsets, buckets = bucketed_batches(
        np.full(249, 3), np.arange(249), np.array([4]), np.array([2]), np.random.default_rng(0)
    )
    assert np.sort(np.diff(offsets)).tolist() == [1] + [2] * 124
    assert (order.size, buckets.size) == (249, 125)


def test_epochs_differ_repeat_and_are_not_sorted():  # B08
    lengths = np.random.default_rng(3).integers(1, 65, 500)

    def epoch(number):
        rng = np.random.default_rng([0, number])
        return windowed_batches(lengths, rng.permutation(500), 100, 128, 64, EXACT, rng)

    (first, offsets), (second, _), (again, _) = epoch(0), epoch(1), epoch(0)
    assert first.tolist() == again.tolist() != second.tolist()
    means = np.add.reduceat(lengths[first], offsets[:-1]) / np.diff(offsets)
    assert set(np.sign(np.diff(means))) >= {-1, 1}


@pytest.mark.parametrize("boundaries", [None, EXACT])
def test_segments_are_capped(boundaries):  # B09
    _, offsets = windowed_batches(np.ones(3000, int), np.arange(3000), 9999, 4096, 1024, boundaries, None)
    assert np.diff(offsets).tolist() == [1024, 1024, 952]


def test_a_length_equal_to_a_boundary_belongs_to_it():
    lengths = np.array([4, 5, 8, 1, 9, 4])
    order, offsets, buckets = bucketed_batches(
        lengths, np.array([5, 4, 3, 2, 1, 0]), np.array([4, 8, 16]), np.array([2, 2, 1]), None
    )
    assert groups(order, offsets) == [[5, 3], [0], [2, 1], [4]]
    assert buckets.tolist() == [0, 0, 1, 2]


def test_rows_of_a_bucket_fill_the_budget_up_to_a_cap():
    assert bucket_rows(np.array([16, 48, 100]), 100, 5).tolist() == [5, 2, 1]


def test_what_no_micro_batch_holds_is_refused_by_name():  # B02
    lengths = np.array([3, 40])
    with pytest.raises(DataError, match=r"sample 1 must fit batch.token_budget \(25\), got 40 tokens"):
        windowed_batches(lengths, np.array([1, 0]), 10, 25, 64, None, None)
    with pytest.raises(DataError, match=r"sample 1 must fit the last row length \(16\), got 40 tokens"):
        bucketed_batches(lengths, np.array([1, 0]), np.array([8, 16]), np.array([2, 1]), None)
    with pytest.raises(DataError, match=r"sample 1 must fit batch.token_budget \(40\), got 40 tokens in a row of 48;"):
        windowed_batches(lengths, np.array([1, 0]), 10, 40, 64, divisor_boundaries(40, 16), None)
    with pytest.raises(DataError, match=r"row length 48 must fit batch.token_budget \(40\), which counts padded rows"):
        bucket_rows(divisor_boundaries(40, 16), 40, 64)


@given(corpora, st.integers(1, 50), st.integers(80, 200), st.integers(1, 9), st.integers(1, 16), st.booleans())
def test_every_window_is_filled_as_by_a_plain_loop(lengths, window, budget, segments, divisor, padded):
    order = np.random.default_rng(1).permutation(lengths.size)
    sizes = -(-lengths // divisor) * divisor if padded else lengths
    boundaries = divisor_boundaries(64, divisor) if padded else None
    found = windowed_batches(lengths, order, window, budget, segments, boundaries, None)
    windows = [order[i : i + window].tolist() for i in range(0, lengths.size, window)]
    assert groups(*found) == [b for ids in windows for b in fill_one_window(ids, sizes, budget, segments, padded)]


@given(corpora, st.integers(1, 50), st.integers(64, 300), st.integers(1, 4), st.integers(0, 9))
def test_shuffled_micro_batches_hold_each_sample_once(lengths, window, budget, row_multiple, seed):
    def plan(rng):
        order = np.random.default_rng(1).permutation(lengths.size)
        return windowed_batches(lengths, order, window, budget, 99, EXACT, rng, row_multiple)

    order, offsets = plan(np.random.default_rng(seed))
    assert sorted(order) == list(range(lengths.size))
    assert sorted(groups(order, offsets)) == sorted(groups(*plan(None)))
    assert [a.tolist() for a in plan(np.random.default_rng(seed))] == [order.tolist(), offsets.tolist()]
    batches = groups(order, offsets)
    assert all(len(batch) * lengths[batch].max() <= budget for batch in batches)
    odd = [batch for batch in batches if len(batch) > row_multiple and len(batch) % row_multiple]
    assert len(odd) <= -(-lengths.size // window)


@given(corpora, st.sets(st.integers(1, 63)), st.integers(64, 300), st.integers(0, 9))
def test_buckets_are_kept_apart_and_lose_nothing(lengths, inner, budget, seed):
    boundaries = np.array([*sorted(inner), 64])
    rows = bucket_rows(boundaries, budget, 128)
    shuffled = np.random.default_rng(1).permutation(lengths.size)
    order, offsets, buckets = bucketed_batches(lengths, shuffled, boundaries, rows, np.random.default_rng(seed))
    assert sorted(order) == list(range(lengths.size))
    assert buckets.size == offsets.size - 1
    counts = np.diff(offsets)
    assert np.searchsorted(boundaries, lengths[order]).tolist() == np.repeat(buckets, counts).tolist()
    assert (counts <= rows[buckets]).all()
    short = buckets[counts < rows[buckets]]
    assert np.unique(short).size == short.size
    assert (counts * boundaries[buckets] <= budget).all()


def test_the_order_of_micro_batches_does_not_depend_on_the_chunk(monkeypatch):
    lengths = np.random.default_rng(3).integers(1, 65, 100)
    whole = windowed_batches(lengths, np.arange(100), 20, 128, 64, EXACT, np.random.default_rng(0))
    monkeypatch.setattr("ms_varlen.planning.batching.CHUNK_BATCHES", 3)
    parts = windowed_batches(lengths, np.arange(100), 20, 128, 64, EXACT, np.random.default_rng(0))
    assert [a.tolist() for a in whole] == [a.tolist() for a in parts]


def test_overhead_counts_rows_padded_to_their_longest():
    overhead = batch_overhead(np.array([3, 5, 8]), np.array([2, 0, 1]), np.array([0, 1, 3]), np.array([4, 6, 8]))
    assert overhead == (8 + 6 + 6) / 16 - 1


def test_mixing_is_nothing_when_sorted_apart_and_one_by_chance():
    lengths = np.array([1, 1, 8, 8])
    assert length_mixing(lengths, np.arange(4), np.array([0, 2, 4])) == 0
    assert length_mixing(lengths, np.array([0, 2, 1, 3]), np.array([0, 2, 4])) == 1.5
    assert length_mixing(np.full(4, 3), np.arange(4), np.array([0, 2, 4])) == 1
    assert length_mixing(lengths, np.arange(4), np.arange(5)) == 1
    many = np.random.default_rng(0).integers(1, 1000, 20_000)
    assert abs(length_mixing(many, np.arange(20_000), np.arange(0, 20_001, 8)) - 1) < 0.02


def test_wider_windows_pad_less_and_mix_less():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(180), 1.0453, 20_000).round(), 1, 4096).astype(int)
    boundaries = divisor_boundaries(4096, 16)
    order = np.random.default_rng(1).permutation(20_000)
    plans = [
        windowed_batches(lengths, order, window, 4096, 256, boundaries, np.random.default_rng(0))
        for window in (100, 1000, 10_000)
    ]
    padding = [batch_overhead(lengths, *plan, boundaries) for plan in plans]
    mixing = [length_mixing(lengths, *plan) for plan in plans]
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
