"""Settings of MindFormers that would train on wrong lengths or labels without an error. No MindSpore, no MindFormers.

The loader sees its own keys only, so the settings of model, batch and parallel sections are checked twice: in the YAML,
before anything starts (`config_faults`), and in the built network, when training begins (`model_faults`, called by the
monitor). MindFormers itself checks few of them, and none of those that only make the result wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_varlen.bridge.config import (
    LOADER,
    LOADER_TYPE,
    PACKED_COLUMNS,
    LoaderConfig,
    check_columns,
    dynamic_length,
    read_loader_config,
)
from ms_varlen.bridge.run_checks import parallel_faults, run_faults
from ms_varlen.bridge.yaml_types import section, type_faults
from ms_varlen.data.tokens.tokenizers import open_tokenizer
from ms_varlen.errors import RecipeError, VarlenError
from ms_varlen.limits import IGNORE_INDEX

DEFAULT_LENGTHS = {True: 2048, False: 4096}
"""`seq_length` of MindFormers' legacy Llama, and of its core Qwen3, where the YAML gives none."""

MODEL = "model.model_config"


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
    dataset = section(config, "train_dataset")
    loader = dict(section(dataset, "data_loader"))
    loader.pop("auto_register", None)
    if loader.pop("type", None) != LOADER_TYPE:
        kind = section(dataset, "data_loader").get("type")
        return [f"{LOADER}.type: must be {LOADER_TYPE}, got {kind!r}; set it to {LOADER_TYPE}"]
    faults, settings = _loader_faults(loader)
    if settings is None:
        return faults
    model = dict(section(config, "model", "model_config"))
    legacy = bool(config.get("use_legacy", True))
    model = {"use_legacy": legacy, "seq_length": DEFAULT_LENGTHS[legacy], **model}
    found, columns = _dataset_faults(settings, dataset, model.get("seq_length") or 0)
    faults += found + model_faults(settings, model)
    faults += _position_faults(model)
    batch_size = section(config, "runner_config").get("batch_size")
    faults += _vocabulary_faults(settings, model, 1 if batch_size is None else batch_size)
    faults += run_faults(settings, config)
    faults += parallel_faults(settings, config, columns)
    return faults


def _loader_faults(keys: Mapping[str, Any]) -> tuple[list[str], LoaderConfig | None]:
    """Faults of the loader's keys, and the keys without those that must be left out, where the rest can be read."""
    try:
        return [], read_loader_config(keys)
    except RecipeError as error:
        faults = [f"{LOADER}.{fault}" for fault in error.faults]
    try:
        return faults, read_loader_config({key: keys[key] for key in keys if key in LoaderConfig.model_fields})
    except RecipeError:
        return faults, None


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
        faults += _packed_faults(settings, model)
    ignored = model.get("ignore_token_id")
    if not model["use_legacy"] and ignored is not None and ignored >= 0:
        faults.append(
            f"{MODEL}.ignore_token_id: must be no token, got {ignored}: targets equal to it would "
            "have no loss; remove it"
        )
    if dynamic and not model.get("is_dynamic", False):
        faults.append(f"{MODEL}.is_dynamic: must be True with pad_to batch, got False; set it to True")
    return faults


def _packed_faults(settings: LoaderConfig, model: Mapping[str, Any]) -> list[str]:
    """What is wrong with a model for rows of several samples."""
    faults = []
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
    for key in ("mtp_num_layers", "num_nextn_predict_layers", "mtp_depth"):
        if model.get(key):
            faults.append(
                f"{MODEL}.{key}: must be 0 in mode {settings.mode}, got {model[key]}: it shifts labels over the "
                "ends of samples; remove it"
            )
    if model.get("use_ring_attention", False):
        faults.append(
            f"{MODEL}.use_ring_attention: must be False in mode {settings.mode}, got True: it turns TND attention "
            "off, samples would attend to each other; remove it"
        )
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


def _vocabulary_faults(settings: LoaderConfig, model: Mapping[str, Any], batch_size: int) -> list[str]:
    """An id beyond the embedding's rows reads other memory on an NPU, without an error."""
    try:
        store = settings.open_store()
        longest = settings.longest_sample or (settings.seq_length if store is None else store.train.longest)
        recipe = settings.recipe(batch_size, longest)
        ids = open_tokenizer(recipe.data.tokenizer).vocab_size if store is None else store.vocab_size
    except RecipeError as error:
        return error.faults
    except VarlenError as error:
        return [str(error) if settings.store is not None else f"{LOADER}.data.tokenizer: {error}"]
    if (model.get("vocab_size") or ids) >= ids:
        return []
    return [
        f"{MODEL}.vocab_size: must be >= {ids}, the ids of the tokenizer, got {model['vocab_size']}; set it to {ids}"
    ]


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
        columns = PACKED_COLUMNS if settings.packed else columns
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


def _dynamic_faults(
    settings: LoaderConfig, dataset: Mapping[str, Any], columns: Sequence[str], model_length: int
) -> list[str]:
    faults = []
    divisor, remainder = dataset.get("divisor") or 0, dataset.get("remainder") or 0
    if not 1 <= remainder < divisor:
        faults.append(
            f"train_dataset.divisor, remainder: must be 1 <= remainder < divisor with dynamic_batch, got {divisor} and "
            f"{remainder}: MindFormers pads by others to sizes that its own graph refuses; set divisor: 64 and "
            "remainder: 1, say"
        )
    elif (settings.divisor, settings.remainder) != (divisor, remainder):
        faults.append(
            f"{LOADER}.divisor, remainder: must be those of train_dataset ({divisor}, {remainder}), got "
            f"{settings.divisor} and {settings.remainder}; set them so"
        )
    elif model_length < (longest := dynamic_length(settings.seq_length, divisor, remainder)):
        faults.append(
            f"{MODEL}.seq_length: must be >= {longest}, what dynamic_batch pads {settings.seq_length} tokens to, got "
            f"{model_length}; set it to {longest}"
        )
    pads, wanted = dataset.get("pad_token_id"), {"labels": IGNORE_INDEX, "loss_mask": 0}
    fits = isinstance(pads, list) and len(pads) == len(columns) and all(type(pad) is int for pad in pads)
    if not fits or any(pad != wanted.get(name, max(pad, 0)) for name, pad in zip(columns, pads or (), strict=True)):
        shown = ["the tokenizer's" if name == "input_ids" else wanted.get(name, 0) for name in columns]
        faults.append(
            f"train_dataset.pad_token_id: must give one value for each of {list(columns)}, without loss, got {pads}; "
            f"set {shown}"
        )
    return faults


def refuse(faults: Sequence[str], where: str) -> None:
    """Raise when there are faults.

    Raises:
        RecipeError: one line for each.
    """
    if faults:
        raise RecipeError(list(faults), where)
