"""The gated activation of the feed-forward block."""

from mindspore import Tensor, ops


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate, up: floats of one shape and dtype.
    Returns:
        The same shape and dtype.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """
    return ops.silu(gate) * up
