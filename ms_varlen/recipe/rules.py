"""Rules between keys of a recipe. Each names the keys it needs and runs only where all of them are valid.

So one fault never causes a second: a rule whose keys are wrong, unknown or missing stays silent.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ms_varlen.data.config import BYTES, PYDOC, DataConfig, missing_files
from ms_varlen.faults import Fault, shown
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.modes import Mode
from ms_varlen.recipe.model_rules import MODEL_RULES


def _one_length(seq_length: int, max_position_embeddings: int) -> Iterator[Fault]:
    if seq_length != max_position_embeddings:
        yield Fault(
            "model.max_position_embeddings",
            f"must equal model.seq_length ({seq_length}), got {max_position_embeddings}; set both to the longest "
            "sequence to train",
        )


def _lengths_followed(mode: Mode, variable_seq_lengths: bool) -> Iterator[Fault]:
    if variable_seq_lengths != mode.follows_lengths:
        wanted, other = ("true", Mode.PADDED) if mode.follows_lengths else ("false", Mode.VARLEN)
        yield Fault(
            "model.variable_seq_lengths",
            f"must be {wanted} in a {mode} recipe, got {shown(variable_seq_lengths)}; set it to {wanted}, or choose "
            f"mode: {other}",
        )


def _rows_fit_mode(mode: Mode, rows: int | None) -> Iterator[Fault]:
    if mode.sized_by_rows and rows is None:
        yield Fault(
            "batch.rows", "must be a whole number >= 1 in a padded recipe, but is missing; set batch.rows=8, say"
        )
    if not mode.sized_by_rows and rows is not None:
        yield Fault(
            "batch.rows", f"must be left out in a {mode} recipe, got {rows}; batch.token_budget sizes its micro-batches"
        )


def _budget_fits_mode(mode: Mode, written: int | None, budget: int | None, rows: int | None) -> Iterator[Fault]:
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


def _pad_to_fits_mode(mode: Mode, written: str | None) -> Iterator[Fault]:
    if not mode.sized_by_rows and written is not None:
        yield Fault("batch.pad_to", f"must be left out (null) in a {mode} recipe, got {written}; it is for padded rows")


def _window_fits_mode(mode: Mode, window: int | None, pad_to: str | None) -> Iterator[Fault]:
    if window is not None and (not mode.sized_by_rows or pad_to != "batch"):
        yield Fault(
            "batch.window",
            f"must be null but for padded recipes with batch.pad_to batch, got {window}; only there does sorting "
            "within windows save padding",
        )


def _budget_holds_a_sequence(mode: Mode, budget: int | None, seq_length: int) -> Iterator[Fault]:
    if not mode.sized_by_rows and budget is not None and budget < seq_length:
        yield Fault(
            "batch.token_budget",
            f"must be >= model.seq_length ({seq_length}), got {budget}; raise it, or lower model.seq_length",
        )


def _budget_divides(mode: Mode, budget: int | None, divisor: int) -> Iterator[Fault]:
    if not mode.sized_by_rows and budget is not None and budget % divisor:
        yield Fault("batch.token_budget", _not_a_multiple(budget, divisor))


def _rows_divide(mode: Mode, seq_length: int, divisor: int) -> Iterator[Fault]:
    if mode.in_rows and seq_length % divisor:
        yield Fault("model.seq_length", _not_a_multiple(seq_length, divisor))


def largest_tokens(mode: Mode, budget: int | None, rows: int | None, seq_length: int) -> int | None:
    """The largest T of a micro-batch, in tokens; None where the key that sizes the mode is missing."""
    if not mode.sized_by_rows:
        return budget
    return None if rows is None else rows * seq_length


def _max_holds_a_micro_batch(
    kind: str, shape_max: int | None, divisor: int, mode: Mode, budget: int | None, rows: int | None, seq_length: int
) -> Iterator[Fault]:
    largest = largest_tokens(mode, budget, rows, seq_length)
    if shape_max is None or largest is None or shape_max == largest:
        return
    source = "batch.rows * model.seq_length" if mode.sized_by_rows else "batch.token_budget"
    if kind == "static" or shape_max < largest:
        sign = "equal" if kind == "static" else "be >="
        yield Fault("shapes.max", f"must {sign} {source} ({largest}), got {shape_max}; set it to that or leave it out")
    elif shape_max % divisor:
        yield Fault("shapes.max", _not_a_multiple(shape_max, divisor))


def _min_divides(shape_min: int | None, divisor: int) -> Iterator[Fault]:
    if shape_min is not None and shape_min % divisor:
        yield Fault("shapes.min", _not_a_multiple(shape_min, divisor))


def _range_is_open(
    kind: str,
    shape_min: int | None,
    shape_max: int | None,
    divisor: int,
    mode: Mode,
    budget: int | None,
    rows: int | None,
    seq_length: int,
) -> Iterator[Fault]:
    largest = shape_max or largest_tokens(mode, budget, rows, seq_length)
    smallest = shape_min or divisor
    if kind != "range" or largest is None or smallest < largest:
        return
    # MindSpore drops a Symbol's max that is not above its min, and the size would have no bound.
    yield Fault(
        "shapes.divisor" if shape_min is None else "shapes.min",
        f"must be < the largest size ({largest} tokens), got {smallest}; lower it or use shapes.kind=static",
    )


def _min_fits_rows(kind: str, shape_min: int | None, divisor: int, mode: Mode, rows: int | None) -> Iterator[Fault]:
    if kind == "range" and mode.sized_by_rows and rows and shape_min is not None and shape_min > rows * divisor:
        yield Fault(
            "shapes.min",
            f"must be <= batch.rows * shapes.divisor ({rows * divisor}, the smallest micro-batch), got {shape_min}; "
            "lower it or leave it out",
        )


def _rows_have_their_lengths(kind: str, mode: Mode, pad_to: str | None) -> Iterator[Fault]:
    if kind == "static" and mode.sized_by_rows and pad_to == "batch":
        yield Fault("batch.pad_to", "must be max with shapes.kind static, got batch; use max, or shapes.kind=range")
    if kind == "buckets" and mode.sized_by_rows and pad_to == "max":
        yield Fault("batch.pad_to", "must be batch with shapes.kind buckets, got max; use batch, or shapes.kind=static")


def _sizes_fit_mode(
    kind: str, mode: Mode, row_buckets: list[int] | str | None, token_sizes: list[int] | str | None
) -> Iterator[Fault]:
    if row_buckets is not None and not has_row_buckets(mode, kind):
        yield Fault(
            "shapes.row_buckets",
            f"must be null in a {mode} recipe with shapes.kind {kind}, got {row_buckets}; it is for bucketed recipes, "
            "and padded ones with kind buckets",
        )
    if token_sizes is not None and not (kind == "buckets" and not mode.in_rows):
        yield Fault(
            "shapes.token_sizes",
            f"must be null in a {mode} recipe with shapes.kind {kind}, got {token_sizes}; it is for varlen and packed "
            "recipes with kind buckets",
        )


def has_row_buckets(mode: Mode, kind: str) -> bool:
    """Whether rows of a recipe have a few lengths: those of `shapes.row_buckets`."""
    return mode.splits_rows or (mode.in_rows and kind == "buckets")


def _row_buckets_are_in_order(
    kind: str, mode: Mode, divisor: int, seq_length: int, row_buckets: list[int] | str | None
) -> Iterator[Fault]:
    if has_row_buckets(mode, kind):
        yield from _list_faults("shapes.row_buckets", row_buckets, divisor, "model.seq_length", seq_length)


def _token_sizes_are_in_order(
    kind: str, divisor: int, mode: Mode, budget: int | None, token_sizes: list[int] | str | None
) -> Iterator[Fault]:
    if kind == "buckets" and not mode.in_rows and budget is not None:
        yield from _list_faults("shapes.token_sizes", token_sizes, divisor, "batch.token_budget", budget)


def _list_faults(
    path: str, sizes: list[int] | str | None, divisor: int, limit_path: str, limit: int
) -> Iterator[Fault]:
    if not isinstance(sizes, list):
        return
    for i, size in enumerate(sizes):
        if size < 1 or size % divisor:
            yield Fault(f"{path}[{i}]", _not_a_multiple(size, divisor))
            return
        if i and size <= sizes[i - 1]:
            yield Fault(f"{path}[{i}]", f"must be > the size before it ({sizes[i - 1]}), got {size}; sort the list")
            return
    if not sizes or sizes[-1] != limit:
        found = sizes[-1] if sizes else "an empty list"
        yield Fault(path, f"must end with {limit_path} ({limit}), got {found}; every sample needs a size that holds it")


def _num_buckets_is_used(
    kind: str,
    mode: Mode,
    row_buckets: list[int] | str | None,
    token_sizes: list[int] | str | None,
    num_buckets: int | None,
) -> Iterator[Fault]:
    listed = isinstance(row_buckets, list) or isinstance(token_sizes, list)
    if num_buckets is not None and (listed or not (kind == "buckets" or has_row_buckets(mode, kind))):
        yield Fault(
            "shapes.num_buckets",
            f"must be null unless sizes are picked (auto), got {num_buckets}; it is for shapes.kind buckets and "
            "bucketed recipes without a list of their own",
        )


def _segments_hold_the_tail(
    mode: Mode, kind: str, shape_min: int | None, divisor: int, budget: int | None, seq_length: int, max_segments: int
) -> Iterator[Fault]:
    smallest = shape_min or divisor
    if mode.sized_by_rows or budget is None or smallest > budget:
        return
    # A bucketed row is two segments, its sample and its own tail.
    needed = tail_segments(kind, smallest, budget, divisor, seq_length) + (2 if mode.splits_rows else 1)
    if max_segments < needed:
        yield Fault(
            "batch.max_segments",
            f"must be >= {needed} (one sample, and the longest padded tail), got {max_segments}; raise it",
        )


def tail_segments(kind: str, smallest: int, budget: int, divisor: int, seq_length: int) -> int:
    """The most segments of a padded tail; of a few sizes not known yet, as much as of one."""
    one_size = "range" if kind == "range" else "static"
    return TokenShapes(one_size, smallest, budget, divisor, max_segments=1).tail_segments(seq_length)


def _segments_hold_the_rows(mode: Mode, rows: int | None, max_segments: int) -> Iterator[Fault]:
    if mode.sized_by_rows and rows is not None and rows > max_segments:
        yield Fault(
            "batch.rows",
            f"must be <= batch.max_segments ({max_segments}), since each row is a segment, got {rows}; lower it, or "
            "raise batch.max_segments (up to 1024)",
        )


def _shortest_fits(min_tokens: int, seq_length: int) -> Iterator[Fault]:
    if min_tokens > seq_length:
        yield Fault(
            "data.min_tokens", f"must be <= model.seq_length ({seq_length}), got {min_tokens}; no sample would be left"
        )


def _evaluation_has_documents(
    eval_every: int | None, eval_fraction: float, validation_source: str | list[str] | None
) -> Iterator[Fault]:
    if eval_every is not None and eval_fraction == 0 and validation_source is None:
        yield Fault(
            "train.eval_every",
            f"must be null when data.eval_fraction is 0, got {eval_every}; hold out documents "
            "(data.eval_fraction=0.02, say) or name a data.validation_source",
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


def _not_a_multiple(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    near = f"{below} or {below + divisor}" if below else f"{divisor}"
    return f"must be a multiple of shapes.divisor ({divisor}), got {value}; use {near}, or another divisor"


_SIZE = ("mode", "batch.token_budget", "batch.rows", "model.seq_length")

RULES: tuple[tuple[Callable[..., Iterator[Fault]], tuple[str, ...]], ...] = (
    (_source_exists, ("data.source",)),
    (_validation_source_exists, ("data.validation_source",)),
    (_tokenizer_exists, ("data.tokenizer",)),
    (_shortest_fits, ("data.min_tokens", "model.seq_length")),
    (_rows_fit_mode, ("mode", "batch.rows")),
    (_budget_fits_mode, ("mode", "batch.token_budget?", "batch.token_budget", "batch.rows")),
    (_pad_to_fits_mode, ("mode", "batch.pad_to?")),
    (_budget_holds_a_sequence, ("mode", "batch.token_budget", "model.seq_length")),
    (_budget_divides, ("mode", "batch.token_budget", "shapes.divisor")),
    (_segments_hold_the_rows, ("mode", "batch.rows", "batch.max_segments")),
    (
        _segments_hold_the_tail,
        (
            "mode",
            "shapes.kind",
            "shapes.min",
            "shapes.divisor",
            "batch.token_budget",
            "model.seq_length",
            "batch.max_segments",
        ),
    ),
    (_window_fits_mode, ("mode", "batch.window", "batch.pad_to")),
    (_rows_have_their_lengths, ("shapes.kind", "mode", "batch.pad_to")),
    (_sizes_fit_mode, ("shapes.kind", "mode", "shapes.row_buckets", "shapes.token_sizes")),
    (_row_buckets_are_in_order, ("shapes.kind", "mode", "shapes.divisor", "model.seq_length", "shapes.row_buckets")),
    (_token_sizes_are_in_order, ("shapes.kind", "shapes.divisor", "mode", "batch.token_budget", "shapes.token_sizes")),
    (
        _num_buckets_is_used,
        ("shapes.kind", "mode", "shapes.row_buckets", "shapes.token_sizes", "shapes.num_buckets"),
    ),
    (_max_holds_a_micro_batch, ("shapes.kind", "shapes.max", "shapes.divisor", *_SIZE)),
    (_min_divides, ("shapes.min", "shapes.divisor")),
    (_range_is_open, ("shapes.kind", "shapes.min", "shapes.max", "shapes.divisor", *_SIZE)),
    (_min_fits_rows, ("shapes.kind", "shapes.min", "shapes.divisor", "mode", "batch.rows")),
    (_one_length, ("model.seq_length", "model.max_position_embeddings")),
    (_lengths_followed, ("mode", "model.variable_seq_lengths")),
    (_rows_divide, ("mode", "model.seq_length", "shapes.divisor")),
    *MODEL_RULES,
    (_evaluation_has_documents, ("train.eval_every", "data.eval_fraction", "data.validation_source")),
    (_graphs_fit, ("graph.mode", "graph.max_graphs", "train.eval_every")),
    (_cache_is_no_file, ("graph.compile_cache",)),
    (_output_is_no_file, ("checkpoint.output_dir",)),
    (_resume_exists, ("checkpoint.resume",)),
)
"""Each rule and the keys it takes, in this order. ``key?`` is the value as written, None where the key was left out."""


def rule_faults(values: dict[str, Any]) -> list[Fault]:
    """The faults between keys.

    Args:
        values: by YAML path, the value of every key that is valid by itself, defaults filled in.
    """
    if "mode" in values:
        values = values | {"mode": Mode(values["mode"])}
    return [
        fault
        for rule, needs in RULES
        if all(need in values for need in needs)
        for fault in rule(*(values[need] for need in needs))
    ]
