"""Axis letters: T tokens, N heads, n KV heads, D head size."""

import functools
import logging

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn

from ms_varlen.errors import LengthsError, VarlenError
from ms_varlen.lengths import SeqLens
from ms_varlen.ops import body as bodies
from ms_varlen.ops.attention import (
    attention_columns,
    attention_inputs,
    check_segments,
    declared_columns,
    varlen_attention,
)
from tests.support.naive_attention import HALF, KV, OutputAndGradients, assert_close, declared, mode, naive, qkvw

# T below, at and above a multiple of the block of 64; segments of one token; one segment over several blocks.
CASES = [[1], [5, 9, 33], [64], [64, 64], [63, 1, 1, 65], [1, 1, 1], [150], [30, 100, 7, 60]]


pytestmark = pytest.mark.usefixtures("body")


def cell(name):
    return cell_of(name, bodies.body_in_use())


@functools.cache
def cell_of(name, body_name):
    """One compiled graph per kind for the whole module; "pynative" is the same Cell without a graph."""
    net = OutputAndGradients(varlen_attention)
    if name == "dynamic":
        net.set_inputs(*declared(), *declared_columns("reference").values())
    if name == "static":
        net.set_inputs(*declared(100), *declared_columns("reference", 100).values())
    if name == "half":
        net.set_inputs(*declared(dtype=ms.float16), *declared_columns("reference").values())
    return net


def run(name, arrays, columns, dtype=ms.float32):
    lengths = tuple(Tensor(x) for x in columns.values())
    q, k, v = (Tensor(x).astype(dtype) for x in arrays[:3])
    with mode(ms.PYNATIVE_MODE if name == "pynative" else ms.GRAPH_MODE):
        return [x.astype(ms.float32).asnumpy() for x in cell(name)(q, k, v, Tensor(arrays[3]), *lengths)]


def run_varlen(name, arrays, lens, dtype=ms.float32):
    # The kernel reads the ends alone and lets the reference's columns pass by.
    return run(name, arrays, attention_columns(lens, "reference"), dtype)


# --- the columns -----------------------------------------------------------------------------------------------------


def test_ends_alone_for_ascend_and_pairs_of_blocks_next_to_them_for_the_reference():
    lens = SeqLens.packed([70, 60], seq_length=128)
    assert list(attention_columns(lens, "ascend")) == ["actual_seq_qlen"]
    columns = attention_columns(lens, "reference")
    assert columns["actual_seq_qlen"].tolist() == [70, 130]
    assert columns["block_tokens"].tolist() == [*range(130), *[129] * 62]
    # Tokens 64 to 69 look back to block 0, tokens 70 on to block 1 only.
    assert columns["query_block"].tolist() == [0, 1, 1, 2, 2]
    assert columns["key_block"].tolist() == [0, 0, 1, 1, 2]
    assert all(columns[name].dtype == np.int32 for name in list(columns)[:-1])
    assert columns["pair_bias"].dtype == np.float32


@given(st.lists(st.integers(1, 150), min_size=1, max_size=8))
def test_pairs_allow_each_query_its_own_segment_up_to_itself(seq_lens):
    lens = SeqLens.packed(seq_lens, seq_length=150)
    columns = attention_columns(lens, "reference")
    blocks = columns["block_tokens"].size // 64
    seen = np.zeros((blocks, blocks, 64, 64), bool)
    seen[columns["query_block"], columns["key_block"]] = columns["pair_bias"] == 0
    seen = seen.transpose(0, 2, 1, 3).reshape(blocks * 64, blocks * 64)
    ids = np.full(blocks * 64, -1)
    ids[: lens.tokens] = lens.segment_ids
    want = (ids[:, None] == ids) & np.tri(ids.size, dtype=bool) & (ids >= 0)
    assert np.array_equal(seen, want)
    assert columns["pair_bias"].size <= blocks * 64 * (max(seq_lens) + 2 * 64)


@pytest.mark.parametrize("name", ["ascend", "reference"])
def test_declaration_has_the_names_order_and_types_of_the_columns(name):
    columns = attention_columns(SeqLens.packed([70, 60], seq_length=128), name)
    for tokens in (None, 130):
        expected = declared_columns(name, tokens)
        assert list(expected) == list(columns)
        for declaration, tensor in zip(expected.values(), attention_inputs(columns, name), strict=True):
            assert declaration.dtype == tensor.dtype
            assert all(a in (-1, b) for a, b in zip(declaration.shape, tensor.shape, strict=True))


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_lens", CASES, ids=str)
@pytest.mark.parametrize("name", ["pynative", pytest.param("dynamic", marks=pytest.mark.graph)])
def test_reference_equals_naive_attention_forward_and_backward(name, seq_lens):
    lens = SeqLens.packed(seq_lens, seq_length=150)
    arrays = qkvw(lens.tokens)
    assert_close(run_varlen(name, arrays, lens), naive(*arrays, seq_lens))


