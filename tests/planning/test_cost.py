import dataclasses

import numpy as np
import pytest

from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.cost import TOKENS, CostModel

GROUPED = DecoderConfig(
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=10,
    vocab_size=100,
)


def test_cost_is_the_hand_count_of_a_decoder_with_grouped_key_heads():
    # Multiply-adds of one token, forward: q 8*24, k and v 8*12 each, o 24*8, MLP 3*8*10, in 2 layers; output 8*100.
    per_token = 2 * (192 + 96 + 96 + 192 + 240) + 800
    # Of one pair of query and key: 4 heads of 6, once for the score and once for the value, in 2 layers.
    per_pair = 2 * 2 * 4 * 6
    tokens = 10
    # Two FLOPs each; backward is twice forward; half of the pairs are causal.
    expected = 3 * 2 * (per_token * tokens + per_pair * tokens * tokens / 2)
    assert CostModel.of_decoder(GROUPED).cost(np.array([tokens])).tolist() == [expected]


def test_a_decoder_of_usual_shape_costs_s_plus_s_squared_over_12_hidden_sizes():
    hidden = 4096
    sizes = DecoderConfig(hidden_size=hidden, intermediate_size=hidden * 8 // 3, vocab_size=1)
    model = CostModel.of_decoder(sizes)
    assert model.quadratic / model.linear == pytest.approx(1 / (12 * hidden), rel=1e-3)


def test_tied_embeddings_cost_the_same():
    tied = GROUPED.model_copy(update={"tie_word_embeddings": True})
    assert CostModel.of_decoder(tied) == CostModel.of_decoder(GROUPED)


def test_linear_work_is_six_flops_for_each_weight_of_a_product():
    products = GROUPED.parameter_count() - 100 * 8 - (2 * 2 + 1) * 8  # without embedding and norms
    assert CostModel.of_decoder(GROUPED).linear == 6 * products


def test_padded_rows_cost_what_whole_rows_cost():
    model = CostModel(linear=3.0, quadratic=0.5)
    assert model.padded(7, 64) == model.cost(np.full(7, 64)).sum()


def test_cost_of_long_int32_lengths_does_not_overflow():
    assert CostModel(0.0, 1.0).cost(np.array([100_000], np.int32)).tolist() == [1e10]


def test_tokens_count_tokens_and_the_model_is_frozen():
    assert TOKENS.cost(np.array([1, 5])).tolist() == [1.0, 5.0]
    with pytest.raises(dataclasses.FrozenInstanceError, match="linear"):
        TOKENS.linear = 2.0
