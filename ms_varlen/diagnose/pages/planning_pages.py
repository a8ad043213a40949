"""The tables and pages of `stats` and `plan`. The terminal and the page show the same tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ms_varlen.checkpoint.store import write_atomically
from ms_varlen.diagnose.pages.figures import svg_data
from ms_varlen.diagnose.pages.planning_figures import (
    bucket_figure,
    cumulative_figure,
    imbalance_figure,
    modes_figure,
    share_figure,
    sizes_figure,
    window_figure,
)
from ms_varlen.diagnose.pages.run_page import LEDGER_ROWS, render
from ms_varlen.planning.cost import CostModel
from ms_varlen.workload.summary import epoch_batches, rank_balance
from ms_varlen.workload.workload import Workload

LENGTH_ROWS = {
    "p50": "median",
    "p90": "P90",
    "p99": "P99",
    "max": "maximum",
    "mean": "mean",
    "tokens": "total tokens",
}
CLEANING_ROWS = {
    "in": "read",
    "kept": "kept",
    "cut": "cut",
    "empty": "dropped: empty",
    "control": "dropped: control characters",
    "duplicate": "dropped: duplicates",
    "short": "dropped: too short",
    "unsupervised": "dropped: nothing to learn",
    "overlong": "dropped: too long",
}


class PageTable(NamedTuple):
    """A table for people: the first column holds names; `wide` ones hold sentences, the others numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    wide: bool = False


def stats_tables(result: Mapping[str, Any]) -> list[PageTable]:
    """The numbers of `ms-varlen stats`."""
    documents, samples, cleaning = result["documents"], result["samples"], result["cleaning"]
    lengths = [["count", f"{documents['documents']:,}", f"{samples['samples']:,}"]]
    lengths += [[name, _tokens(documents[key]), _tokens(samples[key])] for key, name in LENGTH_ROWS.items()]
    cut = result["cut_at_p99"]
    cuts = [
        ["documents cut", f"{cut['documents_cut']:,}", f"{cut['documents_cut_share']:.2%}"],
        ["tokens cut", f"{cut['tokens_cut']:,}", f"{cut['tokens_cut_share']:.2%}"],
        ["FLOPs saved, padded to the longest", "", f"{cut['saved_padded']:.1%}"],
        ["FLOPs saved, nothing padded", "", f"{cut['saved_varlen']:.1%}"],
    ]
    shares = [
        [name.replace("_", " "), f"{share['tokens']:.1%}", f"{share['flops']:.1%}"]
        for name, share in result["shares"].items()
    ]
    cleaned = [
        [name, f"{cleaning[f'documents_{key}']:,}", f"{cleaning[f'tokens_{key}']:,}"]
        for key, name in CLEANING_ROWS.items()
    ]
    limit = f"samples: training, at most {result['seq_length']:,} tokens"
    return [
        PageTable(
            "Lengths, tokens",
            ["", "documents", "samples"],
            lengths,
            [f"documents: as before cutting, without those dropped as empty or too short; {limit}"],
        ),
        PageTable(
            "Share of real work",
            ["", "tokens", "FLOPs"],
            shares,
            [f"FLOPs of {result['flops_of']}; the maximum is the longest sample, {samples['max']:,}"],
        ),
        PageTable(f"If documents were cut at P99, {cut['limit']:,} tokens", ["", "number", "share"], cuts, []),
        PageTable("Cleaning", ["", "documents", "tokens"], cleaned, []),
        *comparison_tables(result, differing=False),
    ]


