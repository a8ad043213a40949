"""Rules between keys of a recipe. A rule that reads a wrong, unknown or missing key stays silent.

So one fault never causes a second. Rules about sizes read a `Sizes`; the others name the keys that they take.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ms_varlen.data.config import BYTES, PYDOC, DataConfig, missing_files
from ms_varlen.faults import Fault, shown
from ms_varlen.limits import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, MAX_HEADS, MAX_SEGMENTS
from ms_varlen.models.config import DecoderConfig
from ms_varlen.modes import Mode
from ms_varlen.recipe.sizes import Listed, Sizes


def _rows_fit_mode(sizes: Sizes) -> Iterator[Fault]:
    if sizes.mode.sized_by_rows and sizes.rows is None:
        yield Fault("batch.rows", "must be a whole number >= 1 in a padded recipe, but is missing; set batch.rows=8")
    if not sizes.mode.sized_by_rows and sizes.rows is not None:
        yield Fault(
            "batch.rows",
            f"must be left out in a {sizes.mode} recipe, got {sizes.rows}; batch.token_budget sizes its micro-batches",
        )


def _window_fits_mode(sizes: Sizes) -> Iterator[Fault]:
    if sizes.window is not None and (sizes.mode is not Mode.PADDED or sizes.pad_to != "batch"):
        yield Fault(
            "batch.window",
            f"is only allowed in padded recipes with batch.pad_to batch, got {sizes.window}; elsewhere sorting within "
            "windows saves no padding: set it to null",
        )


def _budget_holds_a_sequence(sizes: Sizes) -> Iterator[Fault]:
    budget = sizes.token_budget
    if not sizes.mode.sized_by_rows and budget is not None and budget < sizes.seq_length:
        yield Fault(
            "batch.token_budget",
            f"must be >= model.seq_length ({sizes.seq_length}), got {budget}; raise it, or lower model.seq_length",
        )


def _budget_divides(sizes: Sizes) -> Iterator[Fault]:
    if not sizes.mode.sized_by_rows and sizes.token_budget is not None and sizes.token_budget % sizes.divisor:
        yield Fault("batch.token_budget", _not_a_multiple(sizes.token_budget, sizes.divisor))


def _segments_hold_the_rows(sizes: Sizes) -> Iterator[Fault]:
    if sizes.mode.sized_by_rows and sizes.rows is not None and sizes.rows > sizes.max_segments:
        yield Fault(
            "batch.rows",
            f"must be <= batch.max_segments ({sizes.max_segments}), since each row is a segment, got {sizes.rows}; "
            f"lower it, or raise batch.max_segments (up to {MAX_SEGMENTS})",
        )


def _segments_hold_the_tail(sizes: Sizes) -> Iterator[Fault]:
    if sizes.mode.sized_by_rows or sizes.token_budget is None or sizes.smallest > sizes.token_budget:
        return
    needed = sizes.tail_segments + (2 if sizes.mode.splits_rows else 1)
    if sizes.max_segments < needed:
        yield Fault(
            "batch.max_segments",
            f"must be >= {needed} (one sample, and the longest padded tail), got {sizes.max_segments}; raise it",
        )


def _rows_have_their_lengths(sizes: Sizes) -> Iterator[Fault]:
    if sizes.kind == "static" and sizes.mode.sized_by_rows and sizes.pad_to == "batch":
        yield Fault("batch.pad_to", "must be max with shapes.kind static, got batch; use max, or shapes.kind=range")
    if sizes.kind == "buckets" and sizes.mode.sized_by_rows and sizes.pad_to == "max":
        yield Fault("batch.pad_to", "must be batch with shapes.kind buckets, got max; use batch, or shapes.kind=static")


def _sizes_fit_mode(sizes: Sizes) -> Iterator[Fault]:
    of_recipe = f"must be null in a {sizes.mode} recipe with shapes.kind {sizes.kind}"
    if sizes.row_buckets is not None and not sizes.has_row_buckets:
        yield Fault(
            "shapes.row_buckets",
            f"{of_recipe}, got {sizes.row_buckets}; it is for bucketed recipes, and padded ones with kind buckets",
        )
    if sizes.token_sizes is not None and not sizes.has_token_sizes:
        yield Fault(
            "shapes.token_sizes",
            f"{of_recipe}, got {sizes.token_sizes}; it is for varlen and packed recipes with kind buckets",
        )


def _row_buckets_are_in_order(sizes: Sizes) -> Iterator[Fault]:
    if sizes.has_row_buckets:
        limit = sizes.seq_length
        yield from _list_faults("shapes.row_buckets", sizes.row_buckets, sizes.divisor, "model.seq_length", limit)


def _token_sizes_are_in_order(sizes: Sizes) -> Iterator[Fault]:
    limit = sizes.token_budget
    if sizes.has_token_sizes and limit is not None:
        yield from _list_faults("shapes.token_sizes", sizes.token_sizes, sizes.divisor, "batch.token_budget", limit)


def _list_faults(path: str, listed: Listed, divisor: int, limit_path: str, limit: int) -> Iterator[Fault]:
    if not isinstance(listed, list):
        return
    for i, size in enumerate(listed):
        if size < 1 or size % divisor:
            yield Fault(f"{path}[{i}]", _not_a_multiple(size, divisor))
            return
        if i and size <= listed[i - 1]:
            yield Fault(f"{path}[{i}]", f"must be > the size before it ({listed[i - 1]}), got {size}; sort the list")
            return
    if not listed or listed[-1] != limit:
        found = listed[-1] if listed else "an empty list"
        yield Fault(path, f"must end with {limit_path} ({limit}), got {found}; every sample needs a size that holds it")


def _num_buckets_is_used(sizes: Sizes) -> Iterator[Fault]:
    listed = isinstance(sizes.row_buckets, list) or isinstance(sizes.token_sizes, list)
    if sizes.num_buckets is not None and (listed or not (sizes.kind == "buckets" or sizes.has_row_buckets)):
        yield Fault(
            "shapes.num_buckets",
            f"must be null unless sizes are picked (auto), got {sizes.num_buckets}; it is for shapes.kind buckets and "
            "bucketed recipes without a list of their own",
        )


def _max_holds_a_micro_batch(sizes: Sizes) -> Iterator[Fault]:
    largest, found = sizes.largest, sizes.max
    if found is None or largest is None or found == largest:
        return
    source = "batch.rows * model.seq_length" if sizes.mode.sized_by_rows else "batch.token_budget"
    if sizes.kind == "static" or found < largest:
        sign = "equal" if sizes.kind == "static" else "be >="
        yield Fault("shapes.max", f"must {sign} {source} ({largest}), got {found}; set it to that or leave it out")
    elif found % sizes.divisor:
        yield Fault("shapes.max", _not_a_multiple(found, sizes.divisor))


def _min_divides(sizes: Sizes) -> Iterator[Fault]:
    if sizes.min is not None and sizes.min % sizes.divisor:
        yield Fault("shapes.min", _not_a_multiple(sizes.min, sizes.divisor))


def _range_is_open(sizes: Sizes) -> Iterator[Fault]:
    largest = sizes.max or sizes.largest
    if sizes.kind != "range" or largest is None or sizes.smallest < largest:
        return
    # MindSpore drops a Symbol's max that is not above its min, and the size would have no bound.
    yield Fault(
        "shapes.divisor" if sizes.min is None else "shapes.min",
        f"must be < the largest size ({largest} tokens), got {sizes.smallest}; lower it or use shapes.kind=static",
    )


def _min_fits_rows(sizes: Sizes) -> Iterator[Fault]:
    if sizes.kind != "range" or not sizes.mode.sized_by_rows or not sizes.rows or sizes.min is None:
        return
    smallest = sizes.rows * sizes.divisor
    if sizes.min > smallest:
        yield Fault(
            "shapes.min",
            f"must be <= batch.rows * shapes.divisor ({smallest}, the smallest micro-batch), got {sizes.min}; lower it "
            "or leave it out",
        )


def _rows_divide(sizes: Sizes) -> Iterator[Fault]:
    if sizes.mode.in_rows and sizes.seq_length % sizes.divisor:
        yield Fault("model.seq_length", _not_a_multiple(sizes.seq_length, sizes.divisor))


def _not_a_multiple(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    near = f"{below} or {below + divisor}" if below else f"{divisor}"
    return f"must be a multiple of shapes.divisor ({divisor}), got {value}; use {near}, or another divisor"


SIZE_RULES: tuple[Callable[[Sizes], Iterator[Fault]], ...] = (
    _rows_fit_mode,
    _window_fits_mode,
    _budget_holds_a_sequence,
    _budget_divides,
    _segments_hold_the_rows,
    _segments_hold_the_tail,
    _rows_have_their_lengths,
    _sizes_fit_mode,
    _row_buckets_are_in_order,
    _token_sizes_are_in_order,
    _num_buckets_is_used,
    _max_holds_a_micro_batch,
    _min_divides,
    _range_is_open,
    _min_fits_rows,
    _rows_divide,
)


def _budget_fits_mode(mode_name: str, written: int | None, budget: int | None, rows: int | None) -> Iterator[Fault]:
    mode = Mode(mode_name)
    if mode.sized_by_rows and written is not None:
        yield Fault(
            "batch.token_budget",
            f"must be left out (null) in a padded recipe, got {written}; batch.rows sizes its micro-batches",
        )
    if not mode.sized_by_rows and budget is None and rows is None:
        yield Fault(
            "batch.token_budget",
            f"must be a whole number >= 1 in a {mode} recipe, got null; set batch.token_budget=4096",
        )


def _pad_to_fits_mode(mode_name: str, written: str | None) -> Iterator[Fault]:
    if not Mode(mode_name).sized_by_rows and written is not None:
        yield Fault(
            "batch.pad_to", f"must be left out (null) in a {mode_name} recipe, got {written}; it is for padded rows"
        )


def _one_length(seq_length: int, max_position_embeddings: int) -> Iterator[Fault]:
    if seq_length != max_position_embeddings:
        yield Fault(
            "model.max_position_embeddings",
            f"must equal model.seq_length ({seq_length}), got {max_position_embeddings}; set both to the longest "
            "sequence to train",
        )


def _lengths_followed(mode_name: str, variable_seq_lengths: bool) -> Iterator[Fault]:
    follows = Mode(mode_name).follows_lengths
    if variable_seq_lengths != follows:
        wanted, other = ("true", Mode.PADDED) if follows else ("false", Mode.VARLEN)
        yield Fault(
            "model.variable_seq_lengths",
            f"must be {wanted} in a {mode_name} recipe, got {shown(variable_seq_lengths)}; set it to {wanted}, or "
            f"choose mode: {other}",
        )


def _shortest_fits(min_tokens: int, seq_length: int) -> Iterator[Fault]:
    if min_tokens > seq_length:
        yield Fault(
            "data.min_tokens", f"must be <= model.seq_length ({seq_length}), got {min_tokens}; no sample would be left"
        )


def _heads_fit_ascend(target: str, config: DecoderConfig) -> Iterator[Fault]:
    if target != "Ascend":
        return
    if config.head_dim % HEAD_DIM_MULTIPLE or config.head_dim > MAX_HEAD_DIM:
        yield Fault(
            "model.config.head_dim",
            f"must be a multiple of {HEAD_DIM_MULTIPLE} and <= {MAX_HEAD_DIM} on Ascend, got {config.head_dim}; "
            "change it or hidden_size",
        )
    if config.num_attention_heads > MAX_HEADS:
        yield Fault(
            "model.config.num_attention_heads",
            f"must be <= {MAX_HEADS} on Ascend, got {config.num_attention_heads}; lower it",
        )


def _model_has_the_positions(config: DecoderConfig, seq_length: int) -> Iterator[Fault]:
    if config.max_position_embeddings is not None and seq_length > config.max_position_embeddings:
        yield Fault(
            "model.seq_length",
            f"must be <= model.config.max_position_embeddings ({config.max_position_embeddings}, what the model was "
            f"made for), got {seq_length}; lower it, and model.max_position_embeddings with it",
        )


def _window_holds_a_sequence(config: DecoderConfig, seq_length: int) -> Iterator[Fault]:
    if config.sliding_window is not None and seq_length > config.sliding_window:
        yield Fault(
            "model.seq_length",
            f"must be <= model.config.sliding_window ({config.sliding_window} tokens; attention here sees the whole "
            f"sequence), got {seq_length}; lower it, or choose a model without a sliding window",
        )


def _weights_exist(init_from: str | None) -> Iterator[Fault]:
    if init_from is not None and not Path(init_from).expanduser().is_dir():
        yield Fault(
            "model.init_from",
            f"must be an existing folder of safetensors files or null, got {init_from}; correct the path",
        )


def _evaluation_has_documents(
    eval_every: int | None, eval_fraction: float, validation_source: str | list[str] | None
) -> Iterator[Fault]:
    if eval_every is not None and eval_fraction == 0 and validation_source is None:
        yield Fault(
            "train.eval_every",
            f"must be null when data.eval_fraction is 0, got {eval_every}; hold out documents "
            "(e.g. data.eval_fraction=0.02) or name a data.validation_source",
        )


def _graphs_fit(graph_mode: str, max_graphs: int, eval_every: int | None) -> Iterator[Fault]:
    needed = 2 if eval_every is None else 3  # train and apply, and eval; at least one size each
    if graph_mode == "graph" and max_graphs < needed:
        yield Fault("graph.max_graphs", f"must be >= {needed} (one graph per role), got {max_graphs}; raise it")


def _source_exists(source: str | list[str]) -> Iterator[Fault]:
    for field, text in missing_files(DataConfig(source=source, tokenizer=BYTES)):
        yield Fault(f"data.{field}", text)


def _validation_source_exists(source: str | list[str] | None) -> Iterator[Fault]:
    if source is not None:
        for _, text in missing_files(DataConfig(source=source, tokenizer=BYTES)):
            yield Fault("data.validation_source", text)


def _tokenizer_exists(tokenizer: str) -> Iterator[Fault]:
    for field, text in missing_files(DataConfig(source=PYDOC, tokenizer=tokenizer)):
        yield Fault(f"data.{field}", text)


def _resume_exists(resume: str) -> Iterator[Fault]:
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield Fault(
            "checkpoint.resume", f"must be auto, never or an existing checkpoint folder, got {resume}; correct the path"
        )


def _output_is_no_file(output_dir: str) -> Iterator[Fault]:
    if "\0" in output_dir:
        yield Fault("checkpoint.output_dir", f"must be a path, got {shown(output_dir)}; no path holds a NUL")
        return
    if Path(output_dir).expanduser().is_file():
        yield Fault(
            "checkpoint.output_dir", f"must be a folder or not exist, got the file {output_dir}; choose another"
        )


def _cache_is_no_file(compile_cache: str) -> Iterator[Fault]:
    if compile_cache not in ("auto", "off") and Path(compile_cache).expanduser().is_file():
        yield Fault(
            "graph.compile_cache", f"must be auto, off or a folder, got the file {compile_cache}; choose a folder"
        )


KeyRules = tuple[tuple[Callable[..., Iterator[Fault]], tuple[str, ...]], ...]
"""Rules and the keys that each takes, in this order. ``key?`` is the value as written, None if the key was left out."""

DATA_RULES: KeyRules = (
    (_source_exists, ("data.source",)),
    (_validation_source_exists, ("data.validation_source",)),
    (_tokenizer_exists, ("data.tokenizer",)),
    (_shortest_fits, ("data.min_tokens", "model.seq_length")),
)
RULES: KeyRules = (
    (_budget_fits_mode, ("mode", "batch.token_budget?", "batch.token_budget", "batch.rows")),
    (_pad_to_fits_mode, ("mode", "batch.pad_to?")),
    (_one_length, ("model.seq_length", "model.max_position_embeddings")),
    (_lengths_followed, ("mode", "model.variable_seq_lengths")),
    (_heads_fit_ascend, ("device.target", "model.config")),
    (_model_has_the_positions, ("model.config", "model.seq_length")),
    (_window_holds_a_sequence, ("model.config", "model.seq_length")),
    (_weights_exist, ("model.init_from",)),
    (_evaluation_has_documents, ("train.eval_every", "data.eval_fraction", "data.validation_source")),
    (_graphs_fit, ("graph.mode", "graph.max_graphs", "train.eval_every")),
    (_cache_is_no_file, ("graph.compile_cache",)),
    (_output_is_no_file, ("checkpoint.output_dir",)),
    (_resume_exists, ("checkpoint.resume",)),
)


def rule_faults(values: dict[str, Any]) -> list[Fault]:
    """The faults between keys.

    Args:
        values: by YAML path, the value of every key that is valid by itself, defaults filled in.
    """
    sizes = Sizes.from_values(values)
    of_sizes = [fault for rule in SIZE_RULES for fault in _of_valid_sizes(rule, sizes)]
    return [*_of_valid_keys(DATA_RULES, values), *of_sizes, *_of_valid_keys(RULES, values)]


def _of_valid_keys(rules: KeyRules, values: dict[str, Any]) -> Iterator[Fault]:
    for rule, keys in rules:
        if all(key in values for key in keys):
            yield from rule(*(values[key] for key in keys))


def _of_valid_sizes(rule: Callable[[Sizes], Iterator[Fault]], sizes: Sizes) -> list[Fault]:
    try:
        return list(rule(sizes))
    except AttributeError as error:
        if error.obj is not sizes:
            raise
        return []