@pytest.mark.graph
def test_one_graph_serves_every_length():
    test_reference_equals_naive_attention_forward_and_backward("dynamic", [3, 2])
    test_reference_equals_naive_attention_forward_and_backward("dynamic", [90, 40])
    assert len(cell("dynamic").compile_cache) == 1


@pytest.mark.graph
def test_a_fixed_T_still_takes_any_number_of_segments():
    arrays = qkvw(100)
    for seq_lens in ([100], [1, 98, 1]):
        lens = SeqLens.packed(seq_lens, seq_length=100)
        assert_close(run_varlen("static", arrays, lens), naive(*arrays, seq_lens))
    assert len(cell("static").compile_cache) == 1


@pytest.mark.graph
def test_float16_in_float16_out():
    lens = SeqLens.packed([70, 5], seq_length=100)
    arrays = [x.astype(np.float16).astype(np.float32) for x in qkvw(75)]
    got = run_varlen("half", arrays, lens, ms.float16)
    for a, b in zip(got, naive(*arrays, [70, 5]), strict=True):
        np.testing.assert_allclose(a, b, **HALF)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 1), (3, 3, 64), (6, 1, 7)])
def test_any_number_of_heads_and_any_head_size(heads, kv_heads, size):
    lens = SeqLens.packed([66, 3], seq_length=100)
    arrays = qkvw(69, heads=heads, kv_heads=kv_heads, size=size)
    assert_close(run_varlen("pynative", arrays, lens), naive(*arrays, [66, 3]))


def test_naive_gradients_match_finite_differences():
    arrays = [x.astype(np.float64) for x in qkvw(7)]
    gradients, segments, step = naive(*arrays, [4, 3])[1:], [4, 3], 1e-6
    for i, at in [(0, (2, 1, 5)), (1, (1, 0, 3)), (2, (5, 1, 9))]:
        sums = []
        for sign in (1, -1):
            moved = [x.copy() for x in arrays]
            moved[i][at] += sign * step
            sums.append((naive(*moved, segments)[0] * moved[3]).sum())
        assert gradients[i][at] == pytest.approx((sums[0] - sums[1]) / (2 * step), abs=1e-7)


def test_scores_far_apart_neither_overflow_nor_vanish():
    lens = SeqLens.packed([100], seq_length=100)
    arrays = qkvw(100)
    arrays[0] *= 100
    got = run_varlen("pynative", arrays, lens)
    # Scores of several hundred carry an absolute error of 1e-5 each into the exponent.
    assert_close(got, naive(*arrays, [100]), bound=1e-3)


def test_two_runs_are_bit_equal():
    lens = SeqLens.packed([90, 40], seq_length=100)
    arrays = qkvw(130)
    first = run_varlen("pynative", arrays, lens)
    for _ in range(2):
        assert all(np.array_equal(a, b) for a, b in zip(first, run_varlen("pynative", arrays, lens), strict=True))


@pytest.mark.graph
def test_a_recomputed_layer_has_the_same_gradients():
    class Layer(nn.Cell):
        def construct(self, q, k, v, lengths):
            return varlen_attention(q, k, v, lengths)

    layer = Layer()
    layer.recompute()
    net = OutputAndGradients(layer)
    lens = SeqLens.packed([70, 5], seq_length=100)
    arrays = qkvw(75)
    with mode(ms.GRAPH_MODE):
        got = net(*(Tensor(x) for x in arrays), *attention_inputs(attention_columns(lens, "reference"), "reference"))
    assert_close([x.asnumpy() for x in got], naive(*arrays, [70, 5]))


# --- the three effects of real lengths -------------------------------------------------------------------------------


def test_no_score_beyond_a_sequences_end():
    lens = SeqLens.packed([5, 9], seq_length=64, tokens=64)
    arrays = qkvw(64)
    before = run_varlen("pynative", arrays, lens)[0]
    for x in arrays[:3]:
        x[5:] = 1e4
    after = run_varlen("pynative", arrays, lens)[0]
    assert np.array_equal(before[:5], after[:5])
    assert not np.array_equal(before[5:], after[5:])


