import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen import DataError, LengthsError, SeqLens
from ms_varlen.batches.check import check_micro_batch, require_columns
from ms_varlen.batches.layout import Layout, lay_out


@dataclasses.dataclass(frozen=True)
class Multiples:
    divisor: int

    def size_for(self, tokens):
        return -(-tokens // self.divisor) * self.divisor


def place(samples, layout, pad_id=0, supervised=None):
    tokens = np.concatenate([np.array(s, np.int32) for s in samples])
    lens = layout.place(np.array([len(s) for s in samples], np.int32))
    return lens, lay_out(lens, tokens, pad_id, supervised)


def varlen(divisor=1, seq_length=8):
    return Layout("varlen", Multiples(divisor), seq_length)


def check(samples, lens, columns, seq_length=8, whole_rows=False):
    lengths = np.array([len(s) for s in samples], np.int32)
    edges = np.array([[s[0], s[-1]] for s in samples]).T
    check_micro_batch(columns, lens.starts, lengths, edges, seq_length, whole_rows)


def test_every_column_of_a_varlen_micro_batch():
    samples = [[5, 6, 7], [8, 9]]
    lens, columns = place(samples, varlen(divisor=8))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 0, 0, 0],
        "labels": [6, 7, -100, 9, -100, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
        "seq_lens": [3, 2],
        "actual_seq_qlen": [3, 5, 8],
    }
    check(samples, lens, columns)


def test_every_column_of_padded_rows_with_a_filler_row():
    samples = [[5, 6, 7], [8, 9]]
    lens, columns = place(samples, Layout("padded", Multiples(4), 8, rows=3, row_lengths=(4, 8)))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "input_ids": [5, 6, 7, 0, 8, 9, 0, 0, 0, 0, 0, 0],
        "labels": [6, 7, -100, -100, 9, -100, -100, -100, -100, -100, -100, -100],
        "position_ids": [0, 1, 2, 3] * 3,
        "seq_lens": [3, 2],
        "actual_seq_qlen": [4, 8, 12],
    }
    check(samples, lens, columns, whole_rows=True)


def test_every_column_of_bucketed_rows_with_a_tail():
    samples = [[5, 6, 7], [8, 9]]
    lens, columns = place(samples, Layout("bucketed", Multiples(10), 8, row_lengths=(4, 8)))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "input_ids": [5, 6, 7, 0, 8, 9, 0, 0, 0, 0],
        "labels": [6, 7, -100, -100, 9, -100, -100, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 0, 1, 0, 1, 0, 1],
        "seq_lens": [3, 2],
        "actual_seq_qlen": [3, 4, 6, 8, 10],
    }
    check(samples, lens, columns)


def test_a_length_equal_to_a_bucket_belongs_to_that_bucket():
    layout = Layout("bucketed", Multiples(1), 8, row_lengths=(4, 8))
    assert [layout.place(np.array([n], np.int32)).tokens for n in (4, 5)] == [4, 8]


@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        (varlen(divisor=8), [-100, 7, -100, 9, -100, -100, -100, -100]),
        (Layout("padded", Multiples(8), 8, rows=2, row_lengths=(4, 8)), [-100, 7, -100, -100, 9, -100, -100, -100]),
    ],
)
def test_only_supervised_tokens_are_targets(layout, labels):
    samples, masks = [[5, 6, 7], [8, 9]], [False, False, True, False, True]
    lens, columns = place(samples, layout, supervised=np.array(masks))
    _, all_targets = place(samples, layout)
    assert columns["labels"].tolist() == labels
    assert {name: columns[name].tolist() for name in columns if name != "labels"} == {
        name: all_targets[name].tolist() for name in columns if name != "labels"
    }
    check(samples, lens, columns, whole_rows=layout.mode == "padded")


def test_labels_of_packed_samples_stay_inside_them():
    assert place([[1, 2, 3], [4, 5]], varlen())[1]["labels"].tolist() == [2, 3, -100, 5, -100]


def test_end_of_text_inside_a_sample_is_a_target():
    end = 2
    labels = place([[5, end, 6, 7, end]], varlen())[1]["labels"]
    assert labels.tolist() == [end, 6, 7, end, -100]
    assert (labels != -100).sum() == 4


def test_lengths_are_carried_when_the_pad_id_occurs_in_the_text():
    end = 2
    lens, columns = place([[5, end, 6, end]], Layout("padded", Multiples(1), 8, rows=1, row_lengths=(8,)), pad_id=end)
    assert columns["seq_lens"].tolist() == [4]
    assert columns["labels"].tolist() == [end, 6, end, -100, -100, -100, -100, -100]
    assert lens.real_mask.tolist() == [True] * 4 + [False] * 4


def test_every_token_column_is_rounded_up_together():
    _, columns = place([[1] * 7, [2] * 6], varlen(divisor=16, seq_length=16))
    assert {columns[name].size for name in ("input_ids", "labels", "position_ids")} == {16}
    assert columns["actual_seq_qlen"][-1] == 16


def test_segments_without_an_end_of_text_are_still_apart():
    assert place([[1, 2, 3], [4, 5]], varlen())[0].segment_ids.tolist() == [0, 0, 0, 1, 1]


