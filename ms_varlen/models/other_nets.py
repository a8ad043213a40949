"""Keys of a `config.json` that ask for another net than ours: refused by name unless their value changes nothing."""

import json
import math
from collections.abc import Iterator
from typing import Any

FieldFault = tuple[str, str]
"""A key of the file, and what is wrong with it: rule, value found, next step."""

# Key -> the values that change nothing, and the next step. Null and an absent key change nothing either.
_NO_SCALE = "choose a model that scales nothing there"
_NO_CAP = "choose a model whose logits are not capped"
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "choose a model with silu"),
    "attention_dropout": (
        (0,),
        "set it to 0.0 in the file: dropped scores differ between layouts of the same samples",
    ),
    "partial_rotary_factor": ((1,), "choose a model whose heads are turned whole"),
    "quantization_config": ((None,), "take the model's weights in float32, bfloat16 or float16"),
    "final_logit_softcapping": ((None,), _NO_CAP),
    "attn_logit_softcapping": ((None,), _NO_CAP),
    "logits_scaling": ((1,), _NO_SCALE),
    "logit_scale": ((1,), _NO_SCALE),
    "residual_multiplier": ((1,), _NO_SCALE),
    "embedding_multiplier": ((1,), _NO_SCALE),
    "attention_chunk_size": ((None,), "choose a model whose attention sees all that came before"),
}
_TOKENIZER_CODE = ("AutoTokenizer", "AutoProcessor")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def not_computed(values: dict[str, Any], family: str, class_name: str) -> Iterator[FieldFault]:
    """What a file asks for that we do not compute.

    Args:
        values: of the file.
        family: its `model_type`, one that we know.
        class_name: transformers' class of the family with a language head.
    """
    for name, (neutral, advice) in _NEUTRAL.items():
        if values.get(name) not in (None, *neutral):
            yield name, f"must be {json.dumps(neutral[0])}, got {json.dumps(values[name])}; {advice}"
    yield from _other_class(values, class_name)
    yield from _other_attention(values, family)
    yield from _other_layers(values)


def _other_class(values: dict[str, Any], class_name: str) -> Iterator[FieldFault]:
    classes = values.get("architectures")
    if classes not in (None, [], [class_name]):
        yield (
            "architectures",
            f'must be ["{class_name}"], got {json.dumps(classes)}; choose a model of this class, or correct it where '
            "the weights are of it",
        )
    code = [name for name in values.get("auto_map") or () if name not in _TOKENIZER_CODE]
    if code:
        yield (
            "auto_map",
            f"must name no code of the model's own, which is not run here, got {', '.join(code)}; choose another "
            f"model, or remove the key where transformers' {class_name} computes the same",
        )


def _other_attention(values: dict[str, Any], family: str) -> Iterator[FieldFault]:
    scale, dim = values.get("attention_multiplier"), _head_dim(values)
    neutral = None if dim is None else dim**-0.5
    is_number = isinstance(scale, int | float)
    if scale is not None and not (is_number and neutral and math.isclose(scale, neutral, rel_tol=1e-6)):
        rule = "must be 1 / sqrt(head_dim)" + (f" ({neutral:.6g})" if neutral else "")
        yield "attention_multiplier", f"{rule}, got {json.dumps(scale)}; {_NO_SCALE}"
    normed = family == "qwen3"
    if values.get("use_qk_norm") not in (None, normed):
        rule = f"must be {json.dumps(normed)} in a {family} model, got {json.dumps(values['use_qk_norm'])}"
        yield "use_qk_norm", f"{rule}; choose another model, or write its config by hand with qk_norm"


def _head_dim(values: dict[str, Any]) -> float | None:
    """Components of a head; None where the file does not say in numbers."""
    dim, hidden, heads = (values.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(dim, int) and dim > 0:
        return dim
    if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
        return hidden / heads
    return None


def _other_layers(values: dict[str, Any]) -> Iterator[FieldFault]:
    turned = values.get("no_rope_layers") or []  # 1 where a layer has rotary embedding, despite its name
    if not (isinstance(turned, list) and all(turned)):
        yield (
            "no_rope_layers",
            f"must be 1 for every layer, got {json.dumps(turned)}; choose a model that turns the heads of every layer",
        )
    kinds, layers = values.get("layer_types"), values.get("num_hidden_layers")
    other = next((kind for kind in kinds or () if kind not in _LAYER_TYPES), None)
    if other is not None:
        yield (
            "layer_types",
            f"must hold only {' and '.join(_LAYER_TYPES)}, got {json.dumps(other)}; choose another model",
        )
    elif kinds is not None and isinstance(layers, int) and len(kinds) != layers:
        yield (
            "layer_types",
            f"must name a kind for each of the {layers} layers (num_hidden_layers), got {len(kinds)}; bring the "
            "model's file whole",
        )
