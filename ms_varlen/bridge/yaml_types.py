"""Whether the settings that are checked have their types, so that the checks can read them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ms_varlen.faults import shown

SECTIONS = (
    "context",
    "lr_schedule",
    "model",
    "model.model_config",
    "parallel",
    "parallel_config",
    "runner_config",
    "train_dataset",
    "train_dataset.data_loader",
    "train_dataset_task",
)
WHOLE_NUMBERS = (
    "lr_schedule.total_steps",
    "micro_batch_interleave_num",
    *(f"model.model_config.{key}" for key in ("seq_length", "vocab_size", "ignore_token_id", "mtp_num_layers")),
    *(f"model.model_config.{key}" for key in ("max_position_embedding", "max_position_embeddings")),
    *(f"parallel_config.{key}" for key in ("context_parallel", "data_parallel", "seq_split_num")),
    *(f"runner_config.{key}" for key in ("batch_size", "epochs", "gradient_accumulation_steps", "sink_size")),
    *(f"train_dataset.{key}" for key in ("divisor", "remainder", "repeat")),
)
SWITCHES = (
    "use_legacy",
    "use_parallel",
    *(f"model.model_config.{key}" for key in ("input_sliced_sig", "is_dynamic", "use_eod_attn_mask_compression")),
    *(f"model.model_config.{key}" for key in ("use_eod_reset", "use_flash_attention", "use_ring_attention")),
    "parallel.full_batch",
    "runner_config.sink_mode",
    *(f"train_dataset.{key}" for key in ("dynamic_batch", "eod_reset")),
)
NAMES = tuple(f"train_dataset.{key}" for key in ("construct_args_key", "input_columns", "output_columns"))
TEXTS = ("context.device_target", "model.model_config.model_type", "model.model_config.position_embedding_type")


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A section below others; an empty one where it is missing or null."""
    for name in names:
        config = config.get(name) or {}
    return config


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _are_callbacks(value: Any) -> bool:
    return isinstance(value, list) and all(_is_section(callback) for callback in value)


RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (SECTIONS, _is_section, "a section of keys and values"),
    (WHOLE_NUMBERS, _is_whole, "a whole number, without quotes"),
    (SWITCHES, lambda value: isinstance(value, bool), "True or False, without quotes"),
    (NAMES, _are_names, "a list of column names"),
    (TEXTS, lambda value: isinstance(value, str), "a text"),
    (
        ("model.model_config.architectures",),
        lambda value: isinstance(value, str) or _are_names(value),
        "a list of class names",
    ),
    (("callbacks",), _are_callbacks, "a list of sections, each with a type"),
)


def type_faults(config: Any) -> list[str]:
    """What cannot be read in a MindFormers YAML; a setting that is left out, or null, has MindFormers' default.

    Args:
        config: what the YAML holds.
    Returns:
        one line for each fault: the key, its type, the value found, and what to do.
    """
    if not _is_section(config):
        return [f"file: must be sections of keys and values, got {shown(config)}; give a YAML of MindFormers"]
    return [
        f"{path}: must be {what}, got {shown(value)}; write it so"
        for paths, fits, what in RULES
        for path in paths
        for value in _values(config, path.split("."))
        if value is not None and not fits(value)
    ]


def _values(config: Mapping[str, Any], names: list[str]) -> Iterator[Any]:
    """The value at a path, or nothing where a section above it is missing or none."""
    value: Any = config
    for name in names:
        if not _is_section(value) or name not in value:
            return
        value = value[name]
    yield value
