"""The fused Ascend operators: values through stand-ins that follow the documentation, and compiles."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_varlen.ops import ascend_fused, body
from ms_varlen.ops.activation import reference_swiglu, swiglu
from ms_varlen.ops.norm import reference_rms_norm, rms_norm
from ms_varlen.ops.rotary import reference_rotary, rotary
from tests.support.naive_attention import mode

T, N, D = 5, 3, 8


@pytest.fixture(autouse=True)
def _ascend_body():
    body.use_body("ascend")
    yield
    body.use_body(None)


def documented_rms_norm(x, gamma, epsilon=1e-6):
    assert x.dtype == gamma.dtype
    root = np.sqrt(np.mean(x.asnumpy() ** 2, -1, keepdims=True) + epsilon)
    return Tensor(x.asnumpy() / root * gamma.asnumpy()), Tensor(1 / root)


def documented_rotary(x, cos, sin, mode=0):
    """x BSND with cos and sin 1S1D of full head size; mode 0 rotates halves; returns what the operator does."""
    batch, length, _, size = x.shape
    assert (batch, mode) == (1, 0)
    assert cos.shape == sin.shape == (1, length, 1, size)
    assert cos.dtype == x.dtype
    x, cos, sin = x.asnumpy(), cos.asnumpy(), sin.asnumpy()
    rotated = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return Tensor(x * cos + rotated * sin)


def documented_swiglu(input, dim=-1):
    gate, up = np.split(input.asnumpy(), 2, dim)
    return Tensor(gate / (1 + np.exp(-gate)) * up)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(ascend_fused.ops, "rms_norm", documented_rms_norm)
    monkeypatch.setattr(ascend_fused.ops, "rotary_position_embedding", documented_rotary)
    monkeypatch.setattr(ascend_fused.ops, "swiglu", documented_swiglu)


def normal(*shape):
    return Tensor(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def test_the_fused_operators_compute_what_the_plain_bodies_do(stand_ins):
    x, angles = normal(T, N, D), np.outer(np.arange(T), [1.0, 0.5, 0.2, 0.1]).astype(np.float32)
    cos, sin = Tensor(np.cos(angles)), Tensor(np.sin(angles))
    pairs = [
        (rms_norm(x, normal(D), 1e-5), reference_rms_norm(x, normal(D), 1e-5)),
        (rotary(x, cos, sin), reference_rotary(x, cos, sin)),
        (swiglu(normal(T, 7), normal(T, 7)), reference_swiglu(normal(T, 7), normal(T, 7))),
    ]
    for fused, plain in pairs:
        assert fused.shape == plain.shape
        np.testing.assert_allclose(fused.asnumpy(), plain.asnumpy(), atol=1e-6)


class Norm(nn.Cell):
    def construct(self, x, other):
        return rms_norm(ops.cast(x, ms.bfloat16), ops.ones(8, ms.float32), 1e-6)


class Turn(nn.Cell):
    def construct(self, x, other):
        return rotary(ops.cast(ops.reshape(x, (-1, 1, 8)), ms.float16), other[:, :4], other[:, 4:])


class Gate(nn.Cell):
    def construct(self, x, other):
        return swiglu(ops.cast(x, ms.bfloat16), ops.cast(other, ms.bfloat16))


class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.gradient = ops.GradOperation(get_all=True)
        self.net = net

    def construct(self, x, other):
        return self.gradient(self.net)(x, other)


@pytest.mark.graph
@pytest.mark.parametrize(("net", "operator"), [(Norm, "RmsNorm"), (Turn, "RotaryPositionEmbedding"), (Gate, "Swiglu")])
@pytest.mark.parametrize("backward", [False, True])
def test_the_fused_operators_compile_up_to_the_missing_cpu_kernel(net, operator, backward):
    cell = Gradient(net()) if backward else net()
    tokens = Tensor(shape=[None, 8], dtype=ms.float32)
    cell.set_inputs(tokens, tokens)
    # The gradient of SwiGLU and of rotary needs no forward pass, so their own gradient operator is met first.
    with mode(ms.GRAPH_MODE), pytest.raises(RuntimeError, match=rf"Unsupported op \[{operator}(Grad)?\] on CPU"):
        cell(normal(6, 8), normal(6, 8))
