"""RMS normalisation."""

import mindspore as ms
from mindspore import Tensor, ops

from ms_varlen.ops.ascend_fused import ascend_rms_norm
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_add_rms_norm, kernel_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` divided by the root mean square of its last axis, times `weight`.

    Args:
        x: [..., D] float; computed in fp32 whatever its dtype.
        weight: [D] float.
        eps: added to the mean square.
    Returns:
        [..., D], dtype of `x`.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 4.
    """
    body = body_in_use()
    if body == "ascend":
        return ascend_rms_norm(x, weight, eps)
    if body == "kernel":
        return kernel_rms_norm(x, weight, eps)
    return reference_rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A residual path and the norm that follows it.

    Args:
        x, y: [..., D] float of one shape and dtype.
        weight: [D] float.
        eps: added to the mean square.
    Returns:
        `x + y`, and `rms_norm` of it; [..., D] each, dtype of `x`.
    """
    if body_in_use() == "kernel":
        return kernel_add_rms_norm(x, y, weight, eps)
    total = x + y
    return total, rms_norm(total, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain body of `rms_norm`."""
    wide = ops.cast(x, ms.float32)
    scale = ops.rsqrt(ops.mean(wide * wide, -1, True) + eps)
    return ops.cast(wide * scale * ops.cast(weight, ms.float32), x.dtype)