def comparison_tables(result: Mapping[str, Any], differing: bool) -> list[PageTable]:
    """The modes compared, and the advice; `differing` leaves out advice that the recipe follows already."""
    measured = any(row["speedup_by_seconds"] is not None for row in result["modes"])
    head = ["mode, shapes", "graphs", "steps", "max T", "GB", "tokens", "FLOPs", "x padded"]
    rows = []
    for row in result["modes"]:
        own = row["is_recipe"] and "target" not in result
        cells = [
            f"{row['mode']}, {row['kind']}{' *' if own else ''}",
            f"{row['graphs']}",
            f"{row['steps_per_epoch']:,}",
        ]
        cells += [f"{row['largest_tokens']:,}", f"{row['memory_gb']:.2f}", f"{row['real_token_share']:.1%}"]
        cells += [f"{row['real_flop_share']:.1%}", _gain(row["speedup_by_flops"])]
        rows.append([*cells, *([_gain(row["speedup_by_seconds"])] if measured else [])])
    notes = [
        f"{'' if 'target' in result else '*: the recipe. '}Steps of an epoch; GB: the least memory of a step at the "
        "largest T; tokens, FLOPs: real ones, of those computed",
        "x padded: times less work than padded to the longest sample, by FLOPs"
        + (", then by the seconds of calibration.json" if measured else ""),
        f"planned on {result['planned_on_samples']:,} samples",
    ]
    tables = [PageTable("Modes compared", [*head, *(["x measured"] if measured else [])], rows, notes)]
    advice = [row for row in result["advice"] if row["differs"] or not differing]
    if advice or differing:
        why = f"; {result['calibration_note']}" if result["calibration_note"] else ""
        notes = [f"decided by {result['decided_by']}{why}"]
        if result["advised_overrides"]:
            notes.append(f"to take it: {result['advised_command']}")
        tables.append(_advice_table(advice, notes, differing))
    return tables


def _advice_table(advice: Sequence[Mapping[str, Any]], notes: Sequence[str], differing: bool) -> PageTable:
    compared = any(row["is_key"] for row in advice)
    rows = []
    for row in advice:
        recipe = [_value(row["recipe"]) if row["is_key"] else ""] if compared else []
        rows.append([row["key"], _value(row["advised"]), *recipe, row["why"]])
    title = "Advice that differs from the recipe" if differing else "Advice"
    if not rows:
        rows = [["none", *([""] if compared else []), "", "the recipe is as advised"]]
    head = ["", "advised", *(["recipe"] if compared else []), "why"]
    return PageTable(title, head, rows, notes, wide=True)


def plan_tables(result: Mapping[str, Any]) -> list[PageTable]:
    """The tables of a plan that are not its plain numbers: ledger, windows, modes and advice."""
    ledger = [
        [name, f"{result['ledger']['samples'][part]:,}", f"{result['ledger']['tokens'][part]:,}"]
        for part, name in LEDGER_ROWS.items()
    ]
    windows = [
        [
            f"{row['window']:,}",
            f"{row['batch_overhead']:.1%}",
            f"{row['length_mixing']:.3f}",
            f"{row['length_mixing_of_steps']:.3f}",
        ]
        for row in result["windows"]
    ]
    note = "rows padded to the batch maximum; the smallest window sorts nothing; mixing 1 is as random as can be"
    return [
        *comparison_tables(result, differing=True),
        PageTable("Windows", ["samples", "padding", "length mixing", "of steps"], windows, [note]),
        PageTable("Where the corpus goes in an epoch", ["", "samples", "tokens"], ledger, []),
    ]


