"""The padded side of an alignment: dense scores, a mask, plain operators. It shares nothing with `varlen_attention`.

It computes S x S scores for every row, pads too: right, slow, and meant to be compared with.
Axis letters: R rows of S tokens, T = R * S, N heads, n KV heads, D head size.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_varlen.errors import LengthsError

# Finite, so that a row with nothing to attend to has finite scores and gradients.
MASKED_SCORE = -1e9


def dense_columns(row_lens, rows: int, row_length: int) -> dict[str, np.ndarray]:
    """The causal + length mask of padded rows.

    Args:
        row_lens: ints (host), real tokens of the first rows, at their left; the rows after them are pads only.
        rows: R.
        row_length: S.
    Returns:
        attend_mask: [R, S, S] bool, True where a query may attend to a key. A pad attends to nothing.
    Raises:
        LengthsError: more lengths than rows, or one outside 0..S.
    """
    lens = np.zeros(rows, np.int64)
    given = np.asarray(row_lens)
    if given.ndim != 1 or given.size > rows:
        raise LengthsError(f"row_lens must be on one axis with at most {rows} entries (rows), got {given.shape}")
    bad = np.flatnonzero((given < 0) | (given > row_length))
    if bad.size:
        i = int(bad[0])
        raise LengthsError(f"row_lens[{i}] must be from 0 to {row_length} (row_length), got {given[i]}")
    lens[: given.size] = given
    position = np.arange(row_length)
    real = position < lens[:, None]
    causal = position <= position[:, None]
    return {"attend_mask": causal & real[:, :, None] & real[:, None, :]}


def declared_dense_columns() -> dict[str, Tensor]:
    """A tensor without data that declares `dense_columns` to `set_inputs`."""
    return {"attend_mask": Tensor(shape=[None, None, None], dtype=ms.bool_)}


def _rows_of_heads(x_TND, rows, row_length, repeats):
    """[T, n, D] -> [R, n*repeats, S, D], each KV head repeated for its query heads."""
    heads, size = x_TND.shape[1:]
    x = x_TND.reshape(rows, row_length, heads, size).transpose(0, 2, 1, 3)
    return ops.repeat_interleave(x, repeats, 1) if repeats > 1 else x


def dense_attention(q_TND, k_TND, v_TND, lengths):
    """Attention over whole rows under a mask; a query with nothing to attend to gets exactly 0.

    Args:
        q_TND: [R*S, N, D]; k_TND and v_TND: [R*S, n, D], n divides N.
        lengths: (attend_mask [R, S, S] bool,).
    Returns:
        [R*S, N, D] in q's dtype, computed in float32.
    """
    attend = lengths[0]
    rows, row_length = attend.shape[:2]
    heads, size = q_TND.shape[1:]
    q = _rows_of_heads(ops.cast(q_TND, ms.float32), rows, row_length, 1)
    k = _rows_of_heads(ops.cast(k_TND, ms.float32), rows, row_length, heads // k_TND.shape[1])
    v = _rows_of_heads(ops.cast(v_TND, ms.float32), rows, row_length, heads // k_TND.shape[1])
    # A masked score is so low that its weight is exactly 0 next to any other. In a row of masked scores alone all
    # weights are equal, so that output is multiplied by 0, and its gradient with it.
    visible = ops.cast(ops.expand_dims(attend, 1), ms.float32)
    scores = ops.matmul(q * size**-0.5, k.transpose(0, 1, 3, 2)) + (visible - 1.0) * -MASKED_SCORE
    sees_any = ops.minimum(visible.sum(-1, keepdims=True), 1.0)
    out = (ops.matmul(ops.softmax(scores, -1), v) * sees_any).transpose(0, 2, 1, 3)
    return ops.cast(out.reshape(-1, heads, size), q_TND.dtype)
