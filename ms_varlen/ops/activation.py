"""The gated activation of the feed-forward block."""

from mindspore import Tensor, ops

from ms_varlen.ops.ascend_fused import ascend_swiglu
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_swiglu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate, up: floats of one shape and dtype.
    Returns:
        The same shape and dtype.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """
    body = body_in_use()
    if body == "ascend":
        return ascend_swiglu(gate, up)
    if body == "kernel":
        return kernel_swiglu(gate, up)
    return reference_swiglu(gate, up)


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The plain body of `swiglu`."""
    return ops.silu(gate) * up
