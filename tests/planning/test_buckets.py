import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.errors import LengthsError, ShapesError
from ms_varlen.planning.buckets import (
    WORTH_A_BUCKET,
    auto_boundaries,
    batch_maximum_counts,
    bucket_of,
    length_counts,
    optimal_boundaries,
)
from ms_varlen.planning.cost import TOKENS, CostModel

small_corpora = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(lambda values: np.array(values, np.int32))


@pytest.fixture(scope="module")
def lognormal():
    lengths = np.random.default_rng(0).lognormal(np.log(180), 1.0453, 1_000_000)
    return np.clip(np.round(lengths), 1, 4096).astype(np.int32)


def cost_of(lengths, boundaries, model):
    return model.cost(boundaries[bucket_of(lengths, boundaries)]).sum()


def padding_overhead(lengths, boundaries):
    """computed / real - 1 when each length is rounded up to its bucket."""
    return boundaries[bucket_of(lengths, boundaries)].sum() / lengths.sum(dtype=np.int64) - 1


def least_cost(lengths, num_buckets, divisor, model):
    """By trying every list."""
    last = -(-int(lengths.max()) // divisor)
    lists = (
        np.array([*inner, last]) * divisor
        for k in range(min(num_buckets, last))
        for inner in itertools.combinations(range(1, last), k)
    )
    return min(cost_of(lengths, boundaries, model) for boundaries in lists)


def test_equal_length_belongs_to_its_boundary():
    boundaries = np.array([64, 128, 256])
    assert bucket_of(np.array([1, 64, 65, 128, 129, 256]), boundaries).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_length_above_the_last_bucket_is_refused_by_place():
    with pytest.raises(LengthsError, match=r"lengths\[1\] must be <= 128, the last bucket, got 129"):
        bucket_of(np.array([5, 129]), np.array([64, 128]))


def test_sizes_are_rounded_up_to_the_divisor():
    assert optimal_boundaries(length_counts(np.array([13])), TOKENS.cost, 4, 16).tolist() == [16]


def test_two_buckets_split_where_least_is_padded():
    lengths = np.array([1, 1, 1, 2, 9, 10])
    assert optimal_boundaries(length_counts(lengths), TOKENS.cost, 2, 1).tolist() == [2, 10]
    assert padding_overhead(lengths, np.array([2, 10])) == pytest.approx((4 * 2 + 2 * 10) / 24 - 1)


@settings(max_examples=60, deadline=None)
@given(small_corpora, st.integers(1, 4), st.sampled_from([3, 8]), st.sampled_from([TOKENS, CostModel(1.0, 0.2)]))
def test_no_list_costs_less(lengths, num_buckets, divisor, model):
    boundaries = optimal_boundaries(length_counts(lengths), model.cost, num_buckets, divisor)
    assert len(boundaries) <= num_buckets
    assert (np.diff(boundaries, prepend=0) > 0).all()
    assert not (boundaries % divisor).any()
    assert boundaries[-1] >= lengths.max()
    assert cost_of(lengths, boundaries, model) == pytest.approx(least_cost(lengths, num_buckets, divisor, model))


@settings(max_examples=60, deadline=None)
@given(small_corpora, st.floats(0.5, 50.0))
def test_a_cost_per_bucket_chooses_the_number_that_pays(lengths, cost_per_bucket):
    counts = length_counts(lengths)
    chosen = optimal_boundaries(counts, TOKENS.cost, None, 4, cost_per_bucket)
    totals = [
        cost_of(lengths, boundaries, TOKENS) + cost_per_bucket * len(boundaries)
        for boundaries in (optimal_boundaries(counts, TOKENS.cost, k, 4) for k in range(1, 11))
    ]
    assert cost_of(lengths, chosen, TOKENS) + cost_per_bucket * len(chosen) == pytest.approx(min(totals))


def test_auto_picks_as_many_as_pay_within_what_is_allowed(lognormal):
    counts = length_counts(lognormal)
    work = float(counts @ np.arange(counts.size))
    chosen = auto_boundaries(counts, TOKENS.cost, None, 100, 16)
    costs = [cost_of(lognormal, optimal_boundaries(counts, TOKENS.cost, k, 16), TOKENS) for k in range(1, 20)]
    gains = -np.diff(costs) / work
    assert (gains[: chosen.size - 1] > WORTH_A_BUCKET).all()
    assert gains[chosen.size - 1] <= WORTH_A_BUCKET
    assert auto_boundaries(counts, TOKENS.cost, None, 4, 16).size == 4
    assert auto_boundaries(counts, TOKENS.cost, 12, 4, 16).size == 12  # a number that is given is kept


def test_rows_are_padded_to_the_longest_of_their_batch(lognormal):
    expected = batch_maximum_counts(length_counts(lognormal), 16)
    found = length_counts(np.random.default_rng(1).permutation(lognormal).reshape(-1, 16).max(axis=1))
    lengths = np.arange(expected.size)
    assert expected.size == found.size
    assert expected.sum() == pytest.approx(1_000_000, rel=1e-3)
    assert expected @ lengths / expected.sum() == pytest.approx(found @ lengths / found.sum(), rel=0.01)
    assert batch_maximum_counts(np.array([0, 1_000_000, 0, 1]), 1).tolist() == [0, 1_000_000, 0, 1]
    assert batch_maximum_counts(np.array([0, 9, 0, 1]), 100)[-1] == 10


def test_more_buckets_than_lengths_waste_nothing():
    lengths = np.array([3, 7, 7, 20])
    boundaries = optimal_boundaries(length_counts(lengths), TOKENS.cost, 10, 1)
    assert (boundaries.tolist(), padding_overhead(lengths, boundaries)) == ([3, 7, 20], 0.0)


def test_attention_makes_long_buckets_finer():
    counts = length_counts(np.arange(1, 4097))
    by_tokens, by_square = (optimal_boundaries(counts, m.cost, 4, 16) for m in (TOKENS, CostModel(0.0, 1.0)))
    assert by_tokens.tolist() == [1024, 2048, 3072, 4096]
    assert (by_square[:3] > by_tokens[:3]).all()


def test_sizes_of_T_come_from_the_tokens_of_micro_batches():
    needed = np.array([4090, 4096, 4033, 3970, 512])  # the last micro-batch of an epoch is small
    assert optimal_boundaries(length_counts(needed), TOKENS.cost, 3, 64).tolist() == [512, 4032, 4096]


@pytest.mark.parametrize(("num_buckets", "most"), [(12, 0.203), (6, 0.458)])
def test_optimal_boundaries_reach_the_optimum_of_the_known_spread(lognormal, num_buckets, most):
    boundaries = optimal_boundaries(length_counts(lognormal), TOKENS.cost, num_buckets, 16)
    assert boundaries.size == num_buckets
    assert padding_overhead(lognormal, boundaries) <= most


def test_counts_are_exact_over_blocks():
    lengths = np.tile(np.array([1, 2, 2, 5], np.int32), 300_000)
    assert length_counts(lengths).tolist() == [0, 300_000, 600_000, 0, 0, 300_000]


def test_bad_input_is_refused_by_name():
    counts = length_counts(np.array([3, 5]))
    with pytest.raises(LengthsError, match=r"lengths\[1\] must be >= 1, got 0"):
        length_counts(np.array([3, 0]))
    with pytest.raises(ShapesError, match="cost_per_bucket must be > 0 when num_buckets is None"):
        optimal_boundaries(counts, TOKENS.cost, None, 16)
    with pytest.raises(ShapesError, match="num_buckets must be >= 1, got 0"):
        optimal_boundaries(counts, TOKENS.cost, 0, 16)
    with pytest.raises(ShapesError, match="cost must increase"):
        optimal_boundaries(counts, lambda lengths: np.ones(lengths.size), 2, 1)
    with pytest.raises(LengthsError, match="counts must hold at least one length"):
        optimal_boundaries(np.zeros(9, np.int64), TOKENS.cost, 2, 16)
