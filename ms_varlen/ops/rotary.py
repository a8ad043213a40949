"""Rotary position embedding. Axes: `T` tokens, `N` heads, `D` head size."""

from mindspore import Tensor, ops

from ms_varlen.ops.ascend_fused import ascend_rotary
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_rotary


def rotary(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys turned by the angles of their positions.

    Component i of a head pairs with component i + D/2 (the convention of Hugging Face checkpoints, not of the paper)::

        a b | c d   ->   a cos - c sin,  b cos - d sin | c cos + a sin,  d cos + b sin

    Args:
        x_TND: [T, N, D] float, D even.
        cos, sin: [T, D/2], of each token's position; cast to the dtype of `x_TND`.
    Returns:
        [T, N, D], dtype of `x_TND`.
    Source: Su et al. 2021, "RoFormer", section 3.4.2; `apply_rotary_pos_emb` of transformers 4.57.
    """
    body = body_in_use()
    if body == "ascend":
        return ascend_rotary(x_TND, cos, sin)
    if body == "kernel":
        return kernel_rotary(x_TND, cos, sin)
    return reference_rotary(x_TND, cos, sin)


def reference_rotary(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain body of `rotary`."""
    cos_T1D = ops.expand_dims(ops.cast(cos, x_TND.dtype), 1)
    sin_T1D = ops.expand_dims(ops.cast(sin, x_TND.dtype), 1)
    low, high = ops.split(x_TND, x_TND.shape[-1] // 2, -1)
    # Four products of half the size and one concat; `x cos + rotate_half(x) sin` also negates and copies all of x.
    return ops.concat((low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D), -1)
