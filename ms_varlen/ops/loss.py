"""The token loss, from hidden states to one number. Axes: `T` tokens, `H` hidden size, `V` vocabulary."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_linear_cross_entropy

_logits = ops.MatMul(transpose_b=True)  # [T, H], [V, H] -> [T, V]
_weight_gradient = ops.MatMul(transpose_a=True)  # [T, V], [T, H] -> [V, H]
_hidden_gradient = ops.MatMul()  # [T, V], [V, H] -> [T, H]


class _LinearCrossEntropy(nn.Cell):
    """Loss and log probabilities; the gradient is written out.

    Derived by MindSpore it takes about twice the time on a CPU and more arrays of [T, V]; here one is kept from forward
    to backward, and three more live at the peak. Supervision is applied to [T, H], never to [T, V].
    """

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = ops.log_softmax(ops.cast(_logits(hidden, weight), ms.float32), -1)
        return ops.nll_loss(log_probs, labels, reduction="sum", ignore_index=IGNORE_INDEX), log_probs

    def bprop(self, hidden: Tensor, weight: Tensor, labels: Tensor, out: tuple, dout: tuple) -> tuple:
        one, zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        targets = ops.one_hot(labels, weight.shape[0], one, zero)
        dlogits = ops.cast(ops.exp(out[1]) - targets, hidden.dtype)
        supervised = ops.cast(labels != IGNORE_INDEX, ms.float32) * dout[0]
        per_token = ops.expand_dims(ops.cast(supervised, hidden.dtype), 1)
        dhidden = _hidden_gradient(dlogits, weight) * per_token
        return dhidden, _weight_gradient(dlogits, hidden * per_token), ops.zeros_like(labels)


_linear_cross_entropy = _LinearCrossEntropy()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over supervised tokens of -log softmax(hidden @ weight.T)[label].

    Args:
        hidden: [T, H] float.
        weight: [V, H] float, the output embedding; cast to the dtype of `hidden` for the product.
        labels: [T] int32, each in [0, V), or -100 for a token without a loss and without a gradient.
    Returns:
        () fp32, the sum (not the mean); 0 when no token is supervised. The softmax is computed in fp32.
    """
    if body_in_use() == "kernel":
        return kernel_linear_cross_entropy(hidden, weight, labels)
    return reference_linear_cross_entropy(hidden, weight, labels)


def reference_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The plain body of `linear_cross_entropy`; Ascend's too, for MindSpore has no operator that fuses the product."""
    return _linear_cross_entropy(hidden, ops.cast(weight, hidden.dtype), labels)[0]
