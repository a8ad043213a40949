"""What a decoder looks like (`model.config`), and the recipe's `model` section."""

import math
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ms_varlen.errors import RecipeError
from ms_varlen.models.rope import RopeScaling

_STAND_IN = {"architecture": "llama", "hidden_size": 64, "num_attention_heads": 1}
"""For a field that was refused already, so that what derives from it adds no second fault."""


def _default_head_dim(data: dict[str, Any]) -> int:
    size, heads = data["hidden_size"], data["num_attention_heads"]
    if size % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads ({heads}), got {size}; "
            "change one of them or set head_dim"
        )
    return size // heads


_DEFAULTS: dict[str, Callable[[dict[str, Any]], int | bool]] = {
    "num_attention_heads": lambda data: max(1, data["hidden_size"] // 64),
    "num_key_value_heads": lambda data: data["num_attention_heads"],
    "head_dim": _default_head_dim,
    # 8/3 of the hidden size: three matrices then weigh as much as two of 4x.
    "intermediate_size": lambda data: -(-data["hidden_size"] // 6) * 16,
    "attention_bias": lambda data: data["architecture"] == "qwen2",
    "qk_norm": lambda data: data["architecture"] == "qwen3",
}
"""Field -> its default, from the fields declared before it."""


def _derived(description: str, **rules: Any) -> Any:
    return Field(default=None, validate_default=True, description=description, **rules)


class DecoderConfig(BaseModel):
    """One decoder, under the names of a Hugging Face `config.json`.

    `architecture` decides what the other fields default to: qwen2 has biases on q, k and v, qwen3 normalises q and k;
    llama and mistral are the same net. `max_position_embeddings` and `sliding_window` are limits that a pretrained
    model brings along: a recipe's `seq_length` may not exceed them, and nothing else reads them.
    A field that is left out or null, and has its default in `_DEFAULTS`, is derived from the fields above it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"] = Field(
        default="llama", description="family of the net; the defaults of the other keys follow from it"
    )
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    num_hidden_layers: int = Field(default=4, gt=0, description="layers")
    num_attention_heads: int = _derived("query heads; default: hidden_size // 64", gt=0)
    num_key_value_heads: int = _derived(
        "key and value heads, a divisor of num_attention_heads; default: num_attention_heads", gt=0
    )
    head_dim: int = _derived(
        "size of a head, even; on Ascend a multiple of 16, at most 512; default: hidden_size / num_attention_heads",
        gt=0,
    )
    intermediate_size: int = _derived(
        "width inside the SwiGLU block; default: 8/3 of hidden_size, rounded up to a multiple of 16", gt=0
    )
    vocab_size: int | None = Field(
        default=None,
        gt=0,
        description="rows of the embedding, at least as many as the tokenizer has; null: as many",
    )
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="term against division by zero in RMSNorm")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary embedding")
    tie_word_embeddings: bool = Field(default=False, description="the output layer shares the embedding")
    attention_bias: bool = _derived("biases of q, k and v, and of o except in qwen2; default: qwen2 only")
    mlp_bias: bool = Field(default=False, description="biases in the SwiGLU block")
    qk_norm: bool = _derived("RMS norm of each query and key head; default: qwen3 only")
    initializer_range: float = Field(default=0.02, ge=0, description="standard deviation of the initial weights")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="rope_type linear or llama3, and its factors; null: no scaling"
    )
    max_position_embeddings: int | None = Field(
        default=None, gt=0, description="a pretrained model's own limit of positions, which seq_length may not exceed"
    )
    sliding_window: int | None = Field(
        default=None, gt=0, description="a pretrained model's own attention window: seq_length may not exceed it"
    )

    @field_validator(*_DEFAULTS, mode="before")
    @classmethod
    def _derive(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return _DEFAULTS[info.field_name](_STAND_IN | info.data) if value is None else value

    @field_validator("num_key_value_heads")
    @classmethod
    def _heads_form_groups(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads", value)
        if heads % value:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads ({heads}), got {value}; "
                "each key head serves a whole number of query heads"
            )
        return value

    @field_validator("head_dim")
    @classmethod
    def _rotary_pairs_components(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"head_dim must be even (rotary embedding turns pairs), got {value}; set head_dim")
        return value

    @property
    def attention_output_bias(self) -> bool:
        """Whether `o_proj` has a bias: never in qwen2, elsewhere as `attention_bias` says."""
        return self.attention_bias and self.architecture != "qwen2"

    def with_vocab_size(self, tokenizer_size: int) -> "DecoderConfig":
        """This config with a vocabulary; a given one may be larger than the tokenizer's, never smaller.

        Raises:
            RecipeError: `vocab_size` was given and some token ids would not fit.
        """
        if self.vocab_size is None:
            return self.model_copy(update={"vocab_size": tokenizer_size})
        if self.vocab_size < tokenizer_size:
            raise RecipeError(
                [
                    f"model.config.vocab_size must be >= the tokenizer's size ({tokenizer_size}), "
                    f"got {self.vocab_size}; use the tokenizer of the model, or leave vocab_size out or raise it"
                ]
            )
        return self

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight, a tied one once; `vocab_size` must be known."""
        assert self.vocab_size is not None, "with_vocab_size comes first"
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, outputs, inputs, has_bias in (
            ("self_attn.q_proj", queries, hidden, self.attention_bias),
            ("self_attn.k_proj", keys, hidden, self.attention_bias),
            ("self_attn.v_proj", keys, hidden, self.attention_bias),
            ("self_attn.o_proj", hidden, queries, self.attention_output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            layer[f"{name}.weight"] = (outputs, inputs)
            if has_bias:
                layer[f"{name}.bias"] = (outputs,)
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        layer["post_attention_layernorm.weight"] = (hidden,)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def parameter_count(self) -> int:
        """The number of weights, tied ones once; `vocab_size` must be known."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


class ModelConfig(BaseModel):
    """The recipe's `model` section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: DecoderConfig = Field(description="a mapping; or the path of a Hugging Face config.json or its folder")
    init_from: str | None = Field(
        default=None,
        description="weights to begin with: a folder of safetensors files with Hugging Face names, or a checkpoint "
        "folder step_NNNNNNNN of any mode; null: random ones",
    )
    variable_seq_lengths: bool = Field(
        description="attention follows the carried lengths: false in a padded recipe, true in the others"
    )
    seq_length: int = Field(gt=0, description="the longest sequence, in tokens")
    max_position_embeddings: int = Field(gt=0, description="positions of the model, in tokens; must equal seq_length")
    attention_dropout: float = Field(default=0.0, ge=0, description="only 0.0 is accepted")
    recompute: bool = Field(default=False, description="compute each layer again in the backward pass to save memory")

    @field_validator("attention_dropout")
    @classmethod
    def _no_dropout_in_attention(cls, value: float) -> float:
        if value > 0:
            raise ValueError(
                f"attention_dropout must be 0.0, got {value}; remove the key "
                "(dropped scores differ between layouts of the same samples, so modes could not be compared)"
            )
        return value
