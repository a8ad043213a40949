"""The CPU bodies of the operators: C++ kernels (`csrc/`) as MindSpore operators with their gradients, fp32.

    load_kernels()                                            # once, before a graph is traced; compiles on first use
    out_TND = kernel_varlen_attention(q_TND, k_TND, v_TND, (ends,))   # then anywhere: any Cell, graph mode or PyNative

Each function has the signature of the operator that it is a body of, and the same bits whatever the number of threads.
It computes in fp32; other floats are cast on the way in and out, which costs nothing where they are fp32 already.
Set `GOMP_SPINCOUNT=0` before the process starts: waiting OpenMP threads otherwise take the processors from MindSpore's.
Axes: `T` tokens, `N` heads, `n` KV heads, `D` head size, `G` segments, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import CustomRegOp, DataType

from ms_varlen.ops.kernel_build import kernel_library

F32, I32 = DataType.F32_Default, DataType.I32_Default

# Filled by `load_kernels`: a graph reads a global when it is traced, and it needs the operators themselves there.
_attention: Any = None
_rms_norm: Any = None
_add_rms_norm: Any = None
_rotary: Any = None
_swiglu: Any = None
_linear_cross_entropy: Any = None
_square_sum: Any = None
_adamw: Any = None


def load_kernels() -> bool:
    """Make the kernels ready to be called; builds the library if it has to be.

    Returns:
        False when there is no library (`kernel_library` has said why): then the functions here must not be called.
    """
    global _attention, _rms_norm, _add_rms_norm, _rotary, _swiglu, _linear_cross_entropy, _square_sum, _adamw
    library = kernel_library()
    if library is None:
        return False
    if _attention is None:
        _attention = _attention_operator(library)
        _rms_norm = _rms_norm_operator(library)
        _add_rms_norm = _add_rms_norm_operator(library)
        _rotary = _rotary_operator(library)
        _swiglu = _swiglu_operator(library)
        _linear_cross_entropy = _linear_cross_entropy_operator(library)
        _square_sum = _operator(library, "SquareSum", [F32], [F32])
        _adamw = _adamw_operator(library)
    return True


def kernel_varlen_attention(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, lengths: tuple[Tensor, ...]) -> Tensor:
    """Attention that is causal inside each segment and sees nothing of the others.

    Args:
        q_TND: [T, N, D] float; k_TND, v_TND: [T, n, D] float, n divides N.
        lengths: ([G] int32,), running ends; the last one is T, and it may repeat.
    Returns:
        [T, N, D], dtype of `q_TND`.
    Raises:
        RuntimeError: ends that decrease or do not reach T (from MindSpore, when the operator runs).
    """
    return ops.cast(_attention(_wide(q_TND), _wide(k_TND), _wide(v_TND), lengths[0])[0], q_TND.dtype)


def kernel_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., D] divided by the root mean square of its last axis, times `weight` [D]."""
    return ops.cast(_rms_norm(_wide(x), _wide(weight), Tensor([eps], ms.float32))[0], x.dtype)


def kernel_add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` and its `kernel_rms_norm`, in one pass forward and one backward; [..., D] each, dtype of `x`."""
    total, normed = _add_rms_norm(_wide(x), _wide(y), _wide(weight), Tensor([eps], ms.float32))[:2]
    return ops.cast(total, x.dtype), ops.cast(normed, x.dtype)


def kernel_rotary(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_TND` [T, N, D] turned by [T, D/2] angles: component i pairs with i + D/2; no gradient for the angles."""
    return ops.cast(_rotary(_wide(x_TND), _wide(cos), _wide(sin)), x_TND.dtype)


def kernel_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, floats of one shape and dtype."""
    return ops.cast(_swiglu(_wide(gate), _wide(up)), gate.dtype)


