import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from tests.support.flash_attention import flash_attention_score

# float16 keeps 11 bits: outputs of size about 1 are rounded by up to 5e-4.
HALF = {"rtol": 1e-3, "atol": 1e-3}
MASK = Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def arguments(tokens=5, heads=2, kv_heads=1, size=16, **changes):
    query, key, value = (Tensor(numbers(tokens, n, size, seed=i)) for i, n in enumerate([heads, kv_heads, kv_heads]))
    good = {
        "query": query,
        "key": key,
        "value": value,
        "head_num": heads,
        "attn_mask": MASK,
        "actual_seq_qlen": (3, 5),
        "actual_seq_kvlen": (3, 5),
        "scalar_value": 0.25,
        "pre_tokens": 3,
        "next_tokens": 0,
        "input_layout": "TND",
        "sparse_mode": 3,
    }
    return good | changes


def one_by_one(query, key, value, spans, scale):
    """Each query row by itself; `spans[t]` are the keys that token t sees."""
    q, k, v = (x.asnumpy().astype(np.float64) for x in (query, key, value))
    out = np.zeros_like(q)
    for t, span in enumerate(spans):
        for h in range(q.shape[1]):
            keys = slice(*span), h // (q.shape[1] // k.shape[1])
            scores = np.exp(k[keys] @ q[t, h] * scale)
            out[t, h] = scores @ v[keys] / scores.sum()
    return out


def test_signature_is_the_documented_one():
    assert inspect.signature(flash_attention_score) == inspect.signature(ops.flash_attention_score)


@pytest.mark.parametrize("ends", [(3, 5), [3, 5], Tensor([3, 5], ms.int32), Tensor([3, 5], ms.int64)])
def test_each_segment_is_causal_and_apart(ends):
    args = arguments(actual_seq_qlen=ends, actual_seq_kvlen=ends)
    out = flash_attention_score(**args)
    spans = [(0, 1), (0, 2), (0, 3), (3, 4), (3, 5)]
    want = one_by_one(args["query"], args["key"], args["value"], spans, 0.25)
    assert out.dtype == ms.float16
    np.testing.assert_allclose(out.asnumpy(), want, **HALF)


@pytest.mark.parametrize(
    ("sparse_mode", "spans"),
    [(3, [(0, 3), (0, 4), (4, 5)]), (2, [(0, 1), (0, 2), (4, 5)])],
    ids=["right_down", "left_up"],
)
def test_causal_corner_with_more_keys_than_queries(sparse_mode, spans):
    args = arguments(
        query=Tensor(numbers(3, 2, 16)), actual_seq_qlen=(2, 3), actual_seq_kvlen=(4, 5), sparse_mode=sparse_mode
    )
    want = one_by_one(args["query"], args["key"], args["value"], spans, 0.25)
    np.testing.assert_allclose(flash_attention_score(**args).asnumpy(), want, **HALF)


def test_a_query_sequence_may_be_empty():
    args = arguments(query=Tensor(numbers(3, 2, 16)), actual_seq_qlen=(3, 3))
    want = one_by_one(args["query"], args["key"], args["value"], [(0, 1), (0, 2), (0, 3)], 0.25)
    np.testing.assert_allclose(flash_attention_score(**args).asnumpy(), want, **HALF)


def test_bfloat16_in_bfloat16_out():
    args = arguments()
    half = flash_attention_score(**args)
    out = flash_attention_score(**args | {name: args[name].astype(ms.bfloat16) for name in ("query", "key", "value")})
    assert out.dtype == ms.bfloat16
    # bfloat16 keeps 8 bits, of inputs and output.
    np.testing.assert_allclose(out.astype(ms.float32).asnumpy(), half.asnumpy(), rtol=5e-2, atol=5e-2)


