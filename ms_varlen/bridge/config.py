"""The keys of `train_dataset.data_loader` with `type: VarlenDataLoader`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ms_varlen.data.store.files import MANIFEST
from ms_varlen.data.store.store import TokenStore
from ms_varlen.errors import DataError, RecipeError
from ms_varlen.faults import shown
from ms_varlen.limits import MAX_SEGMENTS
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import Recipe, parse_recipe

LOADER_TYPE = "VarlenDataLoader"
MONITOR_TYPE = "VarlenMonitor"
LOADER = "train_dataset.data_loader"
PACKED_COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids", "actual_seq_len")
"""Columns of MindFormers' TND route in the order in which it names them; `actual_seq_len` must come last."""

SMALLEST_PACKED_LENGTH = 2048
"""MindFormers' models refuse the compressed mask for rows below this."""

HARMLESS = {"create_attention_mask": False, "shuffle": False, "use_broadcast_data": None}
"""Keys of MindFormers' own loader that may stay, with the value that they must have (None: any); they do nothing."""

SHIFTED = "labels are shifted already and a handler would shift them again; remove it"
OLD_KEYS = {
    "handler": SHIFTED,
    "packing": SHIFTED,
    "adaptor_config": "set create_compressed_eod_mask and compressed_eod_mask_length instead",
    "dataset_dir": "name the text with data: {source: ...} instead",
    "create_attention_mask": "segments come from actual_seq_len, not from a dense mask; set it to False",
    "shuffle": "the plan shuffles by seed; set it to False",
    **dict.fromkeys(
        ("load_func", "path", "split", "data_files", "streaming"), "name the text with data: {source: ...} instead"
    ),
}
"""Keys of MindFormers' own loaders that would be wrong here, and what to do."""

PLACEHOLDER = {"source": "pydoc", "tokenizer": "bytes"}
"""The data section of a recipe whose token store is prepared already; nothing reads it."""

KEYS = {
    "batch.max_segments": f"{LOADER}.compressed_eod_mask_length",
    "batch.micro_batches": "runner_config.batch_size",
    "batch.rows": "runner_config.batch_size",
    "batch.token_budget": f"{LOADER}.seq_length",
    "batch.window": f"{LOADER}.window",
    "data.": f"{LOADER}.data.",
    "model.config": f"{LOADER}.model",
    "model.seq_length": f"{LOADER}.longest_sample",
}
"""Keys of a recipe of ours, and those that they come from."""


