"""A decoder of ours as the `model` section of a MindFormers YAML."""

from typing import Any, Literal

from ms_varlen.errors import CheckpointError
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.models.config import DecoderConfig

Family = Literal["qwen3", "llama"]

QWEN3_NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias"),
)
"""Of the core Qwen3's decoder; ours are the same."""

LLAMA_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "rms_norm_eps": "rms_norm_eps",
    "theta": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings",
    "qkv_has_bias": "attention_bias",
    "attn_proj_has_bias": "attention_output_bias",
}
"""Of the legacy LlamaConfig: its name -> ours."""


def qwen3_decoder(config: DecoderConfig) -> dict[str, Any]:
    """The decoder itself, without its lengths, in the names of MindFormers' core Qwen3.

    Raises:
        CheckpointError: scaled rotary angles, which have no key there.
    """
    if config.rope_scaling is not None:
        raise CheckpointError(
            f"rope_scaling must be null for MindFormers' core Qwen3, got {config.rope_scaling.rope_type}; its rotary "
            "angles would not be scaled: keep the model here, or in Hugging Face's format"
        )
    return {"model_type": "qwen3", **{name: getattr(config, name) for name in QWEN3_NAMES}}


def llama_decoder(config: DecoderConfig) -> dict[str, Any]:
    """The decoder itself, without its lengths, in the names of MindFormers' legacy LlamaConfig."""
    section = {"type": "LlamaConfig", **{name: getattr(config, ours) for name, ours in LLAMA_NAMES.items()}}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump(exclude_none=True)
        section["extend_method"] = scaling.pop("rope_type").upper()
        section["scaling_factor"] = scaling
    return section


def model_section(
    config: DecoderConfig, family: Family, row_length: int, pad_id: int, packed: bool, on_cpu: bool
) -> dict[str, Any]:
    """The section.

    Args:
        config: the decoder, with its vocabulary.
        family: "qwen3" is MindFormers' core model, "llama" its legacy one.
        row_length: tokens of a row.
        pad_id: id that fills rows.
        packed: rows hold several samples, so attention is TND and positions restart.
        on_cpu: compute in fp32, with operators that a CPU has; else in bf16 with MindFormers' fused ones.
    """
    compute = "float32" if on_cpu else "bfloat16"
    if family == "qwen3":
        return {"model_config": _qwen3(config, row_length, pad_id, packed, compute)}
    section = _llama(config, row_length, pad_id, packed, on_cpu, compute)
    return {"arch": {"type": "LlamaForCausalLM"}, "model_config": section}


def _qwen3(config: DecoderConfig, row_length: int, pad_id: int, packed: bool, compute: str) -> dict[str, Any]:
    return {
        **qwen3_decoder(config),
        "architectures": ["Qwen3ForCausalLM"],
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "seq_length": row_length,
        "max_position_embeddings": row_length,
        "position_embedding_type": "rope",
        "pad_token_id": pad_id,
        "use_flash_attention": True,
        "use_eod_attn_mask_compression": packed,
        "use_eod_reset": packed,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": "float32",
        "compute_dtype": compute,
        "layernorm_compute_dtype": "float32",
        "softmax_compute_dtype": "float32",
        "rotary_dtype": "float32",
    }


def _llama(
    config: DecoderConfig, row_length: int, pad_id: int, packed: bool, on_cpu: bool, compute: str
) -> dict[str, Any]:
    return {
        **llama_decoder(config),
        "batch_size": 1,
        "initializer_range": config.initializer_range,
        "seq_length": row_length,
        "max_position_embedding": row_length,
        "pad_token_id": pad_id,
        "ignore_token_id": IGNORE_INDEX,
        "input_sliced_sig": True,
        "use_past": False,
        "use_flash_attention": not on_cpu,
        "use_eod_attn_mask_compression": packed,
        "use_rope_slice": on_cpu,
        "fused_rms_norm": not on_cpu,
        "param_init_type": "float32",
        "compute_dtype": compute,
        "layernorm_compute_type": "float32",
        "softmax_compute_type": "float32",
        "rotary_dtype": "float32",
    }
