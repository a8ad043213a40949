import pytest
from pydantic import ValidationError

from ms_varlen.errors import RecipeError
from ms_varlen.models.config import DecoderConfig, ModelConfig


def test_hidden_size_alone_gives_a_whole_decoder():
    assert DecoderConfig(hidden_size=256).model_dump() == {
        "architecture": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 688,
        "vocab_size": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "max_position_embeddings": None,
        "sliding_window": None,
    }


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "output_bias", "qk_norm"),
    [("llama", False, False, False), ("qwen2", True, False, False), ("qwen3", False, False, True)],
)
def test_architecture_decides_biases_and_head_norms(architecture, attention_bias, output_bias, qk_norm):
    config = DecoderConfig(architecture=architecture, hidden_size=64)
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == (
        attention_bias,
        output_bias,
        qk_norm,
    )


def test_a_given_attention_bias_reaches_the_output_projection_except_in_qwen2():
    given = {name: DecoderConfig(architecture=name, hidden_size=64, attention_bias=True) for name in ("llama", "qwen2")}
    assert (given["llama"].attention_output_bias, given["qwen2"].attention_output_bias) == (True, False)


def test_a_given_head_dim_is_free_of_the_hidden_size():
    config = DecoderConfig(hidden_size=10, num_attention_heads=3, head_dim=8)
    assert (config.head_dim, config.num_key_value_heads) == (8, 3)


@pytest.mark.parametrize(
    ("fields", "where", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ("num_key_value_heads",), r"divide .* \(4\), got 3"),
        ({"head_dim": 7}, ("head_dim",), "must be even .* got 7"),
        (
            {"num_attention_heads": 5},
            ("head_dim",),
            r"hidden_size must be a multiple of num_attention_heads \(5\), got 64",
        ),
        ({"num_hidden_layers": 0}, ("num_hidden_layers",), "greater than 0"),
        ({"hidden_size": 0}, ("hidden_size",), "greater than 0"),
        ({"num_attention_heads": "many"}, ("num_attention_heads",), "valid integer"),
        ({"architecture": "gpt2"}, ("architecture",), "'llama', 'mistral', 'qwen2' or 'qwen3'"),
        ({"hidden": 3}, ("hidden",), "not permitted"),
    ],
)
def test_a_wrong_decoder_is_refused_at_its_field(fields, where, message):
    with pytest.raises(ValidationError, match=message) as caught:
        DecoderConfig(**{"hidden_size": 64} | fields)
    assert [fault["loc"] for fault in caught.value.errors()] == [where]


def test_null_means_the_default_as_in_hugging_face_files():
    config = DecoderConfig(hidden_size=128, num_attention_heads=8, num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (8, 16)


def test_a_config_survives_its_own_dump():
    config = DecoderConfig(architecture="qwen3", hidden_size=128, head_dim=32)
    assert DecoderConfig.model_validate(config.model_dump(mode="json")) == config


def test_two_faults_are_reported_at_once():
    with pytest.raises(ValidationError) as caught:
        DecoderConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=3, head_dim=7)
    assert [fault["loc"] for fault in caught.value.errors()] == [("num_key_value_heads",), ("head_dim",)]


def test_vocabulary_comes_from_the_tokenizer_unless_given():
    assert DecoderConfig(hidden_size=64).with_vocab_size(259).vocab_size == 259
    assert DecoderConfig(hidden_size=64, vocab_size=512).with_vocab_size(259).vocab_size == 512
    with pytest.raises(RecipeError, match=r"vocab_size must be >= the tokenizer's size \(259\), got 100"):
        DecoderConfig(hidden_size=64, vocab_size=100).with_vocab_size(259)


def test_parameter_count_of_a_published_model():
    smollm2_135m = DecoderConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    assert smollm2_135m.parameter_count() == 134_515_008


def test_model_section_refuses_attention_dropout_by_name():
    section = {"config": {"hidden_size": 64}, "variable_seq_lengths": True}
    section |= {"seq_length": 128, "max_position_embeddings": 128}
    assert ModelConfig(**section).recompute is False
    with pytest.raises(ValidationError, match=r"attention_dropout must be 0\.0, got 0\.1"):
        ModelConfig(**section, attention_dropout=0.1)
