"""Settings of MindFormers that would train on wrong lengths or labels without an error. No MindSpore, no MindFormers.

The loader sees its own keys only, so the settings of model, batch and parallel sections are checked twice: in the YAML,
before anything starts (`config_faults`), and in the built network, when training begins (`model_faults`, called by the
monitor). MindFormers itself checks few of them, and none of those that only make the result wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_varlen.bridge.config import (
    LOADER_TYPE,
    MONITOR_TYPE,
    PACKED_COLUMNS,
    LoaderConfig,
    check_columns,
    read_loader_config,
)
from ms_varlen.bridge.yaml_types import type_faults
from ms_varlen.data.store import TokenStore
from ms_varlen.data.tokenizers import open_tokenizer
from ms_varlen.errors import RecipeError, VarlenError

MAX_ENDS = 1024
"""Segments that FlashAttentionScore documents for TND; a micro-batch of B rows brings B times the entries of a row."""

DEFAULT_LENGTHS = {True: 2048, False: 4096}
"""`seq_length` of MindFormers' legacy Llama, and of its core Qwen3, where the YAML gives none."""

SEMI_AUTO = (1, 2, "semi_auto_parallel", "auto_parallel")
"""Values of `parallel.parallel_mode` under which MindFormers accumulates gradients."""

MODEL = "model.model_config"
LOADER = "train_dataset.data_loader"
TASK_TYPE = "CausalLanguageModelDataset"
"""MindFormers' data set that adds row offsets to our ends and pads dynamic batches."""


def config_faults(config: Any) -> list[str]:
    """What is wrong with a MindFormers YAML that uses our loader.

    Args:
        config: what the YAML holds; anything but nested mappings is a fault.
    Returns:
        one line for each fault: the key, the rule, the value found, and what to set.
    """
    faults = type_faults(config)
    if faults:
        return faults
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
    faults += _position_faults(model)
    faults += _vocabulary_faults(settings, model)
    faults += _run_faults(settings, config)
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
        model: `use_legacy`, `seq_length`, `use_flash_attention`, `use_ring_attention`, `is_dynamic` and, of a legacy
            model, `input_sliced_sig`, of a core model `use_eod_reset`; a missing one has MindFormers' default.

    Two settings are no faults, since both of MindFormers' models compute the same with them: `is_dynamic` with rows of
    one length (it only slices mask and rotary table to the row), and `use_attn_mask_compression` beside the eod one
    (which is asked for first where sparse mode and layout are chosen).
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
        if model.get("use_ring_attention", False):
            faults.append(
                f"{MODEL}.use_ring_attention: must be False in mode {settings.mode}, got True: it turns TND attention "
                "off, samples would attend to each other; remove it"
            )
    elif dynamic and not model.get("is_dynamic", False):
        faults.append(f"{MODEL}.is_dynamic: must be True with pad_to batch, got False; set it to True")
    return faults


def _position_faults(model: Mapping[str, Any]) -> list[str]:
    """Faults of the model's class and of its table of positions.

    A core model's rotary angles come from the positions themselves, so `max_position_embeddings` counts only where
    positions are learned; the legacy Llama slices a table of `max_position_embedding` rows.
    """
    faults = []
    key = "max_position_embedding" if model["use_legacy"] else "max_position_embeddings"
    has_table = model["use_legacy"] or model.get("position_embedding_type") == "learned_absolute"
    if has_table and 0 < (model.get(key) or 0) < (model.get("seq_length") or 0):
        faults.append(
            f"{MODEL}.{key}: must be >= {MODEL}.seq_length ({model['seq_length']}), got {model[key]}: later positions "
            "have no row in its table; raise it"
        )
    # Configuration and model are looked up apart, one by model_type and one by architectures.
    kind, classes = model.get("model_type"), model.get("architectures") or ()
    is_qwen3 = "Qwen3ForCausalLM" in ([classes] if isinstance(classes, str) else classes)
    if not model["use_legacy"] and is_qwen3 and kind != "qwen3":
        faults.append(
            f"{MODEL}.model_type: must be qwen3 with architectures Qwen3ForCausalLM, got {kind}: the model would be "
            "built from another family's configuration; set it to qwen3"
        )
    return faults


