"""The `model` section of a MindFormers YAML as a `DecoderConfig`, and back."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ckpt_tools.mindformers_names import ModelClass, WeightLayout
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import hugging_face_config, load_config
from ms_varlen.train.recipe import load_recipe
from ms_varlen.train.recipe_faults import field_faults

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LLAMA = {  # LlamaConfig of mindformers 1.9: its name -> ours, and its default where ours is another
    "hidden_size": ("hidden_size", 4096),
    "num_layers": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "vocab_size": ("vocab_size", 32000),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "theta": ("rope_theta", 10000.0),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "max_position_embedding": ("max_position_embeddings", None),
}
_QWEN3 = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
    *("max_position_embeddings", "attention_bias"),
)


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
    fields = _llama_fields(section) if legacy else {name: section[name] for name in _QWEN3 if name in section}
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


def _llama_fields(section: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {ours: section.get(name, default) for name, (ours, default) in _LLAMA.items()}
    qkv, output = section.get("qkv_has_bias", False), section.get("attn_proj_has_bias", False)
    fields |= {"architecture": "qwen2" if qkv and not output else "llama", "attention_bias": qkv}
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
    """The `model` section of a MindFormers YAML that builds the same decoder with its weights in this layout."""
    section: dict[str, Any]
    if layout.model == "qwen3":
        found = hugging_face_config(config, seq_length)
        section = {"model_type": "qwen3", **{name: found[name] for name in _QWEN3}, "seq_length": seq_length}
        section["use_contiguous_weight_layout_attention"] = layout.qkv == "contiguous"
        section["use_interleaved_weight_layout_mlp"] = layout.mlp == "interleaved"
        return {"model_config": section}
    values = config.model_dump()
    section = {"type": "LlamaConfig", **{name: values[ours] for name, (ours, _) in _LLAMA.items()}}
    section |= {
        "intermediate_size": config.intermediate_size,
        "max_position_embedding": config.max_position_embeddings or seq_length,
        "seq_length": seq_length,
        "qkv_has_bias": config.attention_bias,
        "attn_proj_has_bias": config.attention_output_bias,
        "qkv_concat": layout.fused,
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump(exclude_none=True)
        section["extend_method"] = scaling.pop("rope_type").upper()
        section["scaling_factor"] = scaling
    return {"arch": {"type": CLASSES["llama"]}, "model_config": section}


def default_class(config: DecoderConfig) -> ModelClass:
    """The MindFormers class of a family: Qwen3's where queries and keys are normalised, else the legacy Llama."""
    return "qwen3" if config.qk_norm else "llama"
