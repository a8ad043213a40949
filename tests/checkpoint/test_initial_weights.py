"""Weights of safetensors folders and of checkpoints: what is read, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ms_varlen.checkpoint.initial_weights import InitialWeights
from ms_varlen.checkpoint.store import APPLIED_STEPS, save_checkpoint
from ms_varlen.checkpoint.tensors import TensorFolder
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig

CONFIG = DecoderConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=11)
TIED = CONFIG.model_copy(update={"tie_word_embeddings": True})
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def values(config=CONFIG):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in config.parameter_shapes().items()}


def bf16_file(path, tensors):
    """A safetensors file of bfloat16, which its NumPy side cannot write: fp32 with the lower half cut off."""
    header, data = {}, b""
    for name, value in tensors.items():
        bits = (value.view(np.uint32) >> 16).astype("<u2")
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(weights, config=CONFIG):
    return {name: weights.read(name, shape) for name, shape in config.parameter_shapes().items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == np.float32
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_fp32_is_read_unchanged_and_may_be_changed(tmp_path):
    save_file(values(), tmp_path / "model.safetensors")
    actual = read_all(InitialWeights(tmp_path, CONFIG))
    assert_equal(actual, values())
    assert all(value.flags.writeable for value in actual.values())


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_refused_by_name_and_file(tmp_path, wrong):
    tensors = values()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    message = f"model.safetensors: parameter {name} must be finite, the file holds {wrong} at \\[3, 5\\] \\(1 of 96 "
    with pytest.raises(CheckpointError, match=message):
        read_all(InitialWeights(tmp_path, CONFIG))


def test_a_bfloat16_nan_is_refused_too(tmp_path):
    tensors = values()
    tensors["model.norm.weight"][:] = np.nan
    bf16_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model.norm.weight must be finite, .* \(8 of 8 numbers"):
        read_all(InitialWeights(tmp_path, CONFIG))


def test_fp16_is_widened(tmp_path):
    half = {name: value.astype(np.float16) for name, value in values().items()}
    save_file(half, tmp_path / "model.safetensors")
    assert_equal(
        read_all(InitialWeights(tmp_path, CONFIG)), {name: value.astype(np.float32) for name, value in half.items()}
    )


def test_bf16_is_widened_by_its_bits(tmp_path):
    bf16_file(tmp_path / "model.safetensors", values())
    cut = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in values().items()}
    assert_equal(read_all(InitialWeights(tmp_path, CONFIG)), cut)


def sharded(folder, tensors, shards=3):
    places = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_are_read_through_their_index(tmp_path):
    sharded(tmp_path, values())
    assert_equal(read_all(InitialWeights(tmp_path, CONFIG)), values())


def test_the_record_depends_on_the_numbers_alone(tmp_path):
    records = []
    for name, tensors, write in (
        ("whole", values(), lambda folder, tensors: save_file(tensors, folder / "model.safetensors")),
        ("shards", values(), sharded),
        ("other", values() | {HEAD: values()[EMBEDDING]}, sharded),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tensors)
        weights = InitialWeights(tmp_path / name, CONFIG)
        read_all(weights)
        records.append(weights.record())
    assert records[0]["init_from"] == str(tmp_path / "whole")
    assert records[0]["sha256"] == records[1]["sha256"] != records[2]["sha256"]


@pytest.mark.parametrize("present", [False, True])
def test_a_tied_head_may_be_there_or_not(tmp_path, present):
    tensors = values(TIED)
    save_file({**tensors, HEAD: tensors[EMBEDDING]} if present else tensors, tmp_path / "model.safetensors")
    assert_equal(read_all(InitialWeights(tmp_path, TIED), TIED), tensors)


def test_a_tied_head_with_values_of_its_own_is_refused(tmp_path):
    save_file(values(), tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{HEAD} must equal {EMBEDDING} or be absent .* set model.config.tie_word"
    ):
        InitialWeights(tmp_path, TIED)


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_file({**values(), **extra}, tmp_path / "model.safetensors")
    assert_equal(read_all(InitialWeights(tmp_path, CONFIG)), values())


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {NORM: None},
            rf"parameter {NORM} must be \[8\] for this model, the file holds no such parameter \(of the model's 21 ",
        ),
        (
            {NORM: np.ones(9, np.float32)},
            rf"model.safetensors: parameter {NORM} must be \[8\] .*, the file holds \[9\]",
        ),
        (
            {"model.layers.2.mlp.up_proj.weight": np.ones((12, 8), np.float32)},
            r"model.layers.2.mlp.up_proj.weight must be no such parameter for this model, the file holds \[12, 8\] .* "
            r"use the model.config that the weights were made with",
        ),
        ({HEAD: None}, "the file holds no such parameter .* set model.config.tie_word_embeddings to true"),
        ({NORM: np.ones(8, np.float64)}, f"parameter {NORM} must be one of F32, BF16, F16, the file holds F64"),
    ],
)
def test_parameters_that_are_not_the_models_are_named(tmp_path, change, message):
    tensors = {name: value for name, value in {**values(), **change}.items() if value is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        InitialWeights(tmp_path, CONFIG)


def test_what_is_missing_what_has_another_shape_and_what_is_too_much_are_counted_apart(tmp_path):
    tensors = {name.removeprefix("model."): value for name, value in values().items()}
    save_file({**tensors, HEAD: np.ones((3, 8), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match="of the model's 21 parameters 20 are not in the file and 1 have another shape there; 20 in the file are "
        "none of the model's",
    ):
        InitialWeights(tmp_path, CONFIG)


def test_files_that_are_missing_or_cut_short_are_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"must hold model.safetensors or model.safetensors.index.json, found nothing"
    ):
        TensorFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin; .* saved as safetensors"):
        TensorFolder(tmp_path)
    places = sharded(tmp_path, values())
    content = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match=r"model-1.safetensors is cut short: parameter .* ends at byte"):
        TensorFolder(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.safetensors is missing"):
        TensorFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**places, "more": "model-0.safetensors"}}))
    (tmp_path / "model-1.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-0.safetensors must hold parameter more"):
        TensorFolder(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a JSON object with a weight_map"):
        TensorFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"more": 7}}))
    with pytest.raises(CheckpointError, match=r"index.json must name a file for parameter more, got 7; bring it again"):
        TensorFolder(tmp_path)
    (tmp_path / "folder").mkdir()
    index.write_text(json.dumps({"weight_map": {"more": "folder"}}))
    with pytest.raises(CheckpointError, match=r"folder must be a file that can be read, got .*; bring it again"):
        TensorFolder(tmp_path)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of another mode."""
    model = values()
    moments = {f"{prefix}.{name}": np.zeros_like(v) for prefix in ("adam_m", "adam_v") for name, v in model.items()}
    optimizer = {**moments, APPLIED_STEPS: np.array(7, np.int64)}
    return save_checkpoint(tmp_path / "packed", 7, model, optimizer, {}, {"mode": "packed"}, keep=1)


def test_a_checkpoint_of_any_mode_gives_its_weights(checkpoint):
    assert_equal(read_all(InitialWeights(checkpoint, CONFIG)), values())


def test_an_altered_checkpoint_is_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is altered: the checksum of parameter .* does not fit"):
        read_all(InitialWeights(checkpoint, CONFIG))


def test_a_run_folder_names_its_newest_checkpoint(checkpoint):
    with pytest.raises(CheckpointError, match=r"got the run folder .*; use model.init_from=.*/step_00000007"):
        InitialWeights(checkpoint.parent, CONFIG)
