"""How MindFormers 1.9 names and lays out the weights of a decoder, both ways, AdamW's moments included.

Two model classes take part: `LlamaForCausalLM` (legacy; Llama, Mistral, Qwen2) and `TrainingQwen3ForCausalLM` (mcore;
Qwen3). Fused weights hold, with G key heads, R query heads for each, and head size D::

    interleaved qkv   group 0: R*D rows of q, D rows of k, D rows of v; then group 1, ...
    contiguous qkv    all of q, all of k, all of v
    interleaved mlp   gate row 0, up row 0, gate row 1, up row 1, ...
    contiguous mlp    all of gate, all of up

Moments lie as their weights do. MindFormers' own `convert_qkv_concat_weight` leaves fused biases contiguous although
its model reads them interleaved; here they follow the model.

Source: mindformers 1.9.0, models/llama/llama_transformer.py, models/llama/llama_layer.py, models/qwen3/utils.py,
parallel_core/training_graph/transformer/attention.py and mlp.py.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from ckpt_tools.parameters import MOMENTS
from ms_varlen.checkpoint.tensors import StoredTensor, computed
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig

RowLayout = Literal["interleaved", "contiguous"]
ModelClass = Literal["llama", "qwen3"]

LLAMA = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "lm_head.weight": "lm_head.weight",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
QWEN3 = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
FUSED = {
    "llama": ("attention.w_qkv", "feed_forward.w_gate_hidden"),
    "qwen3": ("self_attention.linear_qkv", "mlp.linear_fc1"),
}
LAYERS = {"llama": "model.layers.", "qwen3": "decoder.layers."}
NAMES = {"llama": LLAMA, "qwen3": QWEN3}


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Where MindFormers has a decoder's weights.

    Attributes:
        model: the class: "llama" is the legacy `LlamaForCausalLM`, "qwen3" the mcore `TrainingQwen3ForCausalLM`.
        fused: q, k, v in one weight, and gate and up (`qkv_concat`); always so in qwen3.
        qkv: rows of the fused q, k, v; contiguous with `use_contiguous_weight_layout_attention`.
        mlp: rows of the fused gate and up; contiguous without `use_interleaved_weight_layout_mlp`.
    """

    model: ModelClass
    fused: bool
    qkv: RowLayout = "interleaved"
    mlp: RowLayout = "interleaved"


def model_class_of(names: Mapping[str, object]) -> ModelClass | None:
    """The MindFormers class that has parameters of these names; None where it is neither."""
    if "model.tok_embeddings.embedding_weight" in names:
        return "llama"
    return "qwen3" if "embedding.word_embeddings.weight" in names else None


def is_fused(names: Mapping[str, object]) -> bool:
    """Whether q, k and v are in one weight."""
    return any(f".{qkv}." in name for qkv, _ in FUSED.values() for name in names)


def check_expressible(config: DecoderConfig, model: ModelClass) -> None:
    """Refuse a decoder that a MindFormers class cannot express.

    Raises:
        CheckpointError: names what it lacks.
    """
    lacks = [
        (config.mlp_bias, "biases in the feed-forward block (mlp_bias)"),
        (model == "llama" and config.qk_norm, "norms of query and key heads (qk_norm)"),
        (
            model == "llama" and config.head_dim * config.num_attention_heads != config.hidden_size,
            f"a head_dim ({config.head_dim}) other than hidden_size / num_attention_heads",
        ),
        (model == "qwen3" and not config.qk_norm, "a decoder without norms of query and key heads (qk_norm)"),
        (model == "qwen3" and config.attention_output_bias, "a bias of o_proj (attention_bias)"),
    ]
    name = {"llama": "LlamaForCausalLM (legacy)", "qwen3": "TrainingQwen3ForCausalLM (mcore)"}[model]
    for lacking, what in lacks:
        if lacking:
            raise CheckpointError(
                f"MindFormers' {name} does not have {what}, which this {config.architecture} model needs; "
                "export it to Hugging Face, or choose the other class with --model"
            )


