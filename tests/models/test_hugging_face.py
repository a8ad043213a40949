"""Reading and writing `config.json`, without transformers."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from ms_varlen.errors import RecipeError
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import hugging_face_config, load_config
from ms_varlen.models.rope import RopeScaling, rotary_frequencies
from ms_varlen.recipe.recipe import parse_recipe, recipe_schema

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False, "sliding_window": None, **SMALL}


@pytest.fixture
def folder(tmp_path):
    """Writes a `config.json` and gives its folder; a value of `...` takes a key out."""

    def write(values, **changes):
        values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def recipe_with(config, seq_length=64, **model):
    return {
        "data": {"source": "pydoc", "tokenizer": "bytes"},
        "batch": {"token_budget": 8192},
        "model": {
            "config": str(config),
            "variable_seq_lengths": True,
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
            **model,
        },
        "train": {"steps": 1, "learning_rate": 1e-3},
        "checkpoint": {"output_dir": "output"},
    }


def faults_of(recipe):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe)
    return caught.value.faults


def test_llama_3_1_is_read_whole(folder):
    config = load_config(folder(LLAMA_3_1))
    assert config == DecoderConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(rope_type="llama3", **LLAMA3),
        max_position_embeddings=131072,
    )
    assert config.parameter_count() == 8_030_261_248  # as published


def test_the_file_may_be_named_instead_of_its_folder(folder):
    assert load_config(folder(QWEN3) / "config.json") == load_config(folder(QWEN3))


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("llama", {"num_key_value_heads": ...}, (False, False, False, False)),
        ("mistral", {"attention_bias": True}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {"head_dim": 16}, (False, False, False, True)),
    ],
)
def test_the_family_decides_biases_and_norms_as_in_transformers(folder, family, changes, expected):
    config = load_config(folder(SMALL, model_type=family, **changes))
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_old_and_new_spellings_of_the_rotary_settings_are_one(folder, keys):
    config = load_config(folder(SMALL, model_type="llama", **keys))
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(rope_type="llama3", **LLAMA3))


def test_rotary_settings_that_scale_nothing_are_none(folder):
    for keys in ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}):
        assert load_config(folder(SMALL, model_type="llama", **keys)).rope_scaling is None


def test_llama3_keeps_fast_frequencies_divides_slow_ones_and_blends_between():
    plain, scaled = (
        rotary_frequencies(5e5, 128, scaling) for scaling in (None, RopeScaling(rope_type="llama3", **LLAMA3))
    )
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-15)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))
    assert np.all(np.diff(scaled) < 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor must be given with rope_type llama3, got None"),
        ({"rope_type": "linear", **LLAMA3}, "low_freq_factor must be left out with rope_type linear, got 1.0"),
        (
            {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
            r"low_freq_factor must be < high_freq_factor \(1.0\)",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, "'linear' or 'llama3'"),
    ],
)
def test_a_wrong_scaling_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        RopeScaling(**fields)


REFUSED = [
    ({"num_local_experts": 8}, "num_local_experts", "must be absent (no mixture of experts), got 8"),
    ({"model_type": "qwen3_moe"}, "model_type", "must be absent (no mixture of experts), got 'qwen3_moe'"),
    ({"model_type": "gemma2"}, "model_type", "must be one of llama, mistral, qwen2, qwen3, got 'gemma2'"),
    ({"model_type": ...}, "model_type", "must be one of llama, mistral, qwen2, qwen3, got no such key"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling.rope_type",
        "must be default, linear or llama3",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type", "got 'dynamic'"),
    (
        {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}},
        "rope_scaling.type",
        "must be left out or say what rope_type says ('llama3'), got 'linear'; remove the one",
    ),
    (
        {"rope_scaling": {"type": "linear"}},
        "rope_scaling.factor",
        "must be given with rope_type linear, got no such key",
    ),
    (
        {"rope_parameters": {"full_attention": {}, "rope_type": "proportional"}},
        "rope_parameters.rope_type",
        "got 'prop",
    ),
    ({"attention_dropout": 0.1}, "attention_dropout", "must be 0, got 0.1"),
    ({"hidden_act": "gelu"}, "hidden_act", 'must be "silu", got "gelu"'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1, got 0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config", 'must be null, got {"bits": 4}'),
    ({"layer_types": ["linear_attention"]}, "layer_types", 'got "linear_attention"'),
    ({"layer_types": ["full_attention"]}, "layer_types", "for each of the 2 layers (num_hidden_layers), got 1"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "must be null, got 30.0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "must be null, got 50.0"),
    ({"logits_scaling": 8.0}, "logits_scaling", "must be 1, got 8.0"),
    ({"logit_scale": 0.0625}, "logit_scale", "must be 1, got 0.0625"),
    ({"residual_multiplier": 0.22}, "residual_multiplier", "must be 1, got 0.22"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier", "must be 1, got 12.0"),
    ({"attention_multiplier": 1.0}, "attention_multiplier", "must be 1 / sqrt(head_dim) (0.25), got 1.0"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size", "must be null, got 8192"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers", "must be 1 for every layer, got [1, 0]"),
    ({"use_qk_norm": False}, "use_qk_norm", "must be true in a qwen3 model, got false"),
    ({"model_type": "llama", "use_qk_norm": True}, "use_qk_norm", "must be false in a llama model, got true"),
    (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        "architectures",
        'must be ["Qwen3ForCausalLM"], got ["Qwen3ForSequenceClassification"]',
    ),
    (
        {"model_type": "llama", "architectures": ["MixtralForCausalLM"]},
        "architectures",
        'must be ["LlamaForCausalLM"], got ["MixtralForCausalLM"]',
    ),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}, "auto_map", "got AutoModelForCausalLM"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "rope_parameters",
        "must hold one setting for all layers (no others by kind of layer), got full_attention, sliding_attention",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", "got 0.5"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type", "must be given beside factor, got no such key"),
    (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
        'must be left out or say what rope_parameters says, got {"rope_type": "linear", "factor": 2.0}',
    ),
    ({"rope_scaling": ["linear"]}, "rope_scaling", 'must be a mapping or null, got ["linear"]'),
    ({"vocab_size": ...}, "vocab_size", "must be in the file of a qwen3 model, got no such key"),
    ({"head_dim": ...}, "head_dim", "must be in the file of a qwen3 model, got no such key"),
    ({"hidden_size": "many"}, "hidden_size", "must be a whole number > 0"),
]


@pytest.mark.parametrize(("changes", "key", "text"), REFUSED, ids=[f"{key}: {text[:40]}" for _, key, text in REFUSED])
def test_what_we_do_not_compute_is_refused_by_name(folder, changes, key, text):
    where = folder(QWEN3, **changes)
    (fault,) = faults_of(recipe_with(where))
    assert fault.startswith(f"model.config.{key}: ")
    assert text in fault
    with pytest.raises(RecipeError, match=f"{key.split('.')[0]}"):
        load_config(where)


def test_keys_of_other_nets_may_have_the_values_that_change_nothing(folder):
    neutral = {
        "architectures": ["Qwen3ForCausalLM"],
        "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]},
        "final_logit_softcapping": None,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "embedding_multiplier": 1,
        "attention_multiplier": 0.25,  # 1 / sqrt(16)
        "attention_chunk_size": None,
        "no_rope_layers": [1, 1],
        "use_qk_norm": True,
        "layer_types": ["full_attention", "full_attention"],
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
    assert load_config(folder(QWEN3, **neutral)) == load_config(folder(QWEN3))


def test_a_wrong_value_is_reported_with_rule_and_value_as_a_recipe_reports_it(folder):
    where = folder(SMALL, model_type="llama", num_key_value_heads=3, hidden_size="64", rms_norm_eps=0)
    with pytest.raises(RecipeError) as caught:
        load_config(where)
    faults = caught.value.faults
    assert faults == [
        'hidden_size: must be a whole number > 0, got "64"; change it (width of the residual stream)',
        "num_key_value_heads: must divide num_attention_heads (4), got 3; each key head serves a whole number of query "
        "heads",
        "rms_norm_eps: must be a number > 0, got 0; change it (term against division by zero in RMSNorm)",
    ]
    assert [f"model.config.{fault}" for fault in faults] == faults_of(recipe_with(where))


def test_all_faults_of_a_file_are_reported_at_once_and_with_those_of_the_recipe(folder):
    recipe = recipe_with(folder(QWEN3, hidden_act="relu", attention_dropout=0.5, vocab_size=...), learning_rate=1)
    faults = faults_of(recipe)
    assert [fault.partition(":")[0] for fault in faults] == [
        "model.config.vocab_size",
        "model.config.hidden_act",
        "model.config.attention_dropout",
        "model.learning_rate",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "path of a config.json or of its folder, got .*No such file"),
        ("{", "must name a file of JSON, got Expecting"),
        ("[1]", "must name a file with a JSON object, got list"),
    ],
)
def test_a_file_that_is_no_config_is_one_fault(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe(recipe_with(tmp_path / "config.json"))
    assert len(caught.value.faults) == 1
    with pytest.raises(RecipeError, match=message):
        load_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("family", "changes", "longest"),
    [
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": None}, 512),
        ("mistral", {"max_position_embeddings": 32768}, 4096),  # an absent window is 4096 to transformers' Mistral
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, 512),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, 512),  # max_window_layers is 28 to transformers
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 128),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 512),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 512),
    ],
)
def test_a_sequence_may_be_as_long_as_window_and_positions_and_no_longer(folder, family, changes, longest):
    where = folder(SMALL, model_type=family, **changes)
    recipe = parse_recipe(recipe_with(where, longest))
    assert recipe.model.config.max_position_embeddings == changes.get("max_position_embeddings", 512)
    (fault,) = faults_of(recipe_with(where, 2 * longest))
    limit = "max_position_embeddings" if longest == 512 else "sliding_window"
    assert fault.startswith(f"model.seq_length: must be <= model.config.{limit} ({longest}")


def test_a_recipe_holds_the_fields_of_the_file_it_named(folder):
    recipe = parse_recipe(recipe_with(folder(LLAMA_3_1)))
    assert parse_recipe(recipe.resolved()) == recipe
    assert recipe.resolved()["model"]["config"]["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}


def test_a_fault_below_the_scaling_of_a_written_config_has_its_path():
    config = {"hidden_size": 64, "rope_scaling": {"rope_type": "linear", "factor": "big"}}
    assert faults_of(recipe_with("") | {"model": recipe_with("")["model"] | {"config": config}}) == [
        'model.config.rope_scaling.factor: must be a number >= 1, got "big"; change it'
    ]


def test_weights_that_are_not_there_are_a_fault_of_the_recipe(folder):
    (fault,) = faults_of(recipe_with(folder(QWEN3), init_from="no/such/folder"))
    assert fault.startswith(
        "model.init_from: must be an existing folder of safetensors files or null, got no/such/folder"
    )


def test_the_schema_lets_editors_write_a_path_for_the_config():
    config = recipe_schema()["$defs"]["ModelConfig"]["properties"]["config"]
    assert config["anyOf"] == [{"$ref": "#/$defs/DecoderConfig"}, {"type": "string"}]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_written_config_is_read_back_equal(tmp_path, family):
    scaling = RopeScaling(rope_type="llama3", **LLAMA3)
    config = DecoderConfig(
        architecture=family,
        hidden_size=64,
        vocab_size=300,
        rope_scaling=scaling,
        max_position_embeddings=131072,
        sliding_window=8192 if family == "mistral" else None,
        tie_word_embeddings=True,
    )
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(config, max_position_embeddings=512)))
    assert load_config(tmp_path) == config


def test_a_model_without_a_limit_of_its_own_is_written_with_that_of_the_run():
    config = DecoderConfig(hidden_size=64, vocab_size=300)
    assert hugging_face_config(config, max_position_embeddings=512)["max_position_embeddings"] == 512
