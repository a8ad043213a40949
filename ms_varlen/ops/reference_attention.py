"""The plain body of `varlen_attention`: MindSpore operators only, any device, any head size, fp32 inside.

The token axis is cut into blocks of 64. A pair is a block of queries and a block of keys that it may look at; only
pairs that hold an allowed score exist, so the work follows the segments and not T x T::

    segments 5 3, blocks of 2     keys 0 1 2 3      pairs (query block, key block)
    a a|a a|a b|b b          q 0       x
                             q 1       x x          (0,0) (1,0) (1,1) (2,0) (2,1) (2,2) (3,2) (3,3)
                             q 2       x x x
                             q 3           x x

The scores of all pairs hold at most T x (longest + 64) numbers per head and live only inside one call: the gradient is
written out and computes them again from the logarithm of the softmax denominator, as flash attention does.
A row of scores with nothing allowed (the fill of the last block) gives output 0 and gradient 0.

Axis letters: T tokens, N heads, n KV heads, r = N // n query heads a KV head, D head size, C blocks of Q tokens,
P pairs.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_varlen.lengths import SeqLens

BLOCK = 64
# Stands for "no score yet": finite, so that a row with nothing allowed stays finite, and below any real score.
NO_SCORE = -1e30

_matmul = ops.BatchMatMul()
_matmul_transpose_first = ops.BatchMatMul(transpose_a=True)
_matmul_transpose_second = ops.BatchMatMul(transpose_b=True)
_row_max = ops.ReduceMax(keep_dims=True)
_row_sum = ops.ReduceSum(keep_dims=True)
_scatter_add = ops.TensorScatterAdd()
_scatter_max = ops.TensorScatterMax()
# The primitive, not the function `ops.zeros_like`: MindSpore 2.9 uses that one inside its own tuple gradient and fails
# to compile when the graph of a bprop holds it too ("The func graph is empty").
_zeros_like = ops.ZerosLike()


def pair_columns(lens: SeqLens) -> dict[str, np.ndarray]:
    """What the reference body reads besides the ends, all on the host.

    Returns:
        block_tokens: [C*Q] int32, the token in each slot of the blocks; slots past T repeat the last token.
        query_block, key_block: [P] int32, the blocks of each pair, ordered by query block.
        pair_bias: [P, Q, Q] float32, 0 where the query may look at the key and -inf elsewhere.
    """
    tokens = lens.tokens
    num_blocks = -(-tokens // BLOCK)
    slots = np.arange(num_blocks * BLOCK, dtype=np.int32)
    # A slot past T starts beyond every key: it sees nothing, and no query of T sees it.
    starts = np.full(slots.size, slots.size, np.int32)
    starts[:tokens] = lens.segment_starts
    slot_of, start_of = slots.reshape(num_blocks, BLOCK), starts.reshape(num_blocks, BLOCK)
    first_block = start_of[:, 0] // BLOCK
    width = np.arange(num_blocks) - first_block + 1
    query_block = np.repeat(np.arange(num_blocks), width)
    key_block = np.arange(query_block.size) - np.repeat(np.cumsum(width) - width - first_block, width)
    keys, queries = slot_of[key_block][:, None, :], slot_of[query_block][:, :, None]
    allowed = (keys >= start_of[query_block][:, :, None]) & (keys <= queries)
    return {
        "block_tokens": np.minimum(slots, tokens - 1).astype(np.int32),
        "query_block": query_block.astype(np.int32),
        "key_block": key_block.astype(np.int32),
        "pair_bias": np.where(allowed, np.float32(0), np.float32(-np.inf)),
    }


def declared_pair_columns(tokens: int | None = None) -> dict[str, Tensor]:
    """Tensors without data for `set_inputs`, in the order of `pair_columns`; `tokens` fixes T when it never changes."""
    slots = None if tokens is None else -(-tokens // BLOCK) * BLOCK
    return {
        "block_tokens": Tensor(shape=[slots], dtype=ms.int32),
        "query_block": Tensor(shape=[None], dtype=ms.int32),
        "key_block": Tensor(shape=[None], dtype=ms.int32),
        "pair_bias": Tensor(shape=[None, BLOCK, BLOCK], dtype=ms.float32),
    }


def _to_blocks(x_TND, block_tokens, num_kv_heads):
    """[T, N, D] -> [C, n, r*Q, D]: the query heads of a KV head side by side, so that K and V are never repeated."""
    heads, size = x_TND.shape[1:]
    blocks = ops.gather(x_TND, block_tokens, 0).reshape(-1, BLOCK, num_kv_heads, heads // num_kv_heads, size)
    return blocks.transpose(0, 2, 3, 1, 4).reshape(-1, num_kv_heads, heads // num_kv_heads * BLOCK, size)


def _from_blocks(x, like_TND):
    """[C, n, r*Q, D] -> [T, N, D], the fill of the last block cut off."""
    tokens, heads, size = like_TND.shape
    kv_heads = x.shape[1]
    rows = x.reshape(-1, kv_heads, heads // kv_heads, BLOCK, size).transpose(0, 3, 1, 2, 4)
    return rows.reshape(-1, heads, size)[:tokens]


def _scores(q_pairs, k_pairs, pair_bias):
    """[P, n, r*Q, Q] scaled scores (the scale is in q), -inf where the query may not look at the key."""
    kv_heads, rows = q_pairs.shape[1:3]
    scores = _matmul_transpose_second(q_pairs, k_pairs).reshape(-1, kv_heads, rows // BLOCK, BLOCK, BLOCK)
    return (scores + pair_bias.reshape(-1, 1, 1, BLOCK, BLOCK)).reshape(-1, kv_heads, rows, BLOCK)


class PairAttention(nn.Cell):
    """Attention over pairs of blocks with its gradient written out; no Parameters, no state."""

    def construct(self, q_TND, k_TND, v_TND, block_tokens, query_block, key_block, pair_bias):
        """The output [T, N, D] and log of each row's softmax denominator [C, n, r*Q, 1], all float32."""
        kv_heads = k_TND.shape[1]
        rows = ops.expand_dims(query_block, 1)
        q = _to_blocks(q_TND * q_TND.shape[2] ** -0.5, block_tokens, kv_heads)
        k, v = _to_blocks(k_TND, block_tokens, kv_heads), _to_blocks(v_TND, block_tokens, kv_heads)
        nothing = _zeros_like(q)
        one_a_row = nothing[..., :1]
        scores = _scores(ops.gather(q, query_block, 0), ops.gather(k, key_block, 0), pair_bias)
        largest = _scatter_max(one_a_row + NO_SCORE, rows, _row_max(scores, -1))
        weights = ops.exp(scores - ops.gather(largest, query_block, 0))
        # At least 1 where anything is allowed (the largest score itself), 0 elsewhere.
        denominator = ops.maximum(_scatter_add(one_a_row, rows, _row_sum(weights, -1)), 1e-30)
        out = _scatter_add(nothing, rows, _matmul(weights, ops.gather(v, key_block, 0))) / denominator
        return _from_blocks(out, q_TND), largest + ops.log(denominator)

    def bprop(self, q_TND, k_TND, v_TND, block_tokens, query_block, key_block, pair_bias, out, dout):
        """Source: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 4."""
        kv_heads, scale = k_TND.shape[1], q_TND.shape[2] ** -0.5
        q = _to_blocks(q_TND * scale, block_tokens, kv_heads)
        k, v = _to_blocks(k_TND, block_tokens, kv_heads), _to_blocks(v_TND, block_tokens, kv_heads)
        dout_blocks = _to_blocks(dout[0], block_tokens, kv_heads)
        delta = _row_sum(dout_blocks * _to_blocks(out[0], block_tokens, kv_heads), -1)
        q_pairs, k_pairs = ops.gather(q, query_block, 0), ops.gather(k, key_block, 0)
        dout_pairs = ops.gather(dout_blocks, query_block, 0)
        weights = ops.exp(_scores(q_pairs, k_pairs, pair_bias) - ops.gather(out[1], query_block, 0))
        dweights = _matmul_transpose_second(dout_pairs, ops.gather(v, key_block, 0))
        dscores = weights * (dweights - ops.gather(delta, query_block, 0))
        rows, columns, no_k = ops.expand_dims(query_block, 1), ops.expand_dims(key_block, 1), _zeros_like(k)
        dq = _scatter_add(_zeros_like(q), rows, _matmul(dscores, k_pairs)) * scale
        dk = _scatter_add(no_k, columns, _matmul_transpose_first(dscores, q_pairs))
        dv = _scatter_add(no_k, columns, _matmul_transpose_first(weights, dout_pairs))
        return (
            _from_blocks(dq, q_TND),
            _from_blocks(dk, k_TND),
            _from_blocks(dv, v_TND),
            _zeros_like(block_tokens),
            _zeros_like(query_block),
            _zeros_like(key_block),
            _zeros_like(pair_bias),
        )


_pair_attention = PairAttention()


def reference_attention(q_TND, k_TND, v_TND, lengths):
    """Attention causal inside each segment, computed in float32, returned in q's dtype.

    Args:
        q_TND: [T, N, D]; k_TND and v_TND: [T, n, D], n divides N; any float dtype the device can cast.
        lengths: the ends, then the four of `pair_columns`.
    """
    q, k, v = (ops.cast(q_TND, ms.float32), ops.cast(k_TND, ms.float32), ops.cast(v_TND, ms.float32))
    out = _pair_attention(q, k, v, lengths[1], lengths[2], lengths[3], lengths[4])[0]
    return ops.cast(out, q_TND.dtype)
