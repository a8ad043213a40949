"""Helpers of the bridge tests: a small corpus, the loader's keys, the ready recipes and how they were made."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.bridge.recipes import Devices, Family, mindformers_config
from ms_varlen.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
READY: dict[str, tuple[Family, Devices, str]] = {
    "qwen3_cpu.yaml": (
        "qwen3",
        Devices(),
        "model.config.hidden_size=64 model.config.num_hidden_layers=2 batch.token_budget=2048 batch.max_segments=128 "
        "train.steps=20 device.target=CPU checkpoint.output_dir=output/qwen3_cpu model.config.architecture=qwen3",
    ),
    "qwen3_1p.yaml": (
        "qwen3",
        Devices(),
        "model.config.architecture=qwen3 device.target=Ascend checkpoint.output_dir=output/qwen3",
    ),
    "llama_1p.yaml": ("llama", Devices(), "device.target=Ascend checkpoint.output_dir=output/llama"),
    "qwen3_8b_8p.yaml": (
        "qwen3",
        Devices(model_parallel=4, pipeline_stage=2),
        "batch.token_budget=8192 batch.max_segments=128 batch.micro_batches=8 model.seq_length=4096 "
        "model.max_position_embeddings=4096 model.config.architecture=qwen3 model.config.hidden_size=4096 "
        "model.config.num_hidden_layers=36 model.config.num_attention_heads=32 model.config.num_key_value_heads=8 "
        "model.config.head_dim=128 model.config.intermediate_size=12288 model.config.vocab_size=151936 "
        "model.config.rope_theta=1e6 model.recompute=true device.target=Ascend checkpoint.output_dir=output/qwen3_8b",
    ),
}
"""Each file of recipes/mindformers, and how `ms-varlen mindformers-recipe recipes/packed.yaml` made it."""

NO_EVALUATION = ["train.eval_every=null", "data.eval_fraction=0"]


def ready_config(name: str) -> dict[str, Any]:
    """Return a ready recipe, made again."""
    family, devices, overrides = READY[name]
    return mindformers_config(
        load_recipe(ROOT / "recipes" / "packed.yaml", overrides.split() + NO_EVALUATION), family, devices
    )


def write_corpus(folder: Path) -> dict[str, Any]:
    """The `data` section of 96 short texts."""
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(97, 123, int(n)))) for n in random.integers(20, 300, 96)]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(source), "tokenizer": "bytes", "store_dir": str(folder)}


def packed_keys(corpus: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Keys of the loader for packed rows."""
    return {"data": corpus, "seq_length": 2048, "create_compressed_eod_mask": True, **keys}


def padded_keys(corpus: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Keys of the loader for padded rows."""
    return {"data": corpus, "seq_length": 512, "mode": "padded", **keys}


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A configuration with another value at a path."""
    config = copy.deepcopy(config)
    *sections, key = path.split(".")
    place = config
    for name in sections:
        place = place[name]
    place[key] = value
    return config
