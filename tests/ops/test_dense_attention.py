import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_varlen.errors import LengthsError
from ms_varlen.lengths import SeqLens
from ms_varlen.ops.dense_attention import declared_dense_columns, dense_attention, dense_columns
from tests.support.naive_attention import OutputAndGradients, assert_close, declared, mode, naive, qkvw


@functools.cache
def cell():
    """One graph for the whole module."""
    net = OutputAndGradients(dense_attention)
    net.set_inputs(*declared(), *declared_dense_columns().values())
    return net


def run_dense(arrays, columns):
    with mode(ms.GRAPH_MODE):
        return [x.asnumpy() for x in cell()(*(Tensor(x) for x in arrays), Tensor(columns["attend_mask"]))]


def test_dense_mask_is_causal_and_hides_pads():
    mask = dense_columns([2, 3], rows=3, row_length=3)["attend_mask"].astype(int)
    assert mask.tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 0]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


@pytest.mark.parametrize(
    ("row_lens", "message"), [([2, 4], r"row_lens\[1\] must be from 0 to 3"), ([1, 1, 1, 1], "at most 3 entries")]
)
def test_dense_mask_refuses_lengths_that_do_not_fit(row_lens, message):
    with pytest.raises(LengthsError, match=message):
        dense_columns(row_lens, rows=3, row_length=3)


@pytest.mark.graph
def test_dense_path_equals_naive_attention_on_real_tokens():
    lens = SeqLens.in_rows([7, 12, 1], seq_length=12, row_length=12, rows=3, split_tails=True)
    arrays = qkvw(36)
    arrays[3][~lens.real_mask] = 0
    dense = run_dense(arrays, dense_columns(lens.seq_lens, 3, 12))
    want = naive(*arrays, lens.segment_lens)
    want[0][~lens.real_mask] = 0
    assert_close(dense, want)


@pytest.mark.graph
def test_a_row_with_nothing_to_attend_to_gives_zero_and_finite_gradients():
    arrays = qkvw(15)
    out, *gradients = run_dense(arrays, dense_columns([4, 0], rows=3, row_length=5))
    assert not out[4:].any()
    assert out[:4].all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert not gradient[4:].any()