class LoaderConfig(BaseModel):
    """The settings of our loader in a MindFormers YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_length: int = Field(ge=2, description="tokens of a row; the same as model.model_config.seq_length")
    data: dict[str, Any] | None = Field(
        None, description="the data section of one of our recipes; eval_fraction is 0 if left out"
    )
    store: str | None = Field(None, description="folder of a prepared token store, in place of data")
    mode: Literal["packed", "varlen", "padded"] = Field(
        "packed",
        description="packed: rows filled with samples that fit; varlen: rows filled with samples in shuffled order; "
        "padded: a row for each sample",
    )
    longest_sample: int | None = Field(
        None, ge=2, description="most tokens of a packed sample, at most seq_length, which it is if null"
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps of the whole run, over as many epochs as needed; one epoch if null"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the order of samples")
    pad_to: Literal["max", "batch"] = Field(
        "max", description="padded only. max: rows of seq_length; batch: left to train_dataset.dynamic_batch"
    )
    window: int | None = Field(
        None, ge=1, description="padded rows with pad_to batch: samples per window that are sorted by length"
    )
    divisor: int | None = Field(
        None, ge=1, description="with pad_to batch: that of train_dataset, whose rows the monitor counts"
    )
    remainder: int | None = Field(None, ge=1, description="with pad_to batch: that of train_dataset")
    model: dict[str, Any] = Field(
        {"hidden_size": 4096}, description="the model.config of one of our recipes; ranks are balanced by its work"
    )
    create_compressed_eod_mask: bool = Field(False, description="MindFormers' switch of the TND route")
    compressed_eod_mask_length: int = Field(
        128, ge=1, le=MAX_SEGMENTS, description="entries of actual_seq_len in a row"
    )

    @property
    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return not Mode(self.mode).in_rows

    def recipe(self, batch_size: int, longest_sample: int) -> Recipe:
        """The recipe of ours whose plan and layout make the rows.

        Args:
            batch_size: rows of a step and rank.
            longest_sample: most tokens of a sample.
        Raises:
            RecipeError: what is wrong with `data`, `model` or the sizes, under the keys of a MindFormers YAML.
        """
        packed = self.packed
        if packed:
            batch: dict[str, Any] = {
                "token_budget": self.seq_length,
                "micro_batches": batch_size,
                "max_segments": self.compressed_eod_mask_length,
            }
        else:
            batch = {"rows": batch_size, "pad_to": self.pad_to, "window": self.window, "max_segments": MAX_SEGMENTS}
        longest = self.seq_length if not packed else longest_sample
        sections = {
            "mode": self.mode,
            "data": {"eval_fraction": 0.0, **(PLACEHOLDER if self.data is None else self.data)},
            "batch": batch,
            "shapes": {"kind": "static" if packed or self.pad_to == "max" else "range", "divisor": 1},
            "model": {
                "config": dict(self.model),
                "variable_seq_lengths": packed,
                "seq_length": longest,
                "max_position_embeddings": longest,
            },
            "train": {"steps": self.steps or 1, "learning_rate": 1.0, "seed": self.seed},
            "graph": {"mode": "pynative"},
            "checkpoint": {"output_dir": "output"},
        }
        try:
            return parse_recipe(sections, where=LOADER_TYPE)
        except RecipeError as error:
            raise RecipeError([_renamed(fault) for fault in error.faults], LOADER_TYPE) from error

    def open_store(self) -> TokenStore | None:
        """The prepared store, if there is one.

        Raises:
            DataError: it cannot be used, or holds samples that do not fit.
        """
        if self.store is None:
            return None
        if not (Path(self.store) / MANIFEST).is_file():
            raise DataError(
                f"train_dataset.data_loader.store must be the folder of a prepared token store, got {self.store}, "
                "which is none; ms-varlen plan RECIPE --json prepares one and prints its folder, or give data instead"
            )
        store, longest = TokenStore.open(self.store), self.longest_sample or self.seq_length
        if store.train.longest > longest:
            raise DataError(
                f"train_dataset.data_loader.store must hold samples of at most {longest} tokens, got one of "
                f"{store.train.longest}; raise {'seq_length' if self.longest_sample is None else 'longest_sample'}, or "
                "prepare the store with a smaller model.seq_length"
            )
        return store


def _renamed(fault: str) -> str:
    """A fault of the recipe that the loader's keys make, under the key of the YAML that it came from."""
    for ours, theirs in KEYS.items():
        if fault.startswith(ours):
            return theirs + fault[len(ours) :]
    return fault


