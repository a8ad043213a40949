"""Checkpoints for tests/ckpt_tools, written by transformers, by our store, and by NumPy."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from ckpt_tools.cli import main
from ms_varlen.checkpoint.store import save_checkpoint
from ms_varlen.models.config import DecoderConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

TINY = DecoderConfig(
    architecture="llama",
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=34,
)


def transformers_model(family, tied=False, seed=0):
    """A random tiny model of a family; 4 query heads, 2 key heads, biases that are not zero."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=67,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        sliding_window=None,
        rms_norm_eps=1e-6,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def hugging_face_folder(folder, family, tied=False, dtype="float32", shard="5GB"):
    """A folder as transformers saves it, with a tokenizer file."""
    import torch

    model = transformers_model(family, tied).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def tiny_gguf(file):
    """TINY as llama.cpp would write it: fp16 matrices, fp32 norms."""
    import gguf

    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_block_count(TINY.num_hidden_layers)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_attention_heads)
    writer.add_head_count_kv(TINY.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in random_arrays()[0].items():
        layer, stem = "", name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        writer.add_tensor(f"{layer}{parts[stem]}.weight", value.astype(np.float16) if value.ndim == 2 else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_arrays(config=TINY, step=30, seed=0):
    """Weights, moments and the counter of a decoder."""
    rng = np.random.default_rng(seed)
    shapes = config.parameter_shapes()
    model = {name: np.float32(0.3) * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    optimizer = {"applied_steps": np.array(step, np.int64)}
    for prefix in ("adam_m", "adam_v"):
        optimizer |= {f"{prefix}.{name}": rng.random(shape, np.float32) for name, shape in shapes.items()}
    return model, optimizer


def saved_step(run_folder, config=TINY, mode="padded", step=30, seed=0):
    """A checkpoint as training saves it; its path."""
    plan = {"epoch": 0, "step": step, "fingerprint": "f00", "settings": {}, "trained_before": None}
    state = {"plan": plan, "skipped": {"steps": 0, "samples": 0, "tokens": 0}, "seed": 0, "ledger": {}}
    manifest = {
        "mode": mode,
        "layout": mode,
        "shapes": {"kind": "range"},
        "model_config": config.model_dump(mode="json"),
        "seq_length": 64,
        "data_fingerprint": "d00",
        "versions": {},
    }
    return save_checkpoint(run_folder, step, *random_arrays(config, step, seed), state, manifest, keep=9)


def run(capsys, *arguments):
    """Exit status of `ckpt-tools`, the object it printed, and what it said to people."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out.startswith("{") else None, " ".join(err.split())


def tensors(folder):
    """Bits of every tensor below a folder by name."""
    found = {}
    for file in sorted(Path(folder).rglob("*.safetensors")):
        found |= bits(file)
    assert found
    return found


def bits(file):
    """Bits of every tensor of a file by name, whatever its dtype."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def contents(folder):
    """Every file below a folder with its bytes and time of change."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def numbers(file):
    return load_file(file)