def test_projected_columns_are_refused_by_name():
    _, columns = place([[1, 2, 3]], varlen())
    with pytest.raises(DataError, match="must carry position_ids, seq_lens, actual_seq_qlen"):
        require_columns({name: columns[name] for name in ("input_ids", "labels")})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "seq_lens",
            [2, 3],
            r"seq_lens\[0\] must be 3 .the sample's length in the store., got 2; 2 of 2 differ",
        ),
        ("seq_lens", [3], r"one entry per sample \(2\)"),
        ("actual_seq_qlen", [3, 5], r"actual_seq_qlen\[-1\] must equal the number of tokens \(8\), got 5"),
        ("actual_seq_qlen", [3, 3, 8], r"actual_seq_qlen\[1\] must be above the end before it \(3\), got 3"),
        ("actual_seq_qlen", [2, 5, 8], r"start of sample\[1\] must be 3 .*got 5"),
        ("input_ids", [8, 9, 5, 6, 7, 0, 0, 0], r"first id of sample\[0\] must be 5 .*got 8; 2 of 2 differ"),
        ("labels", [6, 7, 8, 9, -100, -100, -100, -100], r"last label of sample\[0\] must be -100"),
        ("position_ids", [0, 1, 2, 3, 4, 0, 1, 2], r"last position of sample\[1\] must be 1"),
        ("labels", [6, 7], r"labels must be as long as input_ids \(8\)"),
    ],
)
def test_a_column_that_disagrees_with_the_store_is_refused(column, value, message):
    samples = [[5, 6, 7], [8, 9]]
    lens, columns = place(samples, varlen(divisor=8))
    with pytest.raises(LengthsError, match=message):
        check(samples, lens, {**columns, column: np.array(value, np.int32)})


@pytest.mark.parametrize(
    ("column", "value", "code"),
    [
        ("seq_lens", [2, 3], "LEN-ORDER"),
        ("seq_lens", [3, 1], "LEN-WRONG"),
        ("seq_lens", [5, 0], "LEN-ZERO"),
        ("seq_lens", [6, -1], "LEN-ZERO"),
        ("labels", [6, 7, -100, 9, -100, 0, 0, -100], "LABEL-PAD"),
        ("labels", [6, 7, -100, 9, -100, 4, -100, -100], "LABEL-PAD"),  # not the pad id
        ("labels", [5, 6, 7, 8, 9, 0, 0, 0], "LABEL-SHIFT"),  # not shifted
        ("labels", [7, -100, -100, -100, -100, -100, -100, -100], "LABEL-SHIFT"),  # shifted twice
        ("labels", [6, 5, -100, 9, -100, -100, -100, -100], "LABEL-WRONG"),
        ("labels", [6, 7, 8, 9, -100, -100, -100, -100], "LABEL-BOUNDARY"),
    ],
)
def test_a_column_that_disagrees_with_the_store_is_named_by_its_code(column, value, code):
    samples = [[5, 6, 7], [8, 9]]
    lens, columns = place(samples, varlen(divisor=8))
    with pytest.raises(LengthsError) as refused:
        check(samples, lens, {**columns, column: np.array(value, np.int32)})
    assert refused.value.code == code


def test_a_column_of_another_dtype_is_refused():
    samples = [[5, 6, 7]]
    lens, columns = place(samples, varlen())
    with pytest.raises(LengthsError, match="actual_seq_qlen must be int32, got int64"):
        check(samples, lens, {**columns, "actual_seq_qlen": columns["actual_seq_qlen"].astype(np.int64)})


SAMPLE = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=2, max_size=8)


@given(st.lists(SAMPLE, min_size=1, max_size=6), st.booleans(), st.integers(1, 8))
def test_supervised_targets_match_the_samples_alone(marked, rows, divisor):
    layout = varlen(divisor)
    if rows:
        layout = Layout("padded", Multiples(1), 8, len(marked), tuple(range(1, 9)))
    samples = [[token for token, _ in sample] for sample in marked]
    supervised = np.array([mark for sample in marked for _, mark in sample])
    lens, columns = place(samples, layout, 0, supervised)
    check(samples, lens, columns, whole_rows=rows)
    places = columns["labels"] != -100
    pairs = list(zip(columns["input_ids"][places].tolist(), columns["labels"][places].tolist(), strict=True))
    assert pairs == [(a, b) for sample in marked for (a, _), (b, mark) in itertools.pairwise(sample) if mark]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=8), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 8),
)
def test_targets_match_the_samples_alone(samples, rows, divisor):
    layout = varlen(divisor)
    if rows:
        layout = Layout("padded", Multiples(1), 8, len(samples), tuple(range(1, 9)))
    lens, columns = place(samples, layout)
    check(samples, lens, columns, whole_rows=rows)
    supervised = columns["labels"] != -100
    pairs = list(zip(columns["input_ids"][supervised].tolist(), columns["labels"][supervised].tolist(), strict=True))
    assert pairs == [pair for s in samples for pair in itertools.pairwise(s)]
    assert isinstance(lens, SeqLens)
    assert lens.real_tokens == sum(map(len, samples))


@given(
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=5),
    st.sampled_from(["padded", "bucketed", "packed", "varlen"]),
    st.sampled_from([4, 32]),
)
def test_squared_tokens_are_those_of_the_segments_laid_out(batches, mode, divisor):
    rows = {"padded": 3}.get(mode, 0)
    layout = Layout(mode, Multiples(divisor), 8, rows, (4, 8) if mode in ("padded", "bucketed") else ())
    lengths = np.array([length for batch in batches for length in batch], np.int32)
    offsets = np.cumsum([0, *(len(batch) for batch in batches)])
    laid_out = [layout.place(np.array(batch, np.int32)).segment_lens for batch in batches]
    expected = [int(np.square(segments, dtype=np.int64).sum()) for segments in laid_out]
    assert layout.squared_tokens(lengths, offsets).tolist() == expected
    assert layout.computed_tokens(lengths, offsets).tolist() == [int(segments.sum()) for segments in laid_out]
