import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen import LengthsError, SeqLens
from ms_varlen import lengths as lengths_module


def test_every_derived_form_of_a_padded_pack():
    lens = SeqLens.packed([3, 2], seq_length=8, tokens=8)
    assert lens.actual_seq_qlen.tolist() == [3, 5, 8]
    assert lens.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert lens.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert lens.segment_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert lens.segment_starts.tolist() == [0, 0, 0, 3, 3, 5, 5, 5]
    assert lens.token_slots.tolist() == [0, 1, 2, 3, 4]
    assert lens.real_mask.tolist() == [True] * 5 + [False] * 3
    assert (lens.segments, lens.tokens, lens.real_tokens, lens.max_seqlen) == (2, 8, 5, 3)
    assert lens.actual_seq_qlen.dtype == lens.position_ids.dtype == lens.seq_lens.dtype == np.int32


def test_rows_with_tails_split_off_and_a_filler_row():
    lens = SeqLens.in_rows([3, 2], seq_length=8, row_length=4, rows=3, split_tails=True)
    assert lens.actual_seq_qlen.tolist() == [3, 4, 6, 8, 12]
    assert lens.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0, 1, 2, 3]
    assert lens.token_slots.tolist() == [0, 1, 2, 4, 5]


def test_whole_rows_are_segments_in_padded_mode():
    lens = SeqLens.in_rows([3, 2], seq_length=8, row_length=4, rows=2, split_tails=False)
    assert lens.actual_seq_qlen.tolist() == [4, 8]
    assert lens.real_mask.tolist() == [True, True, True, False, True, True, False, False]


@pytest.mark.parametrize("case", ["P01", "P02", "P04", "P05", "P08", "K15"])
def test_known_lengths_and_positions(case):
    if case == "P01":
        assert SeqLens.from_position_ids([0, 1, 2, 0, 0, 1], 8).cu_seqlens.tolist() == [0, 3, 4, 6]
    if case == "P02":  # the padded tail is one segment, never one per pad
        assert SeqLens.packed([3], 8, tokens=8).actual_seq_qlen.tolist() == [3, 8]
    if case == "P04":
        assert SeqLens.packed([2, 3], 8).position_ids.tolist() == [0, 1, 0, 1, 2]
    if case == "P05":
        assert SeqLens.packed([2, 2, 2, 2], 8).actual_seq_qlen.tolist() == [2, 4, 6, 8]
    if case == "P08":
        assert SeqLens.in_rows([3], 8, 5, 1, split_tails=False).real_mask.tolist() == [True] * 3 + [False] * 2
    if case == "K15":
        lens = SeqLens.packed([5, 3], 8)
        assert lens.actual_seq_qlen.tolist() == [5, 8]
        assert lens.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        ([2, 0, 3], r"seq_lens\[1\] must be >= 1, got 0"),
        ([2, 3, -1], r"seq_lens\[2\] must be >= 1, got -1"),
        (np.array([2.0, 3.0], np.float32), "must be integers .int32., got float32"),
        ([2, 9], r"seq_lens\[1\] must be <= 8 .seq_length., got 9"),
        ([], "at least one entry"),
        ([[1, 2]], "must have one axis"),
    ],
)
def test_bad_lengths_are_refused_by_index(seq_lens, message):
    with pytest.raises(LengthsError, match=message):
        SeqLens.packed(seq_lens, seq_length=8)


def test_int64_is_converted_and_logged_once(caplog):
    lengths_module._say_converted.cache_clear()
    with caplog.at_level(logging.WARNING, "ms_varlen"):
        for _ in range(2):
            assert SeqLens.packed(np.array([2, 3], np.int64), 8).seq_lens.dtype == np.int32
    assert [r.message for r in caplog.records] == ["seq_lens came as int64 and is converted to int32 (said once)"]


def test_fewer_tokens_than_the_lengths_need_are_refused():
    with pytest.raises(LengthsError, match=r"tokens must be >= the sum of seq_lens \(5\), got 4"):
        SeqLens.packed([3, 2], 8, tokens=4)


def test_positions_that_skip_are_refused():
    with pytest.raises(LengthsError, match=r"position_ids\[2\] must go on"):
        SeqLens.from_position_ids([0, 1, 3], 8)


def test_lengths_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        SeqLens.packed([3, 2], 8).seq_lens[0] = 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 40))
def test_segments_cover_the_axis_and_none_exceeds_the_limit(seq_lens, tail):
    lens = SeqLens.packed(seq_lens, seq_length=9, tokens=sum(seq_lens) + tail)
    assert lens.actual_seq_qlen[-1] == lens.tokens == sum(seq_lens) + tail
    assert (np.diff(lens.cu_seqlens) >= 1).all()
    assert lens.max_seqlen <= 9
    assert lens.position_ids.max() < 9
    assert lens.segments == len(seq_lens)
    assert lens.segment_lens.size == len(seq_lens) + -(-tail // 9)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(6, 9), st.integers(0, 3), st.booleans())
def test_rows_keep_each_sequence_at_its_row_start(seq_lens, width, extra, split):
    rows = len(seq_lens) + extra
    lens = SeqLens.in_rows(seq_lens, 9, width, rows, split)
    assert lens.tokens == rows * width
    assert lens.real_mask.reshape(rows, width).sum(1).tolist() == seq_lens + [0] * extra
    assert (lens.position_ids[lens.token_slots] == np.concatenate([np.arange(n) for n in seq_lens])).all()
