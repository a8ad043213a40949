"""A GGUF file as a Hugging Face folder, on a tiny model that is written as llama.cpp writes it."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from ckpt_tools.gguf import gguf_tokenizer, import_gguf, open_gguf
from ms_varlen.checkpoint.initial_weights import InitialWeights
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import load_config
from ms_varlen.recipe.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

CONFIG = DecoderConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=272,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def weights(config=CONFIG):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in config.parameter_shapes().items()}


def gguf_name(name):
    layer, stem = "", name
    if name.startswith("model.layers."):
        _, _, number, stem = name.split(".", 3)
        layer = f"blk.{number}."
    part, kind = stem.rsplit(".", 1)
    return f"{layer}{PARTS[part]}.{kind}"


def as_llama_cpp_orders(name, value, config):
    """Rows of q and k so that the two parts of a rotary pair are neighbours: `permute` of convert_hf_to_gguf.py."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name and config.architecture == "llama":
            halves = value.reshape(count, 2, value.shape[0] // count // 2, *value.shape[1:])
            return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def byte_letters():
    """The letter that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def vocabulary():
    letters = byte_letters()
    merges = ["t h", "th e", "Ġ the", "1 2", "i n"]
    tokens = ["<|end|>", "<|user|>", *letters.values(), *(merge.replace(" ", "") for merge in merges)]
    return [*tokens, *(f"[{i}]" for i in range(CONFIG.vocab_size - len(tokens)))], merges


def write_gguf(path, config=CONFIG, quantise=False, pre="smollm", extra=None, **fields):
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, value in {**weights(config), **(extra or {})}.items():
        ordered = np.ascontiguousarray(as_llama_cpp_orders(name, value, config))
        if quantise and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(ordered, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), ordered)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FAMILIES = {
    "llama": {},
    "llama with biases and a head of its own": {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 6},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "head_dim": 8},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_config_and_weights_come_back_under_their_hugging_face_names(tmp_path, name):
    config = DecoderConfig(**(CONFIG.model_dump(exclude={"attention_bias", "qk_norm"}) | FAMILIES[name]))
    import_gguf(write_gguf(tmp_path / "model.gguf", config), tmp_path / "folder")
    assert load_config(tmp_path / "folder") == config
    read = InitialWeights(tmp_path / "folder", config)
    for key, value in weights(config).items():
        np.testing.assert_array_equal(read.read(key, value.shape), value, err_msg=key)


def test_quantised_weights_are_dequantised(tmp_path):
    tensors = open_gguf(write_gguf(tmp_path / "model.gguf", quantise=True)).model
    for key, value in weights().items():
        # Q8_0: blocks of 32 share a scale, the largest number / 127, in half precision.
        bound = 0.0 if value.ndim == 1 else np.abs(value).max() / 127
        assert np.abs(tensors[key].read() - value).max() <= bound, key


def test_the_tokenizer_splits_digits_merges_and_knows_its_special_tokens(tmp_path):
    import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "folder")
    tokenizer = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    text = "<|user|>in the 12°\n<|end|>"
    assert tokenizer.encode(text).tokens == ["<|user|>", "in", "Ġthe", "Ġ", "1", "2", "Â", "°", "Ċ", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads((tmp_path / "folder" / "tokenizer_config.json").read_bytes())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|end|>", "{{ messages }}")


def test_digits_stay_together_where_the_file_says_gpt2(tmp_path):
    contents = gguf_tokenizer(write_gguf(tmp_path / "model.gguf", pre="gpt-2"))
    tokenizer = Tokenizer.from_str(json.dumps(contents["tokenizer.json"]))
    assert tokenizer.encode("a12").tokens == ["a", "12"]


def test_transformers_reads_the_tokenizer_alike(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the test extra brings transformers")
    import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "folder")
    ours = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "folder")
    for text in ("the thin 1212", "<|user|> ünï  \n\n the"):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.eos_token_id == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "llama-bpe"}, "must be gpt2 with pre gpt-2 or smollm .*, got gpt2 with pre llama-bpe; leave it out"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type must be none, got 'yarn'"),
        (
            {"config": CONFIG.model_copy(update={"architecture": "mistral"})},
            "must be one of llama, qwen2, qwen3, got 'mis",
        ),
        ({"extra": {"lm_head.bias": np.ones(272, np.float32)}}, r"parameter lm_head.bias .* is one too many"),
    ],
)
def test_what_has_no_place_here_is_refused_and_nothing_is_left(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        import_gguf(write_gguf(tmp_path / "model.gguf", **changes), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_tokenizer_that_is_refused_can_be_left_out(tmp_path):
    import_gguf(write_gguf(tmp_path / "model.gguf", pre="llama-bpe"), tmp_path / "folder", with_tokenizer=False)
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_a_tensor_without_a_place_and_a_file_that_is_no_gguf_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "lm_head", "rope_freqs")
    path = write_gguf(tmp_path / "model.gguf", extra={"lm_head.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs.weight has no place in the decoder"):
        open_gguf(path)
    (tmp_path / "other.gguf").write_bytes(b"no GGUF" * 10)
    with pytest.raises(CheckpointError, match="must be a GGUF file, which begins with"):
        open_gguf(tmp_path / "other.gguf")


def test_the_smollm2_recipe_reads_such_a_folder(tmp_path, monkeypatch):
    import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "models" / "smollm2")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPES / "smollm2_cpu.yaml")
    assert recipe.model.config == CONFIG
    InitialWeights(recipe.model.init_from, recipe.model.config)


def test_a_folder_that_exists_is_not_written_over(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "folder")
