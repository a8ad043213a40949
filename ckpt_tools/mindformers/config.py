"""The `model` section of a MindFormers YAML as a `DecoderConfig`, and back."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ckpt_tools.mindformers.names import ModelClass, WeightLayout
from ms_varlen.bridge.model_sections import LLAMA_NAMES, QWEN3_NAMES, llama_decoder, qwen3_decoder
from ms_varlen.errors import CheckpointError
from ms_varlen.faults import field_faults
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import load_config
from ms_varlen.recipe.recipe import load_recipe

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LLAMA_DEFAULTS = {  # of LlamaConfig in mindformers 1.9, where ours are others
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA_BIASES = ("qkv_has_bias", "attn_proj_has_bias")


def read_config(path: Path) -> tuple[DecoderConfig, WeightLayout | None]:
    """A decoder, and where MindFormers has its weights if the file says so.

    Args:
        path: a `config.json` or its folder, a MindFormers YAML, or a recipe of ours.
    Raises:
        CheckpointError: a YAML that is neither; RecipeError: what the file's own reader finds.
    """
    if path.is_dir() or path.suffix == ".json":
        return load_config(path), None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--config must be a config.json, a YAML or a folder, got {path} ({error})") from error
    model = values.get("model") if isinstance(values, dict) else None
    section = model.get("model_config") if isinstance(model, dict) else None
    if isinstance(section, dict):
        return _from_mindformers(path, section)
    config = load_recipe(path).model.config
    if config.vocab_size is None:
        raise CheckpointError(f"{path}: model.config.vocab_size must be given to read weights, found none; add it")
    return config, None


def _from_mindformers(path: Path, section: dict[str, Any]) -> tuple[DecoderConfig, WeightLayout]:
    legacy = "num_layers" in section or section.get("type") == "LlamaConfig"
    try:
        fields = _llama_fields(section) if legacy else _qwen3_fields(section)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: model.model_config.{error}") from error
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # no scaling_factor, a word for a number
        raise CheckpointError(
            f"{path}: model.model_config must be that of a training of MindFormers, got {error!r} from it; give the "
            "training's own YAML"
        ) from error
    layout = WeightLayout(
        "llama" if legacy else "qwen3",
        bool(section.get("qkv_concat")) if legacy else True,
        "contiguous" if section.get("use_contiguous_weight_layout_attention") else "interleaved",
        "interleaved" if section.get("use_interleaved_weight_layout_mlp", True) else "contiguous",
    )
    try:
        return DecoderConfig.model_validate({"architecture": "qwen3", **fields}), layout
    except ValidationError as error:
        fault = field_faults(error, DecoderConfig)[0]
        raise CheckpointError(f"{path}: model.model_config gives no decoder: {fault}") from error


def _qwen3_fields(section: dict[str, Any]) -> dict[str, Any]:
    kind, scaling = section.get("position_embedding_type") or "rope", section.get("rope_scaling")
    if kind != "rope" or scaling is not None:
        raise CheckpointError(
            f"position_embedding_type and rope_scaling of a Qwen3 must be rope and null, got {kind} and {scaling}; no "
            "other is computed here"
        )
    return {name: section[name] for name in (*QWEN3_NAMES, "max_position_embeddings") if name in section}


def _llama_fields(section: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        ours: section.get(name, _LLAMA_DEFAULTS.get(name))
        for name, ours in LLAMA_NAMES.items()
        if name not in _LLAMA_BIASES
    }
    qkv, output = (section.get(name, False) for name in _LLAMA_BIASES)
    fields |= {"architecture": "qwen2" if qkv and not output else "llama", "attention_bias": qkv}
    fields["max_position_embeddings"] = section.get("max_position_embedding")
    inner = section.get("intermediate_size")
    if inner is None:  # as LlamaFeedForward counts it
        inner, multiple = 4 * int(fields["hidden_size"]), section.get("multiple_of", 256)
        if section.get("ffn_dim_multiplier") is not None:
            inner = int((section["ffn_dim_multiplier"] + 0.01) * inner)
        inner = -(-int(2 * inner / 3) // multiple) * multiple
    fields["intermediate_size"] = inner
    method = str(section.get("extend_method", "None")).upper()
    if method in ("LINEAR", "LLAMA3"):
        fields["rope_scaling"] = {"rope_type": method.lower(), **section["scaling_factor"]}
    elif method != "NONE":
        raise CheckpointError(f"extend_method must be None, LINEAR or LLAMA3, got {method}; no other is computed here")
    return fields


def mindformers_section(config: DecoderConfig, layout: WeightLayout, seq_length: int) -> dict[str, Any]:
    """The `model` section of a MindFormers YAML that builds the same decoder with its weights in this layout.

    Raises:
        CheckpointError: rotary angles that the class does not compute.
    """
    positions = config.max_position_embeddings or seq_length
    if layout.model == "qwen3":
        section = {**qwen3_decoder(config), "max_position_embeddings": positions, "seq_length": seq_length}
        section["use_contiguous_weight_layout_attention"] = layout.qkv == "contiguous"
        section["use_interleaved_weight_layout_mlp"] = layout.mlp == "interleaved"
        return {"model_config": section}
    section = {**llama_decoder(config), "max_position_embedding": positions, "seq_length": seq_length}
    section["qkv_concat"] = layout.fused
    return {"arch": {"type": CLASSES["llama"]}, "model_config": section}


def default_class(config: DecoderConfig) -> ModelClass:
    """The MindFormers class of a family: Qwen3's where queries and keys are normalised, else the legacy Llama."""
    return "qwen3" if config.qk_norm else "llama"
