"""Attention in NumPy, one segment and one head after another, and helpers of the attention tests.

Axis letters: T tokens, N heads, n KV heads, D head size.
"""

import contextlib

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

# float32 against float64, relative to the largest value: sums of up to 200 products and their softmax.
FP32 = 1e-5
# float16 keeps 11 bits: inputs are exact in both, the output is rounded by up to 5e-4 of itself.
HALF = {"rtol": 1e-3, "atol": 1e-3}
N, KV, D = 4, 2, 20


def naive(q, k, v, w, segments):
    """Output and gradients of sum(output * w) in float64, one segment and head after another."""
    q, k, v, w = (x.astype(np.float64) for x in (q, k, v, w))
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    repeats, scale, end = q.shape[1] // k.shape[1], q.shape[2] ** -0.5, 0
    for length in segments:
        rows, end = slice(end, end + length), end + length
        for h in range(q.shape[1]):
            at, kv = (rows, h), (rows, h // repeats)
            scores = np.where(np.tri(length), q[at] @ k[kv].T * scale, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[at] = weights @ v[kv]
            dweights = w[at] @ v[kv].T
            dscores = weights * (dweights - (weights * dweights).sum(1, keepdims=True)) * scale
            dq[at] = dscores @ k[kv]
            dk[kv] += dscores.T @ q[at]
            dv[kv] += weights.T @ w[at]
    return out, dq, dk, dv


def qkvw(tokens, seed=0, heads=N, kv_heads=KV, size=D):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((tokens, n, size)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads)]


class OutputAndGradients(nn.Cell):
    """(output, dq, dk, dv) of the sum of output * w: one graph for all that a test looks at."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.gradient = ops.value_and_grad(self.loss, (0, 1, 2), has_aux=True)

    def loss(self, q, k, v, w, lengths):
        out = self.attend(q, k, v, lengths)
        return (ops.cast(out, ms.float32) * w).sum(), out

    def construct(self, q, k, v, w, *lengths):  # flat: set_inputs refuses dynamic tensors inside a tuple
        (_, out), gradients = self.gradient(q, k, v, w, lengths)
        return out, *gradients


def declared(tokens=None, dtype=ms.float32):
    q, kv = Tensor(shape=[tokens, N, D], dtype=dtype), Tensor(shape=[tokens, KV, D], dtype=dtype)
    return q, kv, kv, Tensor(shape=[tokens, N, D], dtype=ms.float32)


@contextlib.contextmanager
def mode(name):
    """Graph mode or PyNative for the block."""
    before = ms.get_context("mode")
    ms.set_context(mode=name)
    try:
        yield
    finally:
        ms.set_context(mode=before)


def assert_close(got, want, bound=FP32):
    assert len(got) == len(want) == 4
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert np.abs(a - b).max() <= bound * max(1.0, np.abs(b).max()), name