def kernel_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over supervised tokens of -log softmax(hidden @ weight.T)[label].

    Both gradients are computed along with the loss, so that a call takes the time of three matrix products even where
    only the loss is used; logits of 384 tokens exist at a time, and none of unsupervised ones.

    Args:
        hidden: [T, H] float; weight: [V, H] float; labels: [T] int32, each in [0, V) or -100.
    Returns:
        () fp32; 0 when no token is supervised.
    Raises:
        RuntimeError: a label outside [0, V) that is not -100 (from MindSpore, when the operator runs).
    """
    # Not [] from C++: MindSpore's graph mode takes such an output for a Python number.
    return _linear_cross_entropy(_wide(hidden), _wide(weight), labels)[0].reshape(())


def kernel_square_sum(x: Tensor) -> Tensor:
    """() fp32, the sum of squares of an fp32 tensor."""
    return _square_sum(x).reshape(())


def kernel_adamw(weight: Tensor, m: Tensor, v: Tensor, gradient: Tensor, constants: tuple, factors: tuple) -> Tensor:
    """One AdamW update of fp32 parameters of one shape, in place and in one pass over memory; the gradient becomes 0.

    Args:
        constants: (beta1, beta2, decay), floats.
        factors: (rate, eps, decay_scale, scale), () fp32.
    Returns:
        [1] fp32, something to depend on.
    """
    return _adamw(weight, m, v, gradient, Tensor(constants, ms.float32), *factors)


def _wide(x: Tensor) -> Tensor:
    return ops.cast(x, ms.float32)


def _operator(library: Path, name: str, inputs: list, outputs: list, bprop: Callable | None = None) -> ops.Custom:
    """The C++ function `name` as an operator; its shapes come from the C++ function `name`InferShape."""
    info = CustomRegOp(name)
    for i in range(len(inputs)):
        info = info.input(i, f"in{i}")
    for i in range(len(outputs)):
        info = info.output(i, f"out{i}")
    info = info.dtype_format(*inputs, *outputs).target("CPU").get_op_info()
    types = tuple(ms.float32 for _ in outputs)

    def infer_dtype(*_):
        return types if len(types) > 1 else types[0]

    return ops.Custom(f"{library}:{name}", None, infer_dtype, func_type="aot", bprop=bprop, reg_info=info)


def _attention_operator(library: Path) -> ops.Custom:
    backward = _operator(library, "AttentionBackward", [F32, F32, F32, I32, F32, F32, F32], [F32, F32, F32])

    def bprop(q, k, v, ends, out, dout):
        d_q, d_k, d_v = backward(q, k, v, ends, out[0], out[1], dout[0])
        return d_q, d_k, d_v, ops.zeros_like(ends)

    return _operator(library, "AttentionForward", [F32, F32, F32, I32], [F32, F32], bprop)


def _rms_norm_operator(library: Path) -> ops.Custom:
    backward = _operator(library, "RmsNormBackward", [F32, F32, F32, F32], [F32, F32])

    def bprop(x, weight, eps, out, dout):
        d_x, d_weight = backward(x, weight, out[1], dout[0])
        return d_x, d_weight, ops.zeros_like(eps)

    return _operator(library, "RmsNormForward", [F32, F32, F32], [F32, F32], bprop)


def _add_rms_norm_operator(library: Path) -> ops.Custom:
    backward = _operator(library, "AddRmsNormBackward", [F32] * 5, [F32, F32])

    def bprop(x, y, weight, eps, out, dout):
        d_x, d_weight = backward(out[0], weight, out[2], dout[0], dout[1])
        return d_x, d_x, d_weight, ops.zeros_like(eps)

    return _operator(library, "AddRmsNormForward", [F32] * 4, [F32] * 3, bprop)


def _rotary_operator(library: Path) -> ops.Custom:
    backward = _operator(library, "RotaryBackward", [F32, F32, F32], [F32])

    def bprop(x, cos, sin, out, dout):
        return backward(dout, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)

    return _operator(library, "RotaryForward", [F32, F32, F32], [F32], bprop)


def _swiglu_operator(library: Path) -> ops.Custom:
    backward = _operator(library, "SwigluBackward", [F32, F32, F32], [F32, F32])

    def bprop(gate, up, out, dout):
        d_gate, d_up = backward(gate, up, dout)
        return d_gate, d_up

    return _operator(library, "SwigluForward", [F32, F32], [F32], bprop)


def _linear_cross_entropy_operator(library: Path) -> ops.Custom:
    def bprop(hidden, weight, labels, out, dout):
        return out[1] * dout[0], out[2] * dout[0], ops.zeros_like(labels)

    return _operator(library, "LinearCrossEntropy", [F32, F32, I32], [F32, F32, F32], bprop)


def _adamw_operator(library: Path) -> ops.Custom:
    operator = _operator(library, "AdamW", [F32] * 9, [F32])
    # Writes its inputs: without this MindSpore would drop it, or move it past others that read them.
    operator.add_prim_attr("side_effect_mem", True)
    return operator