def _vocabulary_faults(settings: LoaderConfig, model: Mapping[str, Any]) -> list[str]:
    """An id beyond the embedding's rows reads other memory on an NPU, without an error."""
    try:
        if settings.store is not None:
            ids = TokenStore.open(settings.store).vocab_size
        else:
            recipe = settings.recipe(1, settings.longest_sample or settings.seq_length)
            ids = open_tokenizer(recipe.data.tokenizer).vocab_size
    except RecipeError as error:
        return [f"{LOADER}.{fault.replace('model.config.', 'model.', 1)}" for fault in error.faults]
    except VarlenError as error:
        return [f"{LOADER}.{'data.tokenizer' if settings.store is None else 'store'}: {error}"]
    if (model.get("vocab_size") or ids) >= ids:
        return []
    return [
        f"{MODEL}.vocab_size: must be >= {ids}, the ids of the tokenizer, got {model['vocab_size']}; set it to {ids}"
    ]


def _run_faults(settings: LoaderConfig, config: Mapping[str, Any]) -> list[str]:
    """Faults of the number of steps, of the data set's class and of the callbacks.

    `train_dataset_task.dataset_config` may hold anything: MindFormers puts `train_dataset` in its place
    (`check_dataset_config`), and needs the section to be there.
    """
    faults = []
    epochs = _section(config, "runner_config").get("epochs", 1)
    if epochs != 1:
        faults.append(
            f"runner_config.epochs: must be 1, got {epochs}: a second pass would repeat the samples of the first, and "
            "0 trains nothing; set it to 1 and train_dataset.data_loader.steps to the steps of the whole run"
        )
    repeat = _section(config, "train_dataset").get("repeat")
    if repeat is not None and repeat > 1:
        faults.append(
            f"train_dataset.repeat: must be 1, got {repeat}: it would repeat all samples in one order; remove it and "
            "set train_dataset.data_loader.steps to the steps of the whole run"
        )
    schedule = _section(config, "lr_schedule")
    total = schedule.get("total_steps")
    # -1 and null are MindFormers' own count of steps; a constant rate does not depend on it.
    planned = total in (None, -1, settings.steps) or schedule.get("type") == "ConstantWarmUpLR"
    if settings.steps is not None and not planned:
        faults.append(
            f"lr_schedule.total_steps: must equal {LOADER}.steps ({settings.steps}), got {total}: the rate would end "
            f"at another step than the run; set it to {settings.steps}, or remove it"
        )
    task = _section(config, "train_dataset_task").get("type")
    if task != TASK_TYPE:
        faults.append(
            f"train_dataset_task.type: must be {TASK_TYPE}, which adds row offsets to actual_seq_len, got {task}; set "
            f"train_dataset_task: {{type: {TASK_TYPE}}}"
        )
    if MONITOR_TYPE not in [callback.get("type") for callback in config.get("callbacks") or ()]:
        faults.append(
            f"callbacks: must have a {MONITOR_TYPE}, found none: nothing would check the built network, nor that a run "
            f"goes on at its place in the plan; add - type: {MONITOR_TYPE}"
        )
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
    if min(dataset.get("divisor") or 0, dataset.get("remainder") or 0) > 0:
        longest = dynamic_length(settings.seq_length, dataset["divisor"], dataset["remainder"])
        if model_length < longest:
            faults.append(
                f"{MODEL}.seq_length: must be >= {longest}, what dynamic_batch pads {settings.seq_length} tokens to, "
                f"got {model_length}; set it to {longest}"
            )
    for key in ("divisor", "remainder"):
        if (dataset.get(key) or 0) < 1:
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
    semi_auto = config.get("use_parallel", False) and parallel.get("parallel_mode", 1) in SEMI_AUTO
    accumulated = runner.get("gradient_accumulation_steps") or 1
    if accumulated > 1 and not semi_auto:
        faults.append(
            f"runner_config.gradient_accumulation_steps: must be 1 outside of semi-automatic parallel, got "
            f"{accumulated}: MindFormers resets it; set it to 1 and multiply runner_config.batch_size by {accumulated}"
        )
    if strategy not in (None, "full_batch", [[data_parallel, 1]] * len(columns)):
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
    elif parallel.get("full_batch") and data_parallel > 1:
        # MindFormers multiplies the batch by data_parallel for it, and then turns it off again for our columns.
        faults.append(
            f"parallel.full_batch: must be False in mode {settings.mode} with data_parallel > 1, got True: each rank "
            f"would load {data_parallel} times its rows; set it to False"
        )
    context_parallel = ranks.get("context_parallel") or 1
    if context_parallel > 1:
        # Ends are counted in whole rows, and nothing here splits them, or proves how MindSpore does.
        faults.append(
            f"parallel_config.context_parallel: must be 1 in mode {settings.mode}, got {context_parallel}: the ends of "
            "samples are those of whole rows, a part of a row has others; set it to 1"
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