def write_stats_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of `ms-varlen stats`; missing folders are made. Returns `path`."""
    documents, histogram = result["documents"], result["histogram"]
    buckets: list[int] = next((row["advised"] for row in result["advice"] if row["key"] == "shapes.row_buckets"), [])
    marks = {name: documents[key] for key, name in (("p50", "median"), ("p90", "P90"), ("p99", "P99"), ("max", "max"))}
    edges = "Dotted: the edges of the advised buckets."
    figures = [
        (
            "Lengths",
            f"Documents before cutting. {edges}",
            svg_data(bucket_figure(histogram["edges"], histogram["counts"], marks, buckets)),
        ),
        ("Cumulative", edges, svg_data(cumulative_figure(result["cumulative"], buckets))),
    ]
    if result["shares"]:
        text = f"FLOPs of {result['flops_of']}."
        figures.append(("Share of real work", text, svg_data(share_figure(result["shares"]))))
    if result["windows"]:
        text = "Rows padded to the batch maximum."
        figures.append(("Sorting within windows", text, svg_data(window_figure(result["windows"]))))
    headline = [
        _number("Documents", f"{documents['documents']:,}", f"{documents['tokens']:,} tokens"),
        _number("Median", _tokens(documents["p50"]), "tokens"),
        _number("P99", _tokens(documents["p99"]), f"{documents['p99'] / documents['p50']:.1f} x the median"),
        _number("Maximum", _tokens(documents["max"]), "tokens"),
        *_share_numbers(result["shares"]),
    ]
    return _write(
        path,
        title=f"Lengths of {result['target']}",
        under=f"{result['source']}, tokenizer {result['tokenizer']}, seq_length {result['seq_length']:,}",
        headline=headline,
        figures=figures,
        tables=stats_tables(result),
        refused=result["refused"],
    )


def _share_numbers(shares: Mapping[str, Mapping[str, float]]) -> list[dict]:
    notes = {"padded_to_maximum": "padded to the maximum", "varlen": "varlen"}
    return [_number("Real FLOPs", f"{shares[key]['flops']:.1%}", note) for key, note in notes.items() if key in shares]


def write_plan_page(name: str, workload: Workload, result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of `ms-varlen plan`; missing folders are made.

    Args:
        name: of the recipe.
        workload: the plan.
        result: `describe_plan` of it and `plan_advice`.
        path: the page to write.
    Returns:
        `path`.
    """
    lengths, offsets, _ = epoch_batches(workload.plans)
    real = np.add.reduceat(lengths, offsets[:-1], dtype=np.int64)
    computed = workload.layout.computed_tokens(lengths, offsets)
    text = "T of an epoch's micro-batches, and their real tokens."
    figures = [
        ("Modes compared", "FLOPs of samples, of all that is computed.", svg_data(modes_figure(result["modes"]))),
        ("Sizes of micro-batches", text, svg_data(sizes_figure(real, computed, workload.shapes.max))),
    ]
    if result["windows"]:
        text = "Rows padded to the batch maximum: padding against randomness."
        figures.append(("Sorting within windows", text, svg_data(window_figure(result["windows"]))))
    if result["world_size"] > 1:
        text = f"{result['world_size']} ranks; a step waits for the slowest."
        balance = rank_balance(workload.plans, workload.layout, CostModel.of_decoder(workload.model_config))
        figures.append(("Balance over ranks", text, svg_data(imbalance_figure(balance.after, balance.before))))
    fill = float(real.mean()) / workload.shapes.max
    headline = [
        _number("Steps an epoch", f"{result['steps_per_epoch']:,}", f"{result['epochs']:g} epochs in the run"),
        _number("Real tokens a step", f"{result['tokens_per_step']:,.0f}", _ranks(result["world_size"])),
        _number("Fill", f"{fill:.1%}", f"of the largest T, {workload.shapes.max:,}"),
        _number("Pad ratio", f"{result['pad_ratio']:.2%}", "of computed tokens"),
        _number("Graphs", f"{sum(result['graphs'].values())}", _roles(result["graphs"])),
        _imbalance(result),
    ]
    return _write(
        path,
        title=f"Plan of {name}",
        under=f"{result['mode']} · shapes {workload.shapes.kind}, {workload.shapes.describe()} · "
        f"{result['parameters']:,} parameters · {workload.recipe.data.source}",
        headline=headline,
        figures=figures,
        tables=plan_tables(result),
        refused=result["refused"],
    )


def _imbalance(result: Mapping[str, Any]) -> dict:
    if result["world_size"] == 1:
        return _number("Slowest rank", "–", "one rank; --world-size plans for more")
    floor, before = result["imbalance_mean_floor"], result["imbalance_mean_unbalanced"]
    note = f"over the mean; before {before:.1%}, possible {floor:.1%}"
    return _number("Slowest rank", f"{result['imbalance_mean']:.1%}", note)


def _ranks(world_size: int) -> str:
    return "mean, one rank" if world_size == 1 else f"mean, over {world_size} ranks"


def _roles(graphs: Mapping[str, int]) -> str:
    return ", ".join(f"{role} {count}" for role, count in graphs.items())


def _write(path: Path, **values: Any) -> Path:
    page = render("planning.html.j2", **values)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [page.encode()])
    return path


def _number(name: str, value: str, note: str) -> dict:
    return {"name": name, "value": value, "note": note, "bad": False}


def _tokens(value: float) -> str:
    """Whole numbers as they are, others with one decimal."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _gain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value)
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
