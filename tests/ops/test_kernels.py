import ctypes
import ctypes.util
import functools
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_varlen.ops import kernels
from ms_varlen.ops.kernel_build import kernel_library

# Relative to the largest value: fp32 rounding of sums over some hundred terms, in an order of their own.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def loaded():
    if not kernels.load_kernels():
        pytest.skip("no C++ compiler on this machine: there are no kernels to test")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(expected).max()))


def values_and_gradients(function, arrays, differentiable, weights):
    """The outputs as NumPy, and the gradients of their weighted sum for the first `differentiable` arrays."""

    def weighted(*tensors):
        out = function(*tensors)
        return (out * Tensor(weights)).sum(), out

    gradient = ms.value_and_grad(weighted, tuple(range(differentiable)), has_aux=True)
    (_, out), gradients = gradient(*(Tensor(array) for array in arrays))
    return [out.asnumpy(), *(g.asnumpy() for g in (gradients if differentiable > 1 else [gradients]))]


def numpy_head(q, k, v, d_out):
    """One segment of one head, in float64: the output and the gradients of sum(out * d_out)."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    out, d_p = p @ v, d_out @ v.T
    d_scores = p * (d_p - (d_out * out).sum(1, keepdims=True)) / np.sqrt(q.shape[1])
    return out, d_scores @ k, d_scores.T @ q, p.T @ d_out


def numpy_attention(q, k, v, seq_lens, d_out):
    q, k, v, d_out = (a.astype(np.float64) for a in (q, k, v, d_out))
    results = [np.zeros_like(a) for a in (q, q, k, v)]
    group, end = q.shape[1] // k.shape[1], 0
    for length in seq_lens:
        end += length
        rows = slice(end - length, end)
        for head in range(q.shape[1] if length else 0):
            kv = head // group
            found = numpy_head(q[rows, head], k[rows, kv], v[rows, kv], d_out[rows, head])
            for result, value, at in zip(results, found, (head, head, kv, kv), strict=True):
                result[rows, at] += value
    return results


def attention_case(seq_lens, heads, kv_heads, size):
    tokens = sum(seq_lens)
    arrays = [normal(tokens, n, size, seed=i) for i, n in enumerate([heads, kv_heads, kv_heads])]
    return arrays, np.cumsum(seq_lens).astype(np.int32), normal(tokens, heads, size, seed=9)


def kernel_attention(arrays, ends, weights):
    lengths = (Tensor(ends),)
    return values_and_gradients(lambda q, k, v: kernels.kernel_varlen_attention(q, k, v, lengths), arrays, 3, weights)


@pytest.mark.parametrize(
    ("seq_lens", "heads", "kv_heads", "size"),
    [
        pytest.param([1], 1, 1, 1, id="one token, head of one"),
        pytest.param([1, 2, 3], 2, 1, 4, id="shorter than a vector"),
        pytest.param([5, 9, 33, 0, 0], 4, 2, 64, id="repeated trailing ends"),
        pytest.param([95, 96, 97, 193], 2, 2, 16, id="around one and two blocks"),
        pytest.param([17, 40], 6, 2, 7, id="odd head size"),
        pytest.param([130, 31], 4, 1, 80, id="head of more than a slice, one KV head"),
        pytest.param([700], 2, 1, 33, id="two chunks of keys"),
        pytest.param([1, 1200, 1], 1, 1, 130, id="three chunks between single tokens"),
    ],
)
def test_attention_and_gradients_match_plain_numpy(seq_lens, heads, kv_heads, size):
    arrays, ends, weights = attention_case(seq_lens, heads, kv_heads, size)
    for actual, expected in zip(
        kernel_attention(arrays, ends, weights), numpy_attention(*arrays, seq_lens, weights), strict=True
    ):
        assert_close(actual, expected)


def test_segments_do_not_see_each_other():
    arrays, ends, weights = attention_case([50, 120, 30], 2, 1, 16)
    before = kernel_attention(arrays, ends, weights)
    arrays[1][60], arrays[2][60] = 1e3, np.nan
    after = kernel_attention(arrays, ends, weights)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:50], b[:50])
        np.testing.assert_array_equal(a[170:], b[170:])
    assert np.isnan(after[0][60:170]).all()


def test_large_scores_neither_overflow_nor_vanish():
    arrays, ends, weights = attention_case([200], 1, 1, 8)
    arrays[0] *= 100
    for actual, expected in zip(
        kernel_attention(arrays, ends, weights), numpy_attention(*arrays, [200], weights), strict=True
    ):
        # Scores of about 100 carry an absolute rounding of 1e-5, and the softmax passes it on as a relative one.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("ends", "words"),
    [([5, 3, 8], "actual_seq_qlen[1] must be between"), ([5, 9], "and T (8), got 9"), ([5], "must equal the number")],
)
def test_ends_that_do_not_describe_the_tokens_are_refused(ends, words, capfd):
    q = Tensor(normal(8, 1, 4))
    with pytest.raises(RuntimeError, match="AttentionForward"):
        kernels.kernel_varlen_attention(q, q, q, (Tensor(ends, ms.int32),)).asnumpy()
    assert words in capfd.readouterr().err


def numpy_rms_norm(x, weight, d_y, eps=1e-5):
    r = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)
    d_x = d_y * weight * r - x * r**3 * np.mean(d_y * weight * x, -1, keepdims=True)
    return x * r * weight, d_x, (d_y * x * r).reshape(-1, len(weight)).sum(0)


def numpy_rotary(x, cos, sin, d_y):
    """Each pair of components as one complex number, turned, and for the gradient turned back."""

    def turned(a, sign):
        half = a.shape[-1] // 2
        z = (a[..., :half] + 1j * a[..., half:]) * (cos + sign * 1j * sin)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    return turned(x, 1), turned(d_y, -1)


def numpy_swiglu(gate, up, d_y):
    sigmoid = 1 / (1 + np.exp(-gate))
    return gate * sigmoid * up, d_y * up * sigmoid * (1 + gate * (1 - sigmoid)), d_y * gate * sigmoid


def numpy_loss(hidden, weight, labels, d_loss=1.0):
    on = labels != -100
    logits = hidden[on] @ weight.T
    log_sums = np.log(np.exp(logits).sum(-1))
    targets = (np.arange(len(weight)) == labels[on][:, None]).astype(float)
    d_logits = (np.exp(logits - log_sums[:, None]) - targets) * d_loss
    d_hidden = np.zeros_like(hidden)
    d_hidden[on] = d_logits @ weight
    return (log_sums - (logits * targets).sum(-1)).sum(), d_hidden, d_logits.T @ hidden[on]


def angles(tokens, half):
    table = np.outer(np.arange(tokens), 1 / np.arange(1, half + 1))
    return [np.cos(table).astype(np.float32), np.sin(table).astype(np.float32)]


def rms_norm(x, weight):
    return kernels.kernel_rms_norm(x, weight, 1e-5)


CASES = {
    "rms_norm of tokens": (rms_norm, numpy_rms_norm, [normal(5, 8), normal(8)], 2),
    "rms_norm of heads": (rms_norm, numpy_rms_norm, [normal(5, 3, 4), normal(4)], 2),
    "rms_norm of three blocks of rows": (rms_norm, numpy_rms_norm, [normal(700, 33), normal(33)], 2),
    "rotary": (kernels.kernel_rotary, numpy_rotary, [normal(5, 3, 4), *angles(5, 2)], 1),
    "rotary of wide heads": (kernels.kernel_rotary, numpy_rotary, [normal(50, 2, 70), *angles(50, 35)], 1),
    "swiglu": (kernels.kernel_swiglu, numpy_swiglu, [normal(5, 6), normal(5, 6, seed=1)], 2),
    "swiglu of two stripes": (kernels.kernel_swiglu, numpy_swiglu, [normal(90, 61), normal(90, 61, seed=1)], 2),
    "swiglu of large values": (kernels.kernel_swiglu, numpy_swiglu, [normal(9, 9) * 60, normal(9, 9, seed=1)], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_fused_operators_and_gradients_match_plain_numpy(case):
    kernel, reference, arrays, differentiable = CASES[case]
    weights = normal(*arrays[0].shape, seed=7)
    expected = reference(*(array.astype(np.float64) for array in [*arrays, weights]))
    for actual, wanted in zip(values_and_gradients(kernel, arrays, differentiable, weights), expected, strict=True):
        assert_close(actual, wanted)


def loss_case(tokens, size, vocabulary, supervised=0.7):
    random = np.random.default_rng(tokens)
    labels = random.integers(0, vocabulary, tokens).astype(np.int32)
    labels[random.random(tokens) >= supervised] = -100
    return normal(tokens, size), normal(vocabulary, size) / np.float32(np.sqrt(size)), labels


@pytest.mark.parametrize(
    ("tokens", "size", "vocabulary"),
    [
        pytest.param(5, 8, 7, id="small"),
        pytest.param(1000, 17, 97, id="two chunks of tokens, two blocks of vocabulary"),
        pytest.param(60, 300, 530, id="slices of hidden and of vocabulary"),
    ],
)
def test_loss_and_gradients_match_plain_numpy(tokens, size, vocabulary):
    hidden, weight, labels = loss_case(tokens, size, vocabulary)
    loss = ms.value_and_grad(lambda h, w: kernels.kernel_linear_cross_entropy(h, w, Tensor(labels)) * 0.5, (0, 1))
    value, gradients = loss(Tensor(hidden), Tensor(weight))
    expected = numpy_loss(hidden.astype(np.float64), weight.astype(np.float64), labels, 0.5)
    assert value.shape == ()
    for actual, wanted in zip([value * 2, *gradients], expected, strict=True):
        assert_close(actual.asnumpy(), wanted)
    np.testing.assert_array_equal(gradients[0].asnumpy()[labels == -100], 0)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_gradients_stay_exact_with_the_vocabularies_that_people_train(vocabulary):
    hidden, weight, labels = loss_case(64, 64, vocabulary)
    loss = ms.grad(lambda h, w: kernels.kernel_linear_cross_entropy(h, w, Tensor(labels)), (0, 1))
    gradients = loss(Tensor(hidden), Tensor(weight))
    exact = numpy_loss(*(x.astype(np.float64) for x in (hidden, weight)), labels)[1:]
    for gradient, expected in zip(gradients, exact, strict=True):
        # One fp32 product of this depth has 1e-6; a running sum over the vocabulary had 2e-5.
        assert np.abs(gradient.asnumpy() - expected).max() <= 3e-6 * np.abs(expected).max()


def test_no_supervised_token_gives_zero_loss_and_zero_gradients():
    hidden, weight, labels = loss_case(6, 8, 7, supervised=0)
    loss = ms.value_and_grad(lambda h, w: kernels.kernel_linear_cross_entropy(h, w, Tensor(labels)), (0, 1))
    value, gradients = loss(Tensor(hidden), Tensor(weight))
    assert float(value) == 0
    assert not gradients[0].asnumpy().any()
    assert not gradients[1].asnumpy().any()


def test_nan_reaches_the_loss():
    hidden, weight, labels = loss_case(6, 8, 7, supervised=1)
    hidden[3, 2] = np.nan
    assert np.isnan(float(kernels.kernel_linear_cross_entropy(Tensor(hidden), Tensor(weight), Tensor(labels))))


@pytest.mark.parametrize("label", [7, -1])
def test_label_outside_the_vocabulary_is_refused(label, capfd):
    hidden, weight, labels = loss_case(6, 8, 7, supervised=1)
    labels[2] = label
    with pytest.raises(RuntimeError, match="LinearCrossEntropy"):
        kernels.kernel_linear_cross_entropy(Tensor(hidden), Tensor(weight), Tensor(labels)).asnumpy()
    assert f"labels[2] must be -100 or in [0, 7), got {label}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "shapes", "words"),
    [
        (kernels.kernel_rms_norm, [(3, 4), (5,)], "RmsNorm: weight must be as long as the last axis of x"),
        (kernels.kernel_add_rms_norm, [(3, 4), (2, 4), (4,)], "AddRmsNorm: x and y must have one shape"),
        (kernels.kernel_add_rms_norm, [(3, 4), (3, 4), (3,)], "AddRmsNorm: weight must be as long as the last axis"),
        (kernels.kernel_swiglu, [(3, 4), (3, 3)], "Swiglu: gate and up must have one shape"),
    ],
)
def test_inputs_that_are_too_small_are_refused_not_read_past_their_end(kernel, shapes, words, capfd):
    inputs, eps = [Tensor(normal(*shape)) for shape in shapes], () if kernel is kernels.kernel_swiglu else (1e-6,)
    with pytest.raises(RuntimeError, match="Forward"):
        kernel(*inputs, *eps)[0].asnumpy()
    assert words in capfd.readouterr().err


def test_views_of_other_tensors_are_read_as_what_they_show():
    x, weight = normal(8, 6), normal(8)
    view = Tensor(x).transpose(1, 0)
    actual = kernels.kernel_rms_norm(view, Tensor(weight), 1e-5).asnumpy()
    assert_close(actual, numpy_rms_norm(x.T, weight, 0)[0])


def call(library, name, *arrays):
    """A kernel without MindSpore: inputs, then the outputs that it fills."""
    shapes = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in arrays]
    status = getattr(library, name)(
        len(arrays),
        (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays)),
        (ctypes.c_int * len(arrays))(*(a.ndim for a in arrays)),
        (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(s) for s in shapes)),
        None,
        None,
        None,
    )
    assert status == 0


def every_output():
    """All outputs of the kernels that sum over tokens, keys or values, or write in place."""
    library = ctypes.CDLL(str(kernel_library()))
    (q, k, v), ends, d_out = attention_case([610, 3, 97], 4, 2, 24)
    out, lse = np.empty_like(q), np.empty((4, len(q)), np.float32)
    gradients = [np.empty_like(a) for a in (q, k, v)]
    call(library, "AttentionForward", q, k, v, ends, out, lse)
    call(library, "AttentionBackward", q, k, v, ends, out, lse, d_out, *gradients)
    hidden, weight, labels = loss_case(900, 40, 300)
    loss = [np.empty(1, np.float32), np.empty_like(hidden), np.empty_like(weight)]
    call(library, "LinearCrossEntropy", hidden, weight, labels, *loss)
    d_norm = [np.empty_like(hidden), np.empty_like(weight[0])]
    call(library, "RmsNormBackward", hidden, weight[0], hidden[:, 0].copy(), hidden, *d_norm)
    squares, parameters = np.empty(1, np.float32), [normal(40000, seed=i) for i in range(4)]
    call(library, "SquareSum", parameters[0], squares)
    factors = [np.array(value, np.float32) for value in ([0.9, 0.95, 0.1], 0.01, 1e-8, 1.0, 0.5)]
    call(library, "AdamW", parameters[0], parameters[1], np.abs(parameters[2]), parameters[3], *factors, np.empty(1))
    return [out, lse, *gradients, *loss, *d_norm, squares, *parameters]


def test_bits_do_not_depend_on_the_number_of_threads():
    openmp = ctypes.CDLL(ctypes.util.find_library("gomp"))
    before = openmp.omp_get_max_threads()
    runs = []
    for threads in (1, 2, 3, 7):
        openmp.omp_set_num_threads(threads)
        runs.append(every_output())
    openmp.omp_set_num_threads(before)
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(one, other)


PEAK_PROGRAM = """
import ctypes, resource, sys
import numpy as np
sys.path.insert(0, {tests!r})
from tests.ops.test_kernels import call
library, tokens = ctypes.CDLL({library!r}), 6000
x = np.zeros((tokens, 1, 16), np.float32)
lse, gradients = np.zeros((1, tokens), np.float32), [np.zeros_like(x) for _ in range(4)]
ends = np.array([tokens], np.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(library, "AttentionForward", x, x, x, ends, gradients[0], lse)
call(library, "AttentionBackward", x, x, x, ends, x, lse, x, *gradients[1:])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_does_not_grow_with_the_square_of_the_length():
    program = PEAK_PROGRAM.format(tests=str(Path(__file__).parents[2]), library=str(kernel_library()))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 30  # MB; one matrix of scores would take 144


class TinyDecoder(nn.Cell):
    """One layer that calls every kernel, with weights of its own."""

    def __init__(self):
        super().__init__()
        self.norm = Parameter(Tensor(1 + normal(16) / 10), name="norm")
        self.up = Parameter(Tensor(normal(16, 16) / 4), name="up")
        self.head = Parameter(Tensor(normal(30, 16) / 4), name="head")

    def construct(self, x, cos, sin, ends, labels):
        h = kernels.kernel_rms_norm(x, self.norm, 1e-6)
        q = kernels.kernel_rotary(h.reshape(-1, 2, 8), cos, sin)
        y = kernels.kernel_varlen_attention(q, q, h.reshape(-1, 2, 8), (ends,)).reshape(-1, 16)
        return kernels.kernel_linear_cross_entropy(kernels.kernel_swiglu(x @ self.up, y), self.head, labels)


class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.gradient = ms.value_and_grad(net, 0, net.trainable_params())

    def construct(self, *inputs):
        return self.gradient(*inputs)


def decoder_inputs(seq_lens):
    tokens = sum(seq_lens)
    _, _, labels = loss_case(tokens, 1, 30)
    arrays = [normal(tokens, 16), *angles(tokens, 4), np.cumsum(seq_lens).astype(np.int32), labels]
    return [Tensor(array) for array in arrays]


def flat(result):
    value, (d_x, d_weights) = result
    return [a.asnumpy() for a in (value, d_x, *d_weights)]


@functools.cache
def pynative_result(seq_lens):
    return flat(Gradient(TinyDecoder())(*decoder_inputs(seq_lens)))


@pytest.mark.graph
@pytest.mark.parametrize("dynamic", [True, False])
def test_graph_mode_gives_what_pynative_gives(dynamic):
    batches = [(5, 9), (70, 1, 40)] if dynamic else [(5, 9)]
    expected = [pynative_result(seq_lens) for seq_lens in batches]
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        step = Gradient(TinyDecoder())
        if dynamic:
            floats, angle = Tensor(shape=[None, 16], dtype=ms.float32), Tensor(shape=[None, 4], dtype=ms.float32)
            ints = Tensor(shape=[None], dtype=ms.int32)
            step.set_inputs(floats, angle, angle, ints, ints)
        results = [flat(step(*decoder_inputs(seq_lens))) for seq_lens in batches]
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert len(step.compile_cache) == 1
    for wanted, found in zip(expected, results, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert_close(b, a)
