"""The Ascend body of `varlen_attention`: one `FlashAttentionScore` in TND layout.

Source: mindspore.ops.flash_attention_score, MindSpore 2.9, section `input_layout`. The operator's shape inference lets
most forbidden arguments pass, so what it documents as a restriction is refused here, while the graph is traced.

**The ends stay on the host.** The operator reads them as an array of integers there (the graph holds a `TensorToTuple`
before it), unlike kernels of other makes that read lengths on the device. Ends that were moved to the NPU, or computed
there, would be copied back in every layer, and every copy waits for the device. So they go from NumPy through the
graph's inputs to this call, and nothing casts or changes them on the way.
"""

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.primitive import constexpr

from ms_varlen.errors import RecipeError
from ms_varlen.limits import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, MAX_HEADS

DTYPES = ("float16", "bfloat16")

RIGHT_DOWN_CAUSAL = 3
# "Not less than the longest sequence": the largest int32, so that no number varies from batch to batch.
ALL_TOKENS = 2147483647
# 1 = discard. Every segment is masked from this one compressed triangle, whatever its length.
CAUSAL_MASK = Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


def ascend_faults(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> list[str]:
    """One line for each of the operator's documented limits that these numbers break.

    Args:
        dtype: what q, k and v are computed in, as in "bfloat16".
    """
    faults = []
    if not 1 <= num_heads <= MAX_HEADS:
        faults.append(f"num_attention_heads must be from 1 to {MAX_HEADS}, got {num_heads}")
    if head_dim < 1 or head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        faults.append(
            f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_HEAD_DIM}, got {head_dim}; "
            "change model.config.head_dim (or hidden_size and num_attention_heads)"
        )
    if dtype not in DTYPES:
        faults.append(f"the dtype of q, k and v must be {' or '.join(DTYPES)}, got {dtype}; cast them before the call")
    return faults


@constexpr
def _checked_scale(num_heads, num_kv_heads, head_dim, dtype):
    faults = ascend_faults(num_heads, num_kv_heads, head_dim, str(dtype).lower())
    if faults:
        raise RecipeError(faults, "attention on Ascend (FlashAttentionScore, TND)")
    return head_dim**-0.5


def ascend_attention(q_TND, k_TND, v_TND, lengths):
    """Attention causal inside each segment.

    Args:
        q_TND: [T, N, D]; k_TND and v_TND: [T, n, D], n divides N; float16 or bfloat16.
        lengths: (ends [G] int32,), running ends on the host.
    Raises:
        RecipeError: a head number, head size or dtype that the operator documents as forbidden (at compile time).
    """
    ends = lengths[0]
    return ops.flash_attention_score(
        q_TND,
        k_TND,
        v_TND,
        q_TND.shape[1],
        attn_mask=CAUSAL_MASK,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        keep_prob=1.0,
        scalar_value=_checked_scale(q_TND.shape[1], k_TND.shape[1], q_TND.shape[2], q_TND.dtype),
        pre_tokens=ALL_TOKENS,
        next_tokens=0,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN_CAUSAL,
    )