def to_mindformers(
    tensors: Mapping[str, StoredTensor], config: DecoderConfig, layout: WeightLayout
) -> dict[str, StoredTensor]:
    """Tensors under MindFormers' names and in its layout.

    Args:
        tensors: weights by Hugging Face name, or moments of them (`adam_m.<name>`).
        config: the decoder.
        layout: what they are to become.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        prefix, plain = _moment_prefix(name)
        head, part, kind = _split(plain, "model.layers.")
        fused = next((names for names in (QKV, MLP) if layout.fused and part in names), None)
        if fused is None:
            target = prefix + _joined(head, NAMES[layout.model][part if head else plain], kind, layout.model)
            found[target] = tensor.renamed(target)
        elif part == fused[0]:
            names = [f"{prefix}model.layers.{head}.{each}.{kind}" for each in fused]
            target = prefix + _joined(head, FUSED[layout.model][fused is MLP], kind, layout.model)
            found[target] = _fuse(target, [tensors[each] for each in names], _grouping(fused, config, layout))
    return found


def from_mindformers(
    tensors: Mapping[str, StoredTensor], config: DecoderConfig, layout: WeightLayout
) -> dict[str, StoredTensor]:
    """The same way back: tensors under their Hugging Face names; those without one keep theirs, for messages."""
    back = {theirs: ours for ours, theirs in NAMES[layout.model].items()}
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        prefix, plain = _moment_prefix(name)
        head, part, kind = _split(plain, LAYERS[layout.model])
        if head and part in FUSED[layout.model]:
            fused = MLP if part == FUSED[layout.model][1] else QKV
            names = [f"{prefix}model.layers.{head}.{each}.{kind}" for each in fused]
            found |= _unfuse(names, tensor, _grouping(fused, config, layout))
        elif head:
            target = f"{prefix}model.layers.{head}.{back[part]}.{kind}" if part in back else name
            found[target] = tensor.renamed(target)
        else:
            target = prefix + back.get(plain, plain)
            found[target] = tensor.renamed(target)
    return found


def _moment_prefix(name: str) -> tuple[str, str]:
    """A moment's prefix with its dot, or nothing, and the weight's name."""
    first, _, rest = name.partition(".")
    return (f"{first}.", rest) if first in MOMENTS else ("", name)


def _split(name: str, layers: str) -> tuple[str, str, str]:
    """Layer number, part and "weight" or "bias" of a name; a number of "" for what is outside of layers."""
    match = re.fullmatch(rf"{re.escape(layers)}(\d+)\.(.+)\.(weight|bias)", name)
    return (match[1], match[2], match[3]) if match else ("", name, "")


def _joined(head: str, part: str, kind: str, model: ModelClass) -> str:
    return f"{LAYERS[model]}{head}.{part}.{kind}" if head else part


@dataclasses.dataclass(frozen=True)
class _Grouping:
    """`groups` groups of rows, in each so many of every member."""

    groups: int
    rows: tuple[int, ...]


def _grouping(fused: tuple[str, ...], config: DecoderConfig, layout: WeightLayout) -> _Grouping:
    if fused is MLP:
        inner = config.intermediate_size
        return _Grouping(inner, (1, 1)) if layout.mlp == "interleaved" else _Grouping(1, (inner, inner))
    head, keys = config.head_dim, config.num_key_value_heads
    rows = (config.num_attention_heads // keys * head, head, head)
    return _Grouping(keys, rows) if layout.qkv == "interleaved" else _Grouping(1, tuple(keys * each for each in rows))


def _fuse(name: str, members: list[StoredTensor], grouping: _Grouping) -> StoredTensor:
    rows = sum(member.shape[0] for member in members)
    groups, inner = grouping.groups, members[0].shape[1:]

    def values() -> np.ndarray:
        parts = [m.read().reshape(groups, each, -1) for m, each in zip(members, grouping.rows, strict=True)]
        return np.concatenate(parts, axis=1)

    return computed(name, members[0], (rows, *inner), values)


def _unfuse(names: list[str], tensor: StoredTensor, grouping: _Grouping) -> dict[str, StoredTensor]:
    groups, total, inner = grouping.groups, sum(grouping.rows), tensor.shape[1:]
    if tensor.shape[0] != groups * total:
        raise CheckpointError(
            f"{tensor.where}: parameter {tensor.name} must have {groups * total} rows for this model, found "
            f"{tensor.describe()}; give the model's own config with --config"
        )

    def member(first: int, rows: int) -> Callable[[], np.ndarray]:
        return lambda: tensor.read().reshape(groups, total, -1)[:, first : first + rows]

    found, first = {}, 0
    for name, rows in zip(names, grouping.rows, strict=True):
        found[name] = computed(name, tensor, (groups * rows, *inner), member(first, rows))
        first += rows
    return found
