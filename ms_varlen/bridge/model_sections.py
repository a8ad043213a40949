"""A decoder of ours as the `model` section of a MindFormers YAML."""

from typing import Any, Literal

from ms_varlen.models.config import DecoderConfig

Family = Literal["qwen3", "llama"]


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
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
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
        "type": "LlamaConfig",
        "batch_size": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_has_bias": config.attention_bias,
        "initializer_range": config.initializer_range,
        "seq_length": row_length,
        "max_position_embedding": row_length,
        "pad_token_id": pad_id,
        "ignore_token_id": -100,
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
