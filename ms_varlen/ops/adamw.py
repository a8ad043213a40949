"""What the optimizer does with the gradient of one parameter."""

from mindspore import Parameter, Tensor, ops

from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_adamw, kernel_square_sum

_adam_weight_decay = ops.AdamWeightDecay()


def square_sum(gradient: Tensor) -> Tensor:
    """() fp32, the sum of an fp32 gradient's squares."""
    if body_in_use() == "kernel":
        return kernel_square_sum(gradient)
    return ops.square(gradient).sum()


def adamw(
    weight: Parameter,
    m: Parameter,
    v: Parameter,
    gradient: Parameter,
    constants: tuple[float, float, float],
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    zero: Tensor,
) -> Tensor:
    """One AdamW update in place, without bias correction; the gradient becomes 0.

        g = scale gradient;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g
        weight -= rate (m / (sqrt(v) + eps) + decay decay_scale weight)

    Args:
        weight, m, v, gradient: fp32, of one shape.
        constants: (beta1, beta2, decay).
        factors: (rate, eps, decay_scale, scale), () fp32 each.
        zero: () fp32, 0. As an input, because MindSpore folds `zeros_like` into constants as large as the weight.
    Returns:
        Something to depend on.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, without lines 9 and 10.
    """
    if body_in_use() == "kernel":
        return kernel_adamw(weight, m, v, gradient, constants, factors)
    (beta1, beta2, decay), (rate, eps, decay_scale, scale) = constants, factors
    _adam_weight_decay(weight, m, v, rate, beta1, beta2, eps, decay * decay_scale, gradient * scale)
    return ops.assign(gradient, gradient * zero)
