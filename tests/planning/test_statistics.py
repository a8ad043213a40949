import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.statistics import MAX_BINS, cut_at, length_cumulative, length_histogram, length_statistics

corpora = st.lists(st.integers(1, 200_000), min_size=1, max_size=50).map(lambda values: np.array(values, np.int32))


def test_statistics_of_a_small_corpus():
    assert length_statistics(np.arange(100, -1, -1, np.int32) + 1) == {
        "samples": 101,
        "p50": 51.0,
        "p90": 91.0,
        "p99": 100.0,
        "max": 101,
        "mean": 51.0,
        "tokens": 5151,
    }


def test_the_sum_of_many_int32_lengths_does_not_overflow():
    assert length_statistics(np.full(3, 2**30, np.int32))["tokens"] == 3 * 2**30


def test_short_lengths_get_a_bin_each():
    assert length_histogram(np.array([1, 1, 3, 5], np.int32)) == {
        "edges": [1, 2, 3, 4, 5, 6],
        "counts": [2, 0, 1, 0, 1],
    }


def test_equal_lengths_are_one_bin():
    assert length_histogram(np.full(7, 2048, np.int32)) == {"edges": [2048, 2049], "counts": [7]}


@given(corpora)
def test_every_sample_is_in_one_bin_and_bins_never_narrow(lengths):
    histogram = length_histogram(lengths)
    widths = np.diff(histogram["edges"])
    assert sum(histogram["counts"]) == lengths.size
    assert len(histogram["counts"]) == widths.size <= MAX_BINS
    assert widths[0] >= 1
    assert (np.diff(widths) >= 0).all()


def test_cutting_at_a_limit_counts_what_it_loses_and_saves():
    cost = CostModel(linear=1.0, quadratic=1.0)
    assert cut_at(np.array([1, 2, 3, 10]), 4, cost) == {
        "limit": 4,
        "documents_cut": 1,
        "documents_cut_share": 0.25,
        "tokens_cut": 6,
        "tokens_cut_share": 1 - 10 / 16,
        "saved_padded": 1 - 4 * 4 * 5 / (4 * 10 * 11),
        "saved_varlen": 1 - (2 + 6 + 12 + 20) / (2 + 6 + 12 + 110),
    }


def test_nothing_is_cut_above_the_longest():
    found = cut_at(np.array([3, 5]), 64, CostModel(1.0, 0.0))
    assert [found[key] for key in ("documents_cut", "tokens_cut", "saved_padded", "saved_varlen")] == [0, 0, 0, 0]


def test_cumulative_shares_by_length():
    assert length_cumulative(np.array([1, 1, 2, 4]), [1, 2, 3, 5]) == {
        "lengths": [1, 2, 4],
        "documents": [0.5, 0.75, 1.0],
        "tokens": [0.25, 0.5, 1.0],
    }
