"""Settings of MindFormers that would train on wrong lengths or labels without an error. No MindSpore, no MindFormers.

The loader sees its own keys only, so the settings of model, batch and parallel sections are checked twice: in the YAML,
before anything starts (`config_faults`), and in the built network, when training begins (`model_faults`, called by the
monitor). MindFormers itself checks few of them, and none of those that only make the result wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_varlen.bridge.config import (
    LOADER_TYPE,
    PACKED_COLUMNS,
    LoaderConfig,
    check_columns,
    read_loader_config,
)
from ms_varlen.errors import RecipeError

MAX_ENDS = 1024
"""Segments that FlashAttentionScore documents for TND; a micro-batch of B rows brings B times the entries of a row."""

DEFAULT_LENGTHS = {True: 2048, False: 4096}
"""`seq_length` of MindFormers' legacy Llama, and of its core Qwen3, where the YAML gives none."""

SEMI_AUTO = (1, 2, "semi_auto_parallel", "auto_parallel")
"""Values of `parallel.parallel_mode` under which MindFormers accumulates gradients."""

MODEL = "model.model_config"


def config_faults(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with a MindFormers YAML that uses our loader.

    Args:
        config: the YAML as nested mappings.
    Returns:
        one line for each fault: the key, the rule, the value found, and what to set.
    """
    dataset = _section(config, "train_dataset")
    loader = dict(_section(dataset, "data_loader"))
    loader.pop("auto_register", None)
    if loader.pop("type", None) != LOADER_TYPE:
        found = _section(dataset, "data_loader").get("type")
        return [f"train_dataset.data_loader.type: must be {LOADER_TYPE}, got {found!r}; set it to {LOADER_TYPE}"]
    try:
        settings = read_loader_config(loader)
    except RecipeError as error:
        return [f"train_dataset.data_loader.{fault}" for fault in error.faults]
    model, parallel = dict(_section(config, "model", "model_config")), _section(config, "parallel")
    legacy = bool(config.get("use_legacy", True))
    model = {"use_legacy": legacy, "seq_length": DEFAULT_LENGTHS[legacy], **model}
    faults, columns = _dataset_faults(settings, dataset, model.get("seq_length") or 0)
    faults += model_faults(settings, model)
    faults += _parallel_faults(settings, config, parallel, columns)
    return faults


def _section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        config = config.get(name) or {}
    return config


def model_faults(settings: LoaderConfig, model: Mapping[str, Any]) -> list[str]:
    """What is wrong with a model for our rows.

    Args:
        settings: the loader's keys.
        model: `use_legacy`, `seq_length`, `use_flash_attention`, `is_dynamic` and, of a legacy model,
            `input_sliced_sig`, of a core model `use_eod_reset`; a missing one has MindFormers' default.
    """
    faults = []
    dynamic, length = settings.pad_to == "batch", model.get("seq_length") or 0
    if length < settings.seq_length or (length > settings.seq_length and not dynamic):
        faults.append(
            f"{MODEL}.seq_length: must equal train_dataset.data_loader.seq_length ({settings.seq_length}), got "
            f"{model.get('seq_length')}; set both to the tokens of a row"
        )
    if model["use_legacy"] and not model.get("input_sliced_sig", False):
        faults.append(
            f"{MODEL}.input_sliced_sig: must be True, got {model.get('input_sliced_sig', False)}: the model would "
            "shift labels that are shifted already; set it to True"
        )
    if settings.packed:
        if not model["use_legacy"] and not model.get("use_eod_reset", False):
            faults.append(
                f"{MODEL}.use_eod_reset: must be True in mode {settings.mode}, got "
                f"{model.get('use_eod_reset', False)}: position_ids would be ignored; set it to True"
            )
        for key, default in (("use_flash_attention", True), ("use_eod_attn_mask_compression", True)):
            if not model.get(key, default):
                faults.append(
                    f"{MODEL}.{key}: must be True in mode {settings.mode}, got {model[key]}: only TND attention "
                    "follows actual_seq_len; set it to True"
                )
    elif dynamic and not model.get("is_dynamic", False):
        faults.append(f"{MODEL}.is_dynamic: must be True with pad_to batch, got False; set it to True")
    return faults


def _dataset_faults(
    settings: LoaderConfig, dataset: Mapping[str, Any], model_length: int
) -> tuple[list[str], tuple[str, ...]]:
    """Faults of `train_dataset`, and its columns."""
    faults: list[str] = []
    columns = tuple(dataset.get("input_columns") or (PACKED_COLUMNS if settings.packed else ()))
    try:
        columns = check_columns(settings, columns)
    except RecipeError as error:
        faults += error.faults
    for key in ("construct_args_key", "output_columns"):
        if dataset.get(key) and tuple(dataset[key]) != columns:
            faults.append(
                f"train_dataset.{key}: must equal input_columns, got {list(dataset[key])}; set it to {list(columns)}"
            )
    if not settings.packed and not dataset.get("construct_args_key"):
        faults.append(f"train_dataset.construct_args_key: must equal input_columns, got nothing; set {list(columns)}")
    if dataset.get("eod_reset"):
        faults.append("train_dataset.eod_reset: must be False, got True: it guesses lengths from ids; remove it")
    dynamic = bool(dataset.get("dynamic_batch"))
    if dynamic != (settings.pad_to == "batch"):
        faults.append(
            f"train_dataset.dynamic_batch: must be {not dynamic} with data_loader.mode {settings.mode} and pad_to "
            f"{settings.pad_to}, got {dynamic}; set it to {not dynamic}, or mode: padded and "
            f"pad_to: {'batch' if dynamic else 'max'}"
        )
    if dynamic and settings.pad_to == "batch":
        faults += _dynamic_faults(settings, dataset, columns, model_length)
    return faults, columns


def dynamic_length(tokens: int, divisor: int, remainder: int) -> int:
    """The length that MindFormers' `dynamic_batch` pads rows of at most `tokens` tokens to."""
    return -(-(tokens - remainder) // divisor) * divisor + remainder


def _dynamic_faults(
    settings: LoaderConfig, dataset: Mapping[str, Any], columns: Sequence[str], model_length: int
) -> list[str]:
    faults = []
    if dataset.get("divisor") and dataset.get("remainder"):
        longest = dynamic_length(settings.seq_length, dataset["divisor"], dataset["remainder"])
        if model_length < longest:
            faults.append(
                f"{MODEL}.seq_length: must be >= {longest}, what dynamic_batch pads {settings.seq_length} tokens to, "
                f"got {model_length}; set it to {longest}"
            )
    for key in ("divisor", "remainder"):
        if not dataset.get(key):
            faults.append(
                f"train_dataset.{key}: must be >= 1 with dynamic_batch, got {dataset.get(key)}: MindFormers pads "
                "without it to sizes that its own graph refuses; set divisor: 64 and remainder: 1, say"
            )
    pads = dataset.get("pad_token_id")
    if not isinstance(pads, list) or len(pads) != len(columns):
        wanted = ["the tokenizer's" if name == "input_ids" else -100 if name == "labels" else 0 for name in columns]
        faults.append(
            f"train_dataset.pad_token_id: must give one value for each of {list(columns)}, got {pads}; set {wanted}"
        )
    return faults


def _parallel_faults(
    settings: LoaderConfig, config: Mapping[str, Any], parallel: Mapping[str, Any], columns: Sequence[str]
) -> list[str]:
    faults = []
    runner, ranks = _section(config, "runner_config"), _section(config, "parallel_config")
    data_parallel, strategy = ranks.get("data_parallel") or 1, parallel.get("dataset_strategy")
    if (runner.get("epochs") or 1) != 1:
        faults.append(
            f"runner_config.epochs: must be 1, got {runner['epochs']}: a second pass would repeat the samples of the "
            "first; set it to 1 and train_dataset.data_loader.steps to the steps of the whole run"
        )
    semi_auto = config.get("use_parallel", False) and parallel.get("parallel_mode", 1) in SEMI_AUTO
    accumulated = runner.get("gradient_accumulation_steps") or 1
    if accumulated > 1 and not semi_auto:
        faults.append(
            f"runner_config.gradient_accumulation_steps: must be 1 outside of semi-automatic parallel, got "
            f"{accumulated}: MindFormers resets it; set it to 1 and multiply runner_config.batch_size by {accumulated}"
        )
    if isinstance(strategy, list) and [list(part) for part in strategy] != [[data_parallel, 1]] * len(columns):
        faults.append(
            f"parallel.dataset_strategy: must be [{data_parallel}, 1] for each of {len(columns)} columns, got "
            f"{strategy}; remove it or set that"
        )
    if not settings.packed:
        return faults
    if strategy == "full_batch" and data_parallel > 1:
        faults.append(
            "parallel.dataset_strategy: must not be full_batch with data_parallel > 1: row offsets would run over all "
            "ranks; remove it, each rank then loads its own rows"
        )
    interleave = config.get("micro_batch_interleave_num") or 1
    if interleave > 1:
        faults.append(
            f"micro_batch_interleave_num: must be 1 in mode {settings.mode}, got {interleave}: row offsets would not "
            "restart in the second half; set it to 1"
        )
    entries = (runner.get("batch_size") or 1) * settings.compressed_eod_mask_length
    if entries > MAX_ENDS:
        faults.append(
            f"runner_config.batch_size: batch_size * compressed_eod_mask_length must be <= {MAX_ENDS} "
            f"(FlashAttentionScore), got {entries}; set batch_size: 1 and a larger seq_length"
        )
    return faults


def refuse(faults: Sequence[str], where: str) -> None:
    """Raise when there are faults.

    Raises:
        RecipeError: one line for each.
    """
    if faults:
        raise RecipeError(list(faults), where)
