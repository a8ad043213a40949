"""The three graphs of training: accumulate a micro-batch's gradient, apply a step's, evaluate.

A step's loss is the sum of its token losses divided by its number of supervised tokens, over all micro-batches and
ranks. So micro-batches add sums of gradients, and one division happens when the step is applied. Only
`AccumulateGradients` and `EvaluateLoss` see token axes; `ApplyGradients` has fixed shapes.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_varlen.ops.adamw import adamw, square_sum
from ms_varlen.recipe.sections import TrainConfig

_add_to = ops.MultitypeFuncGraph("add_to")


@_add_to.register("Tensor", "Tensor")
def _add_tensor_to(accumulated, gradient):
    return ops.assign_add(accumulated, gradient)


# Mapped over all weights: MindSpore nests a loop's iterations as calls and fails at 1000, about 250 weights.
_square_sum = ops.MultitypeFuncGraph("square_sum")
_exchange = ops.MultitypeFuncGraph("exchange")
_adam_step = ops.MultitypeFuncGraph("adam_step")


@_square_sum.register("Tensor")
def _tensor_square_sum(gradient):
    return square_sum(gradient)


@_exchange.register("Function", "Tensor")
def _exchange_tensor(exchange, gradient):
    return ops.assign(gradient, exchange(gradient))


@_adam_step.register("Tuple", "Tuple", "Tensor", "Number", "Tensor", "Tensor", "Tensor", "Tensor")
def _adam_step_of_weight(factors, betas, zero, decay, weight, m, v, gradient):
    return adamw(weight, m, v, gradient, (*betas, decay), factors, zero)


class AccumulateGradients(nn.Cell):
    """Adds the gradient of a micro-batch's summed loss to the accumulators.

    Args:
        net: ``net(input_ids, labels, position_ids, *lengths)`` -> () fp32, the sum of token losses.
        shared: another cell over the same net, whose weights and accumulators this one uses: one cell for each static
            size of T, all into the same accumulators.
    Attributes:
        weights: the net's trainable parameters.
        accumulated: one fp32 accumulator per parameter, zero at first.
    """

    def __init__(self, net: nn.Cell, shared: "AccumulateGradients | None" = None):
        super().__init__(auto_prefix=False)
        self.net = net
        weights = ParameterTuple(net.trainable_params()) if shared is None else shared.weights
        self.weights: ParameterTuple = weights
        self.accumulated: ParameterTuple = (
            weights.clone("accumulated", init="zeros") if shared is None else shared.accumulated
        )
        self.gradient = ops.value_and_grad(net, None, self.weights)
        self.hyper_map = ops.HyperMap()

    def construct(self, input_ids, labels, position_ids, *lengths):
        """[T] int32 three times and the attention body's tensors -> () fp32, the summed loss."""
        loss_sum, gradients = self.gradient(input_ids, labels, position_ids, *lengths)
        return ops.depend(loss_sum, self.hyper_map(_add_to, self.accumulated, gradients))


class ApplyGradients(nn.Cell):
    """Divides the accumulated gradient, clips it by its global norm, applies AdamW, and zeroes the accumulators.

    AdamW as PyTorch defines it, without decay on norms and biases. MindSpore's `AdamWeightDecay` lacks the bias
    correction; it is folded into the step size, epsilon and decay, which is the same update (within 4e-7 in fp32).
    A step whose loss or gradient holds a NaN or an infinity changes nothing, the accumulators included: `clear` them.

    Args:
        weights: the parameters.
        accumulated: their summed gradients.
        config: betas, epsilon, decay and clipping.
        exchange: sums a gradient over all ranks, all of which must then apply it; None for a single rank.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2; torch.optim.AdamW.
    """

    def __init__(
        self,
        weights: ParameterTuple,
        accumulated: ParameterTuple,
        config: TrainConfig,
        exchange: nn.Cell | None = None,
    ):
        super().__init__()
        self.exchange = exchange
        self.weights = weights
        self.accumulated = accumulated
        self.adam_m = weights.clone("adam_m", init="zeros")
        self.adam_v = weights.clone("adam_v", init="zeros")
        self.applied_steps = Parameter(Tensor(0.0, ms.float32), name="applied_steps")
        self.decays = tuple(config.weight_decay if weight.ndim > 1 else 0.0 for weight in weights)
        self.betas, self.eps = (config.beta1, config.beta2), config.eps
        self.clip = config.clip_grad_norm
        self.hyper_map = ops.HyperMap()

    def construct(self, learning_rate, supervised, loss_sum, zero):
        """Apply one step.

        Args:
            learning_rate: () fp32.
            supervised: () fp32, supervised tokens of the whole step, above 0.
            loss_sum: () fp32, summed loss of the whole step.
            zero: () fp32, 0. As an input, because MindSpore folds `zeros_like` into constants as large as the model.
        Returns:
            () fp32, the gradient's global norm before clipping, and () bool, whether the step was applied.
        """
        if self.exchange is not None:
            self.hyper_map(ops.partial(_exchange, self.exchange), self.accumulated)
        norm = ops.sqrt(ops.addn(self.hyper_map(_square_sum, self.accumulated))) / supervised
        finite = ops.logical_and(ops.isfinite(norm), ops.isfinite(loss_sum))
        if finite:
            self._update(learning_rate, self._scale(norm) / supervised, zero)
        return norm, finite

    def _scale(self, norm):
        if self.clip is None:
            return ops.ones_like(norm)
        return ops.minimum(self.clip / (norm + 1e-6), ops.ones_like(norm))

    def _update(self, learning_rate, scale, zero):
        step = self.applied_steps + 1.0
        ops.assign(self.applied_steps, step)
        beta1, beta2 = self.betas
        correction1 = 1.0 - ops.pow(Tensor(beta1, ms.float32), step)
        root2 = ops.sqrt(1.0 - ops.pow(Tensor(beta2, ms.float32), step))
        factors = (learning_rate * root2 / correction1, self.eps * root2, correction1 / root2, scale)
        update = ops.partial(_adam_step, factors, self.betas, zero)
        self.hyper_map(update, self.decays, self.weights, self.adam_m, self.adam_v, self.accumulated)


def clear(accumulated: ParameterTuple) -> None:
    """Zero the accumulators from the host, after a step that was not applied."""
    for gradient in accumulated:
        ops.assign(gradient, Tensor(np.zeros(gradient.shape, np.float32)))


class EvaluateLoss(nn.Cell):
    """Computes the summed loss of a micro-batch, without gradient.

    Args:
        net: the net that `AccumulateGradients` trains; its parameters are shared.
    """

    def __init__(self, net: nn.Cell):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, input_ids, labels, position_ids, *lengths):
        """[T] int32 three times and the attention body's tensors -> () fp32."""
        return self.net(input_ids, labels, position_ids, *lengths)
