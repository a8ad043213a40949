"""Decoders from a Hugging Face `config.json`, and back.

What decides the numbers is read, what we do not compute is refused by name, and the rest of the file (dropout of other
modules, generation settings, versions) is passed over. A key that is absent means what transformers' class of the
family means by it; where those defaults belong to one model of the family only, the key must be there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ms_varlen.errors import RecipeError
from ms_varlen.faults import field_faults
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.other_nets import FieldFault, not_computed

CONFIG_FILE = "config.json"

CAUSAL_LM = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` of each family, and transformers' class."""

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Where transformers' default is the size of one model of the family, an absent key is a mistake, not a default.
_REQUIRED_BY_FAMILY = {
    "llama": (),
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
_COPIED = (*_REQUIRED, "num_key_value_heads", "head_dim", "tie_word_embeddings", "initializer_range")
# The biases that transformers' class of the family asks the file for; it decides the others itself.
_BIASES = {"llama": ("attention_bias", "mlp_bias"), "mistral": (), "qwen2": (), "qwen3": ("attention_bias",)}
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
"""Layers of qwen2 and qwen3 that do not slide, where the file does not say."""


def read_hugging_face(path: str | Path) -> tuple[dict[str, Any], list[FieldFault]]:
    """The fields of a `DecoderConfig` that a `config.json` describes, not validated yet, and what is wrong with it.

    Args:
        path: the file, or its folder.
    Returns:
        fields, empty where the file cannot be read or is of no family we know; and faults, each with its key (`""` for
        the file as a whole).
    """
    file = Path(path).expanduser()
    file = file / CONFIG_FILE if file.is_dir() else file
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        rule = f"must be a mapping of keys, or the path of a {CONFIG_FILE} or of its folder"
        return {}, [("", f"{rule}, got {file} ({error.strerror}); correct the path")]
    except ValueError as error:
        return {}, [("", f"must name a file of JSON, got {error}, in {file}; bring the model's {CONFIG_FILE} again")]
    if not isinstance(values, dict):
        return {}, [("", f"must name a file with a JSON object, got {type(values).__name__}, in {file}")]
    family = values.get("model_type")
    # A mixture of experts, or another family, would be short of every other key too: one fault says it all.
    unknown = list(_other_family(values))
    if unknown:
        return {}, unknown
    faults = [*_missing(values, str(family)), *not_computed(values, str(family), CAUSAL_LM[str(family)])]
    fields = {name: values[name] for name in _COPIED if values.get(name) is not None}
    fields |= {name: values[name] for name in _BIASES[str(family)] if values.get(name) is not None}
    rope, rope_faults = _rope(values)
    fields |= {"architecture": family, "sliding_window": _window(values, str(family)), **rope}
    return fields, [*faults, *rope_faults]


def load_config(path: str | Path) -> DecoderConfig:
    """The decoder that a `config.json` describes.

    Args:
        path: the file, or its folder.
    Raises:
        RecipeError: the file cannot be read, or asks for something that we do not compute; all faults at once.
    """
    fields, faults = read_hugging_face(path)
    lines = [f"{key}: {text}" if key else text for key, text in faults]
    if not lines:
        try:
            return DecoderConfig.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            lines = [str(fault) for fault in field_faults(error, DecoderConfig)]
    raise RecipeError(lines, str(path))


def hugging_face_config(config: DecoderConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The values of a `config.json` from which transformers builds the same decoder.

    Args:
        config: the decoder, with its `vocab_size` known.
        max_position_embeddings: of a model that brought no limit of its own, in tokens.
    """
    values = config.model_dump(mode="json", exclude={"architecture", "qk_norm", "rope_scaling"}, exclude_none=True)
    scaling = config.rope_scaling
    return {
        "architectures": [CAUSAL_LM[config.architecture]],
        "model_type": config.architecture,
        **values,
        "max_position_embeddings": config.max_position_embeddings or max_position_embeddings,
        # Null is no default everywhere: an absent window is 4096 to transformers' Mistral.
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        **({} if config.sliding_window is None else {"max_window_layers": 0}),
        "rope_scaling": scaling.model_dump(exclude_none=True) if scaling else None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def _other_family(values: dict[str, Any]) -> Iterator[FieldFault]:
    family = values.get("model_type")
    experts = [name for name in values if name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if experts or "moe" in str(family) or family == "mixtral":
        name = experts[0] if experts else "model_type"
        yield name, f"must be absent (no mixture of experts), got {values[name]!r}; choose a dense model"
    elif family not in tuple(CAUSAL_LM):
        found = "no such key" if family is None else repr(family)
        yield "model_type", f"must be one of {', '.join(CAUSAL_LM)}, got {found}; choose a model of these families"


def _missing(values: dict[str, Any], family: str) -> Iterator[FieldFault]:
    for name in (*_REQUIRED, *_REQUIRED_BY_FAMILY[family]):
        if values.get(name) is None:
            yield (
                name,
                f"must be in the file of a {family} model, got no such key; bring the model's {CONFIG_FILE} whole",
            )


def _window(values: dict[str, Any], family: str) -> Any:
    """The tokens that attention sees where any layer slides; None where none does."""
    if family in ("llama", "mistral"):
        return values.get("sliding_window", _DEFAULT_WINDOW if family == "mistral" else None)
    if not values.get("use_sliding_window"):
        return None
    kinds = values.get("layer_types")
    if kinds and "sliding_attention" not in kinds:
        return None
    full, layers = values.get("max_window_layers", _DEFAULT_FULL_LAYERS), values.get("num_hidden_layers")
    if not kinds and isinstance(full, int) and isinstance(layers, int) and full >= layers:
        return None
    return values.get("sliding_window", _DEFAULT_WINDOW)


def _rope(values: dict[str, Any]) -> tuple[dict[str, Any], list[FieldFault]]:
    """`rope_theta` and `rope_scaling`, from the keys of transformers 4 or the one of transformers 5."""
    given = {name: values[name] for name in ("rope_parameters", "rope_scaling") if values.get(name)}
    for name, found in given.items():
        if not isinstance(found, dict):
            return {}, [(name, f"must be a mapping or null, got {json.dumps(found)}; bring the model's file again")]
    if len({json.dumps({**found, "rope_theta": None}, sort_keys=True) for found in given.values()}) > 1:
        rule = f"must be left out or say what rope_parameters says, got {json.dumps(given['rope_scaling'])}"
        return {}, [("rope_scaling", f"{rule}; remove the one that the weights were not trained with")]
    name = next(iter(given), "rope_scaling")
    settings = dict(given.get(name, {}))
    theta = settings.pop("rope_theta", values.get("rope_theta"))
    fields = {} if theta is None else {"rope_theta": theta}
    # Older files say `type`; newer ones say `rope_type`, and some say both.
    old, kind = settings.pop("type", None), settings.pop("rope_type", None)
    if old and kind and old != kind:  # transformers 4 follows `type`, transformers 5 `rope_type`
        rule = f"must be left out or say what rope_type says ({kind!r}), got {old!r}"
        return fields, [(f"{name}.type", f"{rule}; remove the one that the weights were not trained with")]
    kind = kind or old
    part = settings.pop("partial_rotary_factor", None)
    if part not in (None, 1):
        rule = f"must be 1, got {json.dumps(part)}; choose a model whose heads are turned whole"
        return fields, [(f"{name}.partial_rotary_factor", rule)]
    by_layer = [key for key, value in settings.items() if isinstance(value, dict)]
    if by_layer and kind in (None, "default"):
        rule = "must hold one setting for all layers (no others by kind of layer)"
        return fields, [(name, f"{rule}, got {', '.join(by_layer)}; choose a model whose layers are turned alike")]
    if kind is None and settings:
        rule = f"must be given beside {', '.join(settings)}, got no such key"
        return fields, [(f"{name}.rope_type", f"{rule}; bring the model's {CONFIG_FILE} again")]
    if kind in (None, "default"):
        return fields, []
    if kind not in ("linear", "llama3"):
        rule = "must be default, linear or llama3 (no other scaling is computed here)"
        return fields, [(f"{name}.rope_type", f"{rule}, got {kind!r}; choose a model without it")]
    kept = ["factor"]
    if kind == "llama3":
        kept += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in kept if settings.get(key) is None]
    faults = [(f"{name}.{key}", f"must be given with rope_type {kind}, got no such key") for key in missing]
    scaling = {"rope_type": kind, **{key: settings[key] for key in kept if key not in missing}}
    return {**fields, "rope_scaling": scaling}, faults
