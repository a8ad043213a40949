import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.planning.statistics import MAX_BINS, length_histogram, length_statistics

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
