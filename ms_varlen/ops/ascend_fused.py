"""The Ascend bodies of the operators around attention: MindSpore's fused operators, fp16, bf16 or fp32.

Source: mindspore.ops.rms_norm, rotary_position_embedding and swiglu, MindSpore 2.9. They document Ascend alone.
"""

import mindspore as ms
from mindspore import Tensor, ops

ROTATE_HALF = 0


def ascend_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., D] over the root mean square of its last axis, times `weight` [D]; in fp32, as the other bodies."""
    out = ops.rms_norm(ops.cast(x, ms.float32), ops.cast(weight, ms.float32), eps)[0]
    return ops.cast(out, x.dtype)


def ascend_rotary(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_TND` [T, N, D] turned by angles [T, D/2]: component i pairs with i + D/2.

    The operator takes x as [B, S, N, D] with cosines [1, S, 1, D], D below 896, N below 1000.
    """
    both_cos, both_sin = (ops.cast(ops.concat((angle, angle), -1), x_TND.dtype) for angle in (cos, sin))
    heads, size = x_TND.shape[1:]
    cos_1S1D, sin_1S1D = (ops.reshape(angle, (1, -1, 1, size)) for angle in (both_cos, both_sin))
    x_BSND = ops.reshape(x_TND, (1, -1, heads, size))
    return ops.reshape(ops.rotary_position_embedding(x_BSND, cos_1S1D, sin_1S1D, ROTATE_HALF), (-1, heads, size))


def ascend_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`; the operator takes both in one tensor, gate first."""
    return ops.swiglu(ops.concat((gate, up), -1), -1)
