import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.huggingface import size_in_bytes
from ms_varlen.checkpoint.tensors import cast, from_array
from ms_varlen.errors import CheckpointError
from tests.support import ckpt_made
from tests.support.ckpt_made import FAMILIES, hugging_face_folder, run, saved_step, tensors


def transformers_logits(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_equal_and_transformers_loads_the_export(tmp_path, capsys, family, tied):
    source = hugging_face_folder(tmp_path / "hf", family, tied)
    assert run(capsys, "import-hf", source, tmp_path / "ours", "--json")[0] == 0
    status, said, _ = run(capsys, "export-hf", tmp_path / "ours", tmp_path / "back", "--json")
    assert (status, said["dtype"], said["tied"]) == (0, "float32", tied)
    assert tensors(tmp_path / "back") == tensors(source)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert np.array_equal(transformers_logits(tmp_path / "back", ids), transformers_logits(source, ids))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"version": "1.0"}'


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shards_and_half_precision_come_back_bit_by_bit(tmp_path, capsys, dtype):
    source = hugging_face_folder(tmp_path / "hf", "qwen2", dtype=dtype, shard="10KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    assert run(capsys, "import-hf", source, tmp_path / "ours")[0] == 0
    status, said, _ = run(
        capsys, "export-hf", tmp_path / "ours", tmp_path / "back", "--max-shard-size", "10KB", "--json"
    )
    assert (status, said["dtype"]) == (0, dtype)
    assert said["files"] > 2
    assert tensors(tmp_path / "back") == tensors(source)
    assert np.isfinite(transformers_logits(tmp_path / "back", [1, 2, 3])).all()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors(source).values())
    assert index["weight_map"].keys() == tensors(source).keys()


def test_trained_checkpoint_is_exported_in_any_dtype(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    for dtype, name in (("fp32", "F32"), ("bf16", "BF16"), ("fp16", "F16")):
        assert run(capsys, "export-hf", step, tmp_path / dtype, "--dtype", dtype)[0] == 0
        assert {kind for kind, _, _ in tensors(tmp_path / dtype).values()} == {name}
    expected = ckpt_made.numbers(step / "model.safetensors")
    assert {n: v.tobytes() for n, v in expected.items()} == {
        n: d for n, (_, _, d) in tensors(tmp_path / "fp32").items()
    }
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["max_position_embeddings"] == 64


def test_export_equals_torch_in_bfloat16(tmp_path, capsys):
    import torch

    values = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32).view(np.float32)
    values = np.concatenate([values, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)])
    found = cast(from_array("x", values), "BF16").read()
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    finite = ~np.isnan(values)
    assert np.array_equal(found[finite], expected[finite])
    back = (found[~finite].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(back).all()


@given(st.integers(0, 2**16 - 1))
def test_every_bfloat16_survives_fp32(bits):
    stored = from_array("x", np.array([bits], np.uint16))
    half = cast(cast(stored.__class__("x", "BF16", (1,), "memory", stored.pieces), "F32"), "BF16").read()
    is_signalling_nan = bits & 0x7FFF > 0x7F80 and not bits & 0x40
    assert half[0] == (bits | 0x40 if is_signalling_nan else bits)


def test_buffers_as_long_as_the_context_are_left_out_and_made_again(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    source = hugging_face_folder(tmp_path / "hf", "llama")
    plain = tensors(source)
    arrays = load_file(source / "model.safetensors")
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    arrays["model.layers.0.self_attn.masked_bias"] = np.ones((1, 512), np.float32)
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    _, said, _ = run(capsys, "import-hf", source, tmp_path / "ours", "--json")
    assert said["buffers_left_out"] == [
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    assert run(capsys, "export-hf", tmp_path / "ours", tmp_path / "back")[0] == 0
    assert tensors(tmp_path / "back") == plain
    arrays["transformer.wpe.weight"] = np.ones((512, 32), np.float32)
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    status, _, error = run(capsys, "import-hf", source, tmp_path / "ours2")
    assert status == 1
    assert "parameter transformer.wpe.weight is a learned position table of 512 positions" in error


def test_tied_head_in_the_file_must_be_the_embedding(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    source = hugging_face_folder(tmp_path / "hf", "llama", tied=True)
    arrays = load_file(source / "model.safetensors")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    assert run(capsys, "import-hf", source, tmp_path / "ours")[0] == 0
    arrays["lm_head.weight"][0, 0] += 1
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    status, _, error = run(capsys, "import-hf", source, tmp_path / "ours2")
    assert status == 1
    assert "parameter lm_head.weight must equal model.embed_tokens.weight" in error


def test_index_and_shards_must_agree(tmp_path, capsys):
    source = hugging_face_folder(tmp_path / "hf", "llama", shard="10KB")
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    places = list(values["weight_map"].values())
    name, place = next((n, p) for n, p in values["weight_map"].items() if places.count(p) > 1)
    del values["weight_map"][name]
    index.write_text(json.dumps(values))
    assert f"parameter {name} is one too many" in run(capsys, "import-hf", source, tmp_path / "ours")[2]
    values["weight_map"] |= {name: place, "model.extra.weight": place}
    index.write_text(json.dumps(values))
    assert (
        "parameter model.extra.weight is missing, the index" in run(capsys, "import-hf", source, tmp_path / "ours")[2]
    )
    (source / place).unlink()
    assert f"{place} is missing" in run(capsys, "import-hf", source, tmp_path / "ours")[2]
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("200mb", 2 * 10**8), ("50KB", 50_000)])
def test_sizes_are_read(text, size):
    assert size_in_bytes(text) == size


def test_wrong_size_is_refused():
    with pytest.raises(CheckpointError, match="must be a number and KB, MB or GB, got 5 bananas; write 5GB"):
        size_in_bytes("5 bananas")
