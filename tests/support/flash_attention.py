"""A strict stand-in for `mindspore.ops.flash_attention_score` in TND layout, on the CPU, in NumPy.

It takes exactly the arguments documented for MindSpore 2.9, refuses whatever the documentation forbids (the operator's
own shape inference lets most of it pass), and computes the output from them: sparse mode 2 or 3, the compressed mask,
the scale, the ends of queries and keys. It has no gradient, runs in PyNative only, and does not compute dropout, a
shift of the scores, or the layouts without lengths (`NotImplementedError`).

Each refusal cites the rule of the documentation; error classes are the documented ones.
Axis letters: T1 query tokens, T2 key tokens, N1 heads, N2 KV heads, D head size, B sequences.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_varlen.errors import LengthsError

INT_MAX = 2147483647
LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")
COMPRESSED = (2048, 2048)
MAX_SEQUENCES = 1024


_moved: dict[int, Tensor] = {}


def move_to_device(tensor: Tensor) -> Tensor:
    """The tensor, remembered as one that lies on the device: there is no device here to move it to."""
    _moved[id(tensor)] = tensor  # kept, so that its id stays its own
    return tensor


def _need(holds: bool, error: type[Exception], rule: str) -> None:
    if not holds:
        raise error(f"flash_attention_score: {rule}")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tensors(query, key, value, head_num) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _need(isinstance(tensor, Tensor), TypeError, f"{name} must be a Tensor, got {type(tensor).__name__}")
        _need(tensor.ndim == 3, RuntimeError, f"{name} must be (T, N, D) in TND, got {tensor.shape}")
    _need(query.dtype in (ms.float16, ms.bfloat16), TypeError, f"query must be float16 or bfloat16, got {query.dtype}")
    same = query.dtype == key.dtype == value.dtype
    _need(same, TypeError, f"query, key and value must share a dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    _need(key.shape == value.shape, RuntimeError, f"key and value must share a shape, got {key.shape}, {value.shape}")
    heads, size = query.shape[1:]
    kv_heads = key.shape[1]
    _need(key.shape[2] == size, RuntimeError, f"D of query and key must be the same, got {size} and {key.shape[2]}")
    _need(size % 16 == 0 and 0 < size <= 512, RuntimeError, f"D must be a multiple of 16, at most 512, got {size}")
    _need(1 <= heads <= 256, RuntimeError, f"N1 must be from 1 to 256, got {heads}")
    _need(kv_heads > 0 and heads % kv_heads == 0, RuntimeError, f"N2 must be a factor of N1, got {kv_heads}, {heads}")
    _need(_is_int(head_num), TypeError, f"head_num must be an int, got {type(head_num).__name__}")
    _need(head_num == heads, RuntimeError, f"head_num must equal N1 ({heads}), got {head_num}")


def _check_mask(attn_mask, sparse_mode) -> None:
    _need(_is_int(sparse_mode), TypeError, f"sparse_mode must be an int, got {type(sparse_mode).__name__}")
    _need(sparse_mode in (2, 3), RuntimeError, f"sparse_mode must be 2 or 3 in TND, got {sparse_mode}")
    _need(isinstance(attn_mask, Tensor), TypeError, "attn_mask must be a Tensor in TND")
    _need(attn_mask.dtype in (ms.bool_, ms.uint8), TypeError, f"attn_mask must be bool or uint8, got {attn_mask.dtype}")
    _need(attn_mask.shape == COMPRESSED, RuntimeError, f"attn_mask must be {COMPRESSED}, got {attn_mask.shape}")
    triangle = np.array_equal(attn_mask.asnumpy(), np.triu(np.ones(COMPRESSED, np.uint8), 1))
    _need(triangle, RuntimeError, "attn_mask must discard (1) exactly what is above the diagonal")


def _check_numbers(keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise) -> None:
    _need(isinstance(keep_prob, float), TypeError, f"keep_prob must be a float, got {type(keep_prob).__name__}")
    _need(0.0 < keep_prob <= 1.0, RuntimeError, f"keep_prob must be in (0, 1], got {keep_prob}")
    _need(
        isinstance(scalar_value, float), TypeError, f"scalar_value must be a float, got {type(scalar_value).__name__}"
    )
    for name, value in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens), ("inner_precise", inner_precise)):
        _need(_is_int(value), TypeError, f"{name} must be an int, got {type(value).__name__}")
    _need(pre_tokens <= INT_MAX, RuntimeError, f"pre_tokens must fit in int32, got {pre_tokens}")
    _need(next_tokens == 0, RuntimeError, f"next_tokens must be 0 in TND, got {next_tokens}")
    _need(inner_precise == 0, RuntimeError, f"inner_precise is reserved, must be 0, got {inner_precise}")


def _check_optional(real_shift, drop_mask, padding_mask, prefix, keep_prob) -> None:
    _need(prefix is None, RuntimeError, "prefix must be None in TND")
    _need(padding_mask is None, RuntimeError, "padding_mask is reserved, must be None")
    _need(
        (keep_prob == 1.0) == (drop_mask is None), RuntimeError, "drop_mask goes with keep_prob below 1.0 and no other"
    )
    if drop_mask is not None or real_shift is not None:
        raise NotImplementedError("flash_attention_score emulator: drop_mask and real_shift are not computed")


def _read_ends(name: str, ends, tokens: int) -> np.ndarray:
    """[B] int64 ends from a Tensor, tuple or list, with the rules that queries and keys share."""
    _need(ends is not None, RuntimeError, f"{name} must not be None in TND")
    if isinstance(ends, Tensor):
        _need(ends.dtype in (ms.int32, ms.int64), TypeError, f"{name} must hold integers, got {ends.dtype}")
        _need(ends.ndim == 1, RuntimeError, f"{name} must have one axis, got shape {ends.shape}")
        if id(ends) in _moved:
            raise LengthsError(f"{name} must stay on the host, got a tensor that was moved to the device", "LEN-DEVICE")
        ends = ends.asnumpy().tolist()
    listed = isinstance(ends, (tuple, list))
    _need(listed, TypeError, f"{name} must be Tensor, tuple or list, got {type(ends).__name__}")
    _need(all(_is_int(end) for end in ends), TypeError, f"{name} must hold integers")
    _need(1 <= len(ends) <= MAX_SEQUENCES, RuntimeError, f"{name} must hold 1 to {MAX_SEQUENCES} ends, got {len(ends)}")
    result = np.array(ends, np.int64)
    _need(bool((np.diff(result, prepend=0) >= 0).all()), RuntimeError, f"{name} must be non-decreasing")
    _need(result[-1] == tokens, RuntimeError, f"the last of {name} must equal T ({tokens}), got {result[-1]}")
    return result


def _check_lengths(q_lens, k_lens, pre_tokens, sparse_mode) -> None:
    same = q_lens.size == k_lens.size
    _need(same, RuntimeError, f"both lists of ends must be equally long, got {q_lens.size} and {k_lens.size}")
    _need(bool((k_lens > 0).all()), RuntimeError, "no key sequence may have length 0 (actual_seq_kvlen repeats an end)")
    longest = int(q_lens.max())
    _need(
        pre_tokens >= longest, RuntimeError, f"pre_tokens must be at least max_seqlen_q ({longest}), got {pre_tokens}"
    )
    fits = sparse_mode != 3 or bool((q_lens <= k_lens).all())
    _need(fits, RuntimeError, "with sparse_mode 3 no query sequence may be longer than its keys")


def _attend(q, k, v, scale, shift):
    """One sequence: q [N1, S1, D], k and v [N1, S2, D]; query i sees keys up to i + shift."""
    scores = q @ k.transpose(0, 2, 1) * scale
    discard = np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None] + shift
    scores[:, discard] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def flash_attention_score(
    query,
    key,
    value,
    head_num,
    real_shift=None,
    drop_mask=None,
    padding_mask=None,
    attn_mask=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    keep_prob=1.0,
    scalar_value=1.0,
    pre_tokens=INT_MAX,
    next_tokens=INT_MAX,
    inner_precise=0,
    input_layout="BSH",
    sparse_mode=0,
):
    """What the operator would return for these arguments, or the documented refusal.

    Args:
        query: (T1, N1, D) float16 or bfloat16; key and value: (T2, N2, D) of the same dtype.
        actual_seq_qlen, actual_seq_kvlen: running ends; Tensor, tuple or list.
    Returns:
        Tensor (T1, N1, D) of query's dtype; softmax in float32.
    Raises:
        TypeError, ValueError, RuntimeError: as documented.
        NotImplementedError: something documented as allowed that this stand-in does not compute.
    Source: mindspore.ops.flash_attention_score, MindSpore 2.9.
    """
    _need(isinstance(input_layout, str), TypeError, "input_layout must be a str")
    _need(input_layout in LAYOUTS, ValueError, f"input_layout must be one of {LAYOUTS}, got {input_layout!r}")
    if input_layout != "TND":
        without = actual_seq_qlen is None and actual_seq_kvlen is None
        _need(without, RuntimeError, f"actual_seq_qlen and actual_seq_kvlen must be None in {input_layout}")
        raise NotImplementedError("flash_attention_score emulator: only TND is computed")
    _check_tensors(query, key, value, head_num)
    _check_numbers(keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise)
    _check_optional(real_shift, drop_mask, padding_mask, prefix, keep_prob)
    _check_mask(attn_mask, sparse_mode)
    q_ends = _read_ends("actual_seq_qlen", actual_seq_qlen, query.shape[0])
    k_ends = _read_ends("actual_seq_kvlen", actual_seq_kvlen, key.shape[0])
    q_lens, k_lens = np.diff(q_ends, prepend=0), np.diff(k_ends, prepend=0)
    _check_lengths(q_lens, k_lens, pre_tokens, sparse_mode)

    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x.astype(ms.float32).asnumpy().transpose(1, 0, 2) for x in (query, key, value))
    k, v = np.repeat(k, repeats, 0), np.repeat(v, repeats, 0)
    out = np.zeros_like(q)
    for q_end, k_end, q_len, k_len in zip(q_ends, k_ends, q_lens, k_lens, strict=True):
        rows, columns = slice(q_end - q_len, q_end), slice(k_end - k_len, k_end)
        shift = k_len - q_len if sparse_mode == 3 else 0
        if q_len:
            out[:, rows] = _attend(q[:, rows], k[:, columns], v[:, columns], scalar_value, shift)
    return Tensor(np.ascontiguousarray(out.transpose(1, 0, 2))).astype(query.dtype)
