import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_varlen.ops.activation import swiglu
from ms_varlen.ops.adamw import adamw, square_sum
from ms_varlen.ops.loss import linear_cross_entropy
from ms_varlen.ops.norm import add_rms_norm, rms_norm
from ms_varlen.ops.rotary import rotary
from ms_varlen.recipe.sections import TrainConfig
from ms_varlen.train.step import ApplyGradients

pytestmark = pytest.mark.usefixtures("body")

# Relative to the largest value: fp32 rounding over a few tens of terms, and fp16's 11 bits.
TOLERANCE = {np.float32: 2e-6, np.float16: 2e-3}


def numpy_rms_norm(x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * weight


def numpy_rotary(x, cos, sin):
    """Each pair of components as one complex number, turned."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def numpy_swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def numpy_loss(hidden, weight, labels):
    logits = hidden @ weight.T
    log_sums = np.log(np.exp(logits).sum(-1))
    return sum(log_sums[t] - logits[t, label] for t, label in enumerate(labels) if label != -100)


def numeric_gradient(function, arrays, which):
    """Central differences of a scalar function in float64."""
    gradient = np.zeros(arrays[which].shape)
    for index in np.ndindex(gradient.shape):
        values = []
        for step in (1e-5, -1e-5):
            moved = [array.copy() for array in arrays]
            moved[which][index] += step
            values.append(function(*moved))
        gradient[index] = (values[0] - values[1]) / 2e-5
    return gradient


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def sum_and_norm(x, y, weight):
    total, normed = add_rms_norm(x, y, weight, 1e-5)
    return 2 * total + normed


ANGLES = np.outer(np.arange(5), [1.0, 0.3])
CASES = {
    "rms_norm of tokens": (lambda x, w: rms_norm(x, w, 1e-5), numpy_rms_norm, [normal(5, 8), normal(8)], 2),
    "rms_norm of heads": (lambda x, w: rms_norm(x, w, 1e-5), numpy_rms_norm, [normal(5, 3, 4), normal(4)], 2),
    "residual path and its norm": (
        sum_and_norm,
        lambda x, y, w: 2 * (x + y) + numpy_rms_norm(x + y, w),
        [normal(5, 8), normal(5, 8, seed=1), normal(8)],
        3,
    ),
    "rotary": (rotary, numpy_rotary, [normal(5, 3, 4), np.cos(ANGLES), np.sin(ANGLES)], 1),
    "swiglu": (swiglu, numpy_swiglu, [normal(5, 6), normal(5, 6, seed=1)], 2),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_plain_numpy(case, dtype):
    operator, reference, arrays, differentiable = CASES[case]
    arrays = [array.astype(dtype).astype(np.float64) for array in arrays]
    expected = reference(*arrays)
    weights = normal(*expected.shape, seed=7)
    inputs = [Tensor(array.astype(dtype)) for array in arrays]

    def weighted(*tensors):
        out = operator(*tensors)
        assert out.dtype == tensors[0].dtype
        return (out.astype(ms.float32) * Tensor(weights.astype(np.float32))).sum(), out

    gradient = ms.value_and_grad(weighted, tuple(range(differentiable)), has_aux=True)
    (_, out), gradients = gradient(*inputs)
    assert_close(out.asnumpy(), expected, TOLERANCE[dtype])
    for which, actual in enumerate(gradients if differentiable > 1 else [gradients]):
        numeric = numeric_gradient(lambda *a: (reference(*a) * weights).sum(), arrays, which)
        assert_close(actual.asnumpy(), numeric, 4 * TOLERANCE[dtype])


def test_rms_norm_of_fp16_does_not_overflow_in_its_squares():
    out = rms_norm(Tensor(np.full((1, 4), 1000, np.float16)), Tensor(np.ones(4, np.float32)), 1e-6)
    assert out.asnumpy().tolist() == [[1, 1, 1, 1]]
    assert out.dtype == ms.float16


def test_rotary_leaves_position_zero_alone_and_turns_pairs_half_a_head_apart():
    x = np.array([[[1, 2, 3, 4]], [[1, 2, 3, 4]]], np.float32)
    quarter_turns = np.array([[0, 0], [1, 2]])
    cos, sin = np.cos(quarter_turns * np.pi / 2), np.sin(quarter_turns * np.pi / 2)
    out = rotary(Tensor(x), Tensor(cos.astype(np.float32)), Tensor(sin.astype(np.float32)))
    np.testing.assert_allclose(out.asnumpy(), [[[1, 2, 3, 4]], [[-3, -2, 1, -4]]], atol=1e-6)


HIDDEN, WEIGHT, LABELS = normal(6, 4), normal(9, 4), np.array([3, -100, 8, 0, -100, 5], np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_loss_and_its_gradients_match_plain_numpy(dtype):
    hidden = HIDDEN.astype(dtype).astype(np.float64)
    value_and_grad = ms.value_and_grad(linear_cross_entropy, (0, 1))
    loss, (dhidden, dweight) = value_and_grad(Tensor(hidden.astype(dtype)), Tensor(WEIGHT, ms.float32), Tensor(LABELS))
    assert (loss.shape, loss.dtype, dhidden.dtype, dweight.dtype) == (
        (),
        ms.float32,
        ms.float16 if dtype == np.float16 else ms.float32,
        ms.float32,
    )
    assert_close(loss.asnumpy(), numpy_loss(hidden, WEIGHT, LABELS), TOLERANCE[dtype])
    arrays = [hidden, WEIGHT]
    for which, actual in enumerate([dhidden, dweight]):
        numeric = numeric_gradient(lambda h, w: numpy_loss(h, w, LABELS), arrays, which)
        assert_close(actual.asnumpy(), numeric, 4 * TOLERANCE[dtype])
    assert not dhidden.asnumpy()[LABELS == -100].any()


def test_loss_scales_its_gradient_like_any_function():
    arguments = Tensor(HIDDEN, ms.float32), Tensor(WEIGHT, ms.float32), Tensor(LABELS)
    once = ms.grad(linear_cross_entropy, (0, 1))(*arguments)
    thrice = ms.grad(lambda *a: 3.0 * linear_cross_entropy(*a), (0, 1))(*arguments)
    for one, three in zip(once, thrice, strict=True):
        np.testing.assert_allclose(three.asnumpy(), 3 * one.asnumpy(), rtol=1e-6, atol=1e-7)


def test_loss_without_supervised_tokens_is_zero_with_zero_gradients():
    value_and_grad = ms.value_and_grad(linear_cross_entropy, (0, 1))
    labels = Tensor(np.full(6, -100, np.int32))
    loss, gradients = value_and_grad(Tensor(HIDDEN, ms.float32), Tensor(WEIGHT, ms.float32), labels)
    assert float(loss) == 0.0
    assert [np.abs(gradient.asnumpy()).max() for gradient in gradients] == [0.0, 0.0]


def test_loss_of_large_logits_is_finite():
    hidden, weight = Tensor([[1000.0, 0.0]], ms.float32), Tensor([[1.0, 0.0], [-1.0, 0.0]], ms.float32)
    loss, gradients = ms.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, Tensor([1], ms.int32))
    assert float(loss) == 2000.0
    assert all(np.isfinite(gradient.asnumpy()).all() for gradient in gradients)


class Loss(nn.Cell):
    """Every operator once, on tokens of [T, 2 heads of 4]."""

    def construct(self, x, weight, cos, sin, labels):
        turned = rotary(rms_norm(x, weight[0], 1e-5).reshape(-1, 2, 4), cos, sin).reshape(-1, 8)
        return linear_cross_entropy(swiglu(turned, x), weight, labels)


class AllOperators(nn.Cell):
    """The loss and its gradient."""

    def __init__(self):
        super().__init__()
        self.gradient = ops.value_and_grad(Loss(), (0, 1))

    def construct(self, x, weight, cos, sin, labels):
        return self.gradient(x, weight, cos, sin, labels)


@pytest.mark.graph
def test_one_graph_serves_every_number_of_tokens_and_agrees_with_pynative():
    def dynamic(*shape, dtype=ms.float32):
        return Tensor(shape=[None, *shape], dtype=dtype)

    cell, eager = AllOperators(), AllOperators()
    cell.set_inputs(dynamic(8), dynamic(8), dynamic(2), dynamic(2), dynamic(dtype=ms.int32))
    weight = Tensor(normal(11, 8), ms.float32)
    batches = []
    for tokens in (7, 12):
        angles = np.outer(np.arange(tokens), [1.0, 0.3])
        arrays = (normal(tokens, 8), np.cos(angles), np.sin(angles))
        x, cos, sin = (Tensor(array, ms.float32) for array in arrays)
        batches.append((x, weight, cos, sin, Tensor(np.arange(tokens) % 11, ms.int32)))
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        compiled = [cell(*batch) for batch in batches]
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert len(cell.compile_cache) == 1
    for (loss, gradients), batch in zip(compiled, batches, strict=True):
        expected_loss, expected = eager(*batch)
        assert_close(loss.asnumpy(), expected_loss.asnumpy(), TOLERANCE[np.float32])
        for actual, reference in zip(gradients, expected, strict=True):
            assert_close(actual.asnumpy(), reference.asnumpy(), TOLERANCE[np.float32])


ADAMW_SHAPES = [(1,), (3, 7), (2, 129, 64)]  # less than a vector, an odd rest, more than a thread takes at once


def optimizer_state(shape):
    """Weight, m, v and gradient."""
    values = [normal(*shape, seed=i).astype(np.float32) for i in range(4)]
    return [values[0], values[1], np.abs(values[2]), values[3]]


@pytest.mark.parametrize("shape", ADAMW_SHAPES)
def test_adamw_updates_in_place_and_takes_the_gradient(shape):
    state = optimizer_state(shape)
    parameters = [Parameter(Tensor(value), name=f"p{i}") for i, value in enumerate(state)]
    factors = tuple(Tensor(value, ms.float32) for value in (0.01, 1e-6, 2.0, 0.5))
    adamw(*parameters, (0.9, 0.95, 0.1), factors, Tensor(0.0, ms.float32))
    weight, m, v, gradient = (value.astype(np.float64) for value in state)
    m, v = 0.9 * m + 0.1 * 0.5 * gradient, 0.95 * v + 0.05 * (0.5 * gradient) ** 2
    expected = [weight - 0.01 * (m / (np.sqrt(v) + 1e-6) + 0.1 * 2.0 * weight), m, v, np.zeros(shape)]
    for parameter, value in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.asnumpy(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ADAMW_SHAPES)
def test_square_sum_matches_plain_numpy_and_lets_nan_through(shape):
    values = normal(*shape).astype(np.float32)
    assert float(square_sum(Tensor(values)).asnumpy()) == pytest.approx(
        (values.astype(np.float64) ** 2).sum(), rel=1e-5
    )
    values.reshape(-1)[-1] = np.nan
    assert np.isnan(float(square_sum(Tensor(values)).asnumpy()))


def optimizer_run(mode):
    """Weights, moments and gradients after four steps, the second of them with an infinite gradient; the norms."""
    weights = ParameterTuple([Parameter(Tensor(normal(*s).astype(np.float32)), name=f"w{s}") for s in ADAMW_SHAPES])
    accumulated = weights.clone("accumulated", init="zeros")
    apply = ApplyGradients(weights, accumulated, TrainConfig(steps=4, learning_rate=0.01, weight_decay=0.1))
    norms = []
    ms.set_context(mode=mode)
    try:
        for step in range(4):
            for gradient in accumulated:
                values = normal(*gradient.shape, seed=step).astype(np.float32)
                ops.assign(gradient, Tensor(np.full_like(values, np.inf) if step == 1 else values))
            norms.append(apply(*(Tensor(x, ms.float32) for x in (0.01, 3.0, 1.0, 0.0)))[0].asnumpy())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    return [norms, *(p.asnumpy() for p in (*weights, *apply.adam_m, *apply.adam_v, *accumulated))]


@pytest.mark.graph
def test_a_graph_reads_and_writes_optimizer_state_in_the_order_that_pynative_does():
    for one, other in zip(optimizer_run(ms.PYNATIVE_MODE), optimizer_run(ms.GRAPH_MODE), strict=True):
        np.testing.assert_array_equal(one, other)