def dynamic_length(tokens: int, divisor: int, remainder: int) -> int:
    """The length that MindFormers' `dynamic_batch` pads rows of at most `tokens` tokens to."""
    return -(-(tokens - remainder) // divisor) * divisor + remainder


def read_loader_config(keys: Mapping[str, Any]) -> LoaderConfig:
    """The checked keys of the loader.

    Args:
        keys: the section `train_dataset.data_loader` without `type` and `auto_register`.
    Raises:
        RecipeError: one line for each fault.
    """
    faults, kept = [], {}
    for key, value in keys.items():
        if key in HARMLESS and HARMLESS[key] in (None, value):
            continue
        if key in OLD_KEYS:
            if value is not None:
                faults.append(f"{key}: must be left out with {LOADER_TYPE}, got {shown(value)}; {OLD_KEYS[key]}")
            continue
        kept[key] = value
    try:
        config = LoaderConfig(**kept)
    except ValidationError as error:
        faults += [_field_fault(details) for details in error.errors(include_url=False)]
        raise RecipeError(faults, f"train_dataset.data_loader ({LOADER_TYPE})") from None
    faults += _rule_faults(config)
    if faults:
        raise RecipeError(faults, f"train_dataset.data_loader ({LOADER_TYPE})")
    return config


def _field_fault(details: Any) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        allowed = ", ".join(LoaderConfig.model_fields)
        return f"{path}: must be a known key, got {shown(details['input'])}; remove it; allowed here: {allowed}"
    found = "nothing" if details["type"] == "missing" else shown(details["input"])
    description = LoaderConfig.model_fields[str(details["loc"][0])].description
    return f"{path}: {details['msg']}, got {found}; it is: {description}"


def _rule_faults(config: LoaderConfig) -> list[str]:
    faults = []
    if (config.data is None) == (config.store is None):
        faults.append("data: either data or store must be given; set data: {source: corpus.jsonl, tokenizer: ...}")
    if config.longest_sample is not None and config.longest_sample > config.seq_length:
        faults.append(
            f"longest_sample: must be <= seq_length ({config.seq_length}), got {config.longest_sample}; lower it"
        )
    sizes = (config.divisor, config.remainder)
    if config.pad_to == "batch" and None in sizes:
        faults.append(
            "divisor, remainder: must be those of train_dataset with pad_to batch, found none; give both here too"
        )
    elif config.pad_to == "max" and sizes != (None, None):
        faults.append("divisor, remainder: must be left out but with pad_to batch; remove them")
    if config.packed:
        if not config.create_compressed_eod_mask:
            faults.append(
                f"create_compressed_eod_mask: must be True in mode {config.mode}, else attention crosses samples; "
                "set it to True, or mode: padded"
            )
        if config.seq_length < SMALLEST_PACKED_LENGTH:
            faults.append(
                f"seq_length: must be >= {SMALLEST_PACKED_LENGTH} in mode {config.mode} (MindFormers' compressed "
                f"mask), got {config.seq_length}; raise it and model.model_config.seq_length, or set mode: padded"
            )
        if config.pad_to != "max" or config.window is not None:
            faults.append(f"pad_to, window: must be left out in mode {config.mode}; they are for mode: padded")
        return faults
    if config.create_compressed_eod_mask:
        faults.append("create_compressed_eod_mask: must be False in mode padded; remove it, or set mode: packed")
    if config.longest_sample is not None:
        faults.append(
            f"longest_sample: must be left out in mode padded, got {config.longest_sample}: a row holds one sample of "
            "up to seq_length tokens; set seq_length"
        )
    return faults


def check_columns(config: LoaderConfig, columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns to yield, in the order of `train_dataset.input_columns`.

    Raises:
        RecipeError: a needed column is missing, or one is named that the mode does not have.
    """
    wanted = PACKED_COLUMNS if config.packed else PACKED_COLUMNS[:-1]
    needed = set(wanted) if config.packed else set(PACKED_COLUMNS[:3])
    found = tuple(columns or ())
    repeated = len(set(found)) < len(found)
    wrong = not needed <= set(found) or not set(found) <= set(wanted) or repeated
    if wrong or (config.packed and found[-1] != PACKED_COLUMNS[-1]):
        shown = list(found) if columns else "nothing"
        optional = "" if config.packed else " (position_ids may be left out)"
        raise RecipeError(
            [
                f"train_dataset.input_columns must be {list(wanted)}{optional} in mode {config.mode}, got {shown}; set "
                "input_columns and construct_args_key to that"
                + (", or remove both: without actual_seq_len samples attend to each other" if config.packed else "")
            ],
            LOADER_TYPE,
        )
    return found