def test_softmax_denominator_counts_real_tokens_only():
    # Equal scores: each output is the mean of the values seen so far, and pads would pull it down.
    lens = SeqLens.packed([3, 2], seq_length=8, tokens=8)
    q, k, v, w = qkvw(8)
    q[:], v[:] = 0, 0
    v[:5] = np.array([6, 0, 3, 4, 8], np.float32)[:, None, None]
    out = run_varlen("pynative", [q, k, v, w], lens)[0]
    np.testing.assert_allclose(out[:5, 0, 0], [6, 3, 3, 4, 6], rtol=1e-6)
    np.testing.assert_allclose(out[:5], naive(q, k, v, w, [3, 2, 3])[0][:5], rtol=1e-6)


@pytest.mark.parametrize("split_tails", [True, False], ids=["tails_split_off", "whole_rows"])
def test_padding_gets_exactly_zero_gradient(split_tails):
    lens = SeqLens.in_rows([30, 50, 1], seq_length=64, row_length=50, rows=4, split_tails=split_tails)
    arrays = qkvw(200)
    arrays[3][~lens.real_mask] = 0  # nothing reads a pad's output
    for gradient in run_varlen("pynative", arrays, lens)[1:]:
        assert not gradient[~lens.real_mask].any()
        assert gradient[lens.real_mask].any()


# --- known cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pynative", pytest.param("dynamic", marks=pytest.mark.graph)])
def test_editing_one_sample_leaves_the_others_bit_equal(name):
    lens = SeqLens.packed([2, 2, 2, 2], seq_length=4)
    assert lens.actual_seq_qlen.tolist() == [2, 4, 6, 8]
    arrays = qkvw(8)
    before = run_varlen(name, arrays, lens)
    for x in arrays:
        x[2:4] += 1
    after = run_varlen(name, arrays, lens)
    others = np.r_[0:2, 4:8]
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a[others], b[others])
        assert not np.array_equal(a[2:4], b[2:4])


def test_two_documents_are_block_diagonal():
    # Orthogonal values show each query's weights: token t's value is the t-th unit vector.
    lens = SeqLens.packed([3, 2], seq_length=8)
    q, k, _, w = qkvw(5, size=5)
    v = np.repeat(np.eye(5, dtype=np.float32)[:, None], KV, 1)
    out = run_varlen("pynative", [q, k, v, w], lens)[0]
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert ((out > 0).all(1) == np.array(seen, bool)).all()
    np.testing.assert_allclose(out.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("ends", "tokens", "message"),
    [
        ([900, 944], 946, r"actual_seq_qlen\[-1\] must equal the number of tokens \(946\), got 944"),
        ([3, 3, 8], 8, r"actual_seq_qlen\[1\] must be above the end before it \(3\), got 3"),
        ([3, 2, 3], 8, r"actual_seq_qlen\[1\] must be above .* not plain lengths"),
        ([0, 3, 8], 8, r"actual_seq_qlen\[0\] must be above the end before it \(0\), got 0"),
        ([3.0, 8.0], 8, "must be integers on one axis, got float64"),
        ([[3, 8]], 8, r"on one axis, got int64 of shape \(1, 2\)"),
        (range(1, 1026), 1025, "at most 1024 segments .* got 1025; lower batch.max_segments"),
    ],
)
def test_wrong_ends_are_refused_on_the_host(ends, tokens, message):
    with pytest.raises(LengthsError, match=message):
        check_segments(np.array(ends), tokens)


def test_right_ends_pass_up_to_1024_segments():
    check_segments(np.arange(1, 1025, dtype=np.int32), 1024)
    with pytest.raises(LengthsError, match="at most 1024 segments"):
        attention_columns(SeqLens.packed([1] * 1025, seq_length=8), "ascend")


# --- which body ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ascend_body(body):
    bodies.use_body("ascend")
    yield
    bodies.use_body(body)


def test_the_device_decides_once_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(bodies, "_asked_for", None)
    assert bodies.load_kernels()  # so that no line about compiling them comes between
    with caplog.at_level(logging.INFO, "ms_varlen"):
        for target, expected in (("CPU", "kernel"), ("Ascend", "ascend")):
            monkeypatch.setattr(bodies.ms, "get_context", lambda name, target=target: target)
            bodies._pick.cache_clear()
            assert [bodies.body_in_use(), bodies.body_in_use()] == [expected] * 2
    bodies._pick.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "operators use the kernel body (C++ kernels) on CPU",
        "operators use the ascend body (fused operators) on Ascend",
    ]


def test_a_body_can_be_asked_for(ascend_body):
    assert bodies.body_in_use() == "ascend"
    with pytest.raises(VarlenError, match="body must be one of ascend, kernel, reference, got 'cuda'"):
        bodies.use_body("cuda")
