"""A step of a model with more weights than MindSpore nests loops."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor

from ms_varlen.recipe.sections import TrainConfig
from ms_varlen.train.step import ApplyGradients

MANY = 300


@pytest.mark.graph
def test_a_step_over_hundreds_of_weights_compiles_and_moves_each():
    weights, gradients = (
        ParameterTuple([Parameter(Tensor(np.full(2, value, np.float32)), name=f"{prefix}{i}") for i in range(MANY)])
        for prefix, value in (("w", 1.0), ("accumulated.w", 3.0))
    )
    apply = ApplyGradients(weights, gradients, TrainConfig(steps=1, learning_rate=0.1, weight_decay=0.0))
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        norm, applied = apply(*(Tensor(value, ms.float32) for value in (0.1, 3.0, 1.0, 0.0)))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert bool(applied.asnumpy())
    assert float(norm.asnumpy()) == pytest.approx((2 * MANY) ** 0.5, rel=1e-5)
    # AdamW's first step is the learning rate, whatever the gradient.
    np.testing.assert_allclose([weight.asnumpy() for weight in weights], np.full((MANY, 2), 0.9), rtol=1e-5)
    assert all(not gradient.asnumpy().any() for gradient in gradients)