FP32 = Tensor(np.ones((5, 1, 16), np.float32))
SQUARE = np.triu(np.ones((2048, 2048), np.uint8), 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": FP32, "key": FP32, "value": FP32, "head_num": 1}, TypeError, "float16 or bfloat16, got Float32"),
        ({"key": FP32, "value": FP32}, TypeError, "must share a dtype"),
        ({"value": Tensor(numbers(4, 1, 16))}, RuntimeError, "key and value must share a shape"),
        ({"query": Tensor(numbers(5, 32))}, RuntimeError, r"must be \(T, N, D\)"),
        ({"query": Tensor(numbers(5, 2, 32))}, RuntimeError, "D of query and key must be the same, got 32 and 16"),
        ({"size": 20}, RuntimeError, "D must be a multiple of 16, at most 512, got 20"),
        ({"size": 528}, RuntimeError, "at most 512, got 528"),
        ({"heads": 257}, RuntimeError, "N1 must be from 1 to 256, got 257"),
        ({"heads": 3, "kv_heads": 2}, RuntimeError, "N2 must be a factor of N1"),
        ({"head_num": 1}, RuntimeError, r"head_num must equal N1 \(2\), got 1"),
        ({"head_num": 2.0}, TypeError, "head_num must be an int"),
        ({"keep_prob": 0.9}, RuntimeError, "drop_mask goes with keep_prob"),
        ({"keep_prob": 1}, TypeError, "keep_prob must be a float"),
        ({"keep_prob": 0.0}, RuntimeError, r"keep_prob must be in \(0, 1\]"),
        ({"drop_mask": Tensor(numbers(1))}, RuntimeError, "drop_mask goes with keep_prob"),
        ({"scalar_value": 1}, TypeError, "scalar_value must be a float"),
        ({"pre_tokens": 2}, RuntimeError, r"pre_tokens must be at least max_seqlen_q \(3\), got 2"),
        ({"next_tokens": 1}, RuntimeError, "next_tokens must be 0 in TND, got 1"),
        ({"inner_precise": 1}, RuntimeError, "inner_precise is reserved"),
        ({"padding_mask": MASK}, RuntimeError, "padding_mask is reserved"),
        ({"prefix": (1, 2)}, RuntimeError, "prefix must be None"),
        ({"sparse_mode": 0}, RuntimeError, "sparse_mode must be 2 or 3 in TND, got 0"),
        ({"attn_mask": None}, TypeError, "attn_mask must be a Tensor"),
        ({"attn_mask": Tensor(SQUARE.astype(np.float16))}, TypeError, "bool or uint8, got Float16"),
        ({"attn_mask": Tensor(SQUARE[:5, :5])}, RuntimeError, r"must be \(2048, 2048\), got \(5, 5\)"),
        ({"attn_mask": Tensor(1 - SQUARE)}, RuntimeError, "exactly what is above the diagonal"),
        ({"actual_seq_qlen": None}, RuntimeError, "actual_seq_qlen must not be None"),
        ({"actual_seq_kvlen": None}, RuntimeError, "actual_seq_kvlen must not be None"),
        ({"actual_seq_qlen": (3.0, 5.0)}, TypeError, "actual_seq_qlen must hold integers"),
        ({"actual_seq_qlen": Tensor([3.0, 5.0])}, TypeError, "actual_seq_qlen must hold integers"),
        ({"actual_seq_qlen": np.array([3, 5])}, TypeError, "must be Tensor, tuple or list, got ndarray"),
        ({"actual_seq_qlen": Tensor([[3, 5]])}, RuntimeError, "actual_seq_qlen must have one axis"),
        ({"actual_seq_qlen": (3, 2, 5)}, RuntimeError, "actual_seq_qlen must be non-decreasing"),
        ({"actual_seq_qlen": (3, 2)}, RuntimeError, "must be non-decreasing"),  # plain lengths
        ({"actual_seq_qlen": (3, 4)}, RuntimeError, r"the last of actual_seq_qlen must equal T \(5\), got 4"),
        ({"actual_seq_qlen": (5,)}, RuntimeError, "equally long, got 1 and 2"),
        ({"actual_seq_qlen": (0, 3, 5), "actual_seq_kvlen": (0, 3, 5)}, RuntimeError, "may have length 0"),
        ({"actual_seq_qlen": (3, 5, 5), "actual_seq_kvlen": (3, 5, 5)}, RuntimeError, "may have length 0"),
        ({"actual_seq_qlen": (4, 5)}, RuntimeError, "pre_tokens must be at least"),
        ({"actual_seq_qlen": (4, 5), "pre_tokens": 9}, RuntimeError, "no query sequence may be longer than its keys"),
        ({"input_layout": "BNSD"}, RuntimeError, "must be None in BNSD"),
        ({"input_layout": "TDN"}, ValueError, "input_layout must be one of"),
        ({"input_layout": 3}, TypeError, "input_layout must be a str"),
    ],
)
def test_refuses_what_the_documentation_forbids(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attention_score(**arguments(**changes))


def test_refuses_more_than_1024_sequences():
    ends = tuple(range(1, 1026))
    with pytest.raises(RuntimeError, match="1 to 1024 ends, got 1025"):
        flash_attention_score(**arguments(1025, actual_seq_qlen=ends, actual_seq_kvlen=ends))


@pytest.mark.parametrize(
    "changes",
    [
        {"keep_prob": 0.9, "drop_mask": Tensor(numbers(1))},
        {"real_shift": Tensor(numbers(1))},
        {"input_layout": "BSH", "actual_seq_qlen": None, "actual_seq_kvlen": None},
    ],
)
def test_says_what_it_does_not_compute(changes):
    with pytest.raises(NotImplementedError, match="emulator"):
        flash_attention_score(**arguments(**changes))
