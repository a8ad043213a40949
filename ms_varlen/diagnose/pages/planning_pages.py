"""The tables and pages of `stats` and `plan`. The terminal and the page show the same tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ms_varlen.diagnose.advise.advice import Advice
from ms_varlen.diagnose.advise.stats import Comparison, CorpusStats
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
from ms_varlen.files import write_atomically
from ms_varlen.planning.cost import CostModel
from ms_varlen.workload.summary import EpochNumbers, PlanSummary, epoch_batches, rank_balance
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


def stats_tables(stats: CorpusStats, command: str) -> list[PageTable]:
    """The numbers of `ms-varlen stats`; `command` takes the advice."""
    documents, samples, cleaning = stats.documents, stats.samples, dataclasses.asdict(stats.cleaning)
    lengths = [["count", f"{documents['documents']:,}", f"{samples['samples']:,}"]]
    lengths += [[name, _tokens(documents[key]), _tokens(samples[key])] for key, name in LENGTH_ROWS.items()]
    cut = stats.comparison.situation.cut_at_p99
    cuts = [
        ["documents cut", f"{cut['documents_cut']:,}", f"{cut['documents_cut_share']:.2%}"],
        ["tokens cut", f"{cut['tokens_cut']:,}", f"{cut['tokens_cut_share']:.2%}"],
        ["FLOPs saved, padded to the longest", "", f"{cut['saved_padded']:.1%}"],
        ["FLOPs saved, nothing padded", "", f"{cut['saved_varlen']:.1%}"],
    ]
    shares = [
        [name.replace("_", " "), f"{share['tokens']:.1%}", f"{share['flops']:.1%}"]
        for name, share in stats.comparison.shares.items()
    ]
    cleaned = [
        [name, f"{cleaning[f'documents_{key}']:,}", f"{cleaning[f'tokens_{key}']:,}"]
        for key, name in CLEANING_ROWS.items()
    ]
    limit = f"samples: training, at most {stats.seq_length:,} tokens"
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
            [f"FLOPs of {stats.flops_of}; the maximum is the longest sample, {samples['max']:,}"],
        ),
        PageTable(f"If documents were cut at P99, {cut['limit']:,} tokens", ["", "number", "share"], cuts, []),
        PageTable("Cleaning", ["", "documents", "tokens"], cleaned, []),
        *comparison_tables(stats.comparison, command, differing=False),
    ]


def comparison_tables(comparison: Comparison, command: str, differing: bool) -> list[PageTable]:
    """The modes compared, and the advice; `differing` leaves out advice that the recipe follows already."""
    modes = comparison.modes
    measured = any(row.speedup_by_seconds is not None for row in modes)
    head = ["mode, shapes", "graphs", "steps", "max T", "GB", "tokens", "FLOPs", "x padded"]
    rows = []
    for row in modes:
        own = row.is_recipe and differing
        cells = [
            f"{row.mode}, {row.kind}{' *' if own else ''}",
            f"{row.graphs}",
            f"{row.steps_per_epoch:,}",
        ]
        cells += [f"{row.largest_tokens:,}", f"{row.memory_gb:.2f}", f"{row.real_token_share:.1%}"]
        cells += [f"{row.real_flop_share:.1%}", _gain(row.speedup_by_flops)]
        rows.append([*cells, *([_gain(row.speedup_by_seconds)] if measured else [])])
    notes = [
        f"{'*: the recipe. ' if differing else ''}Steps of an epoch; GB: the least memory of a step at the "
        "largest T; tokens, FLOPs: real ones, of those computed",
        "x padded: times less work than padded to the longest sample, by FLOPs"
        + (", then by the seconds of calibration.json" if measured else ""),
        f"planned on {comparison.planned_on:,} samples",
    ]
    tables = [PageTable("Modes compared", [*head, *(["x measured"] if measured else [])], rows, notes)]
    advice = [row for row in comparison.advice if row.differs or not differing]
    if advice or differing:
        note = comparison.situation.calibration_note
        notes = [f"decided by {comparison.decided_by}" + (f"; {note}" if note else "")]
        if comparison.advised_overrides:
            notes.append(f"to take it: {command}")
        tables.append(_advice_table(advice, notes, differing))
    return tables


def _advice_table(advice: Sequence[Advice], notes: Sequence[str], differing: bool) -> PageTable:
    compared = any(row.is_key for row in advice)
    rows = []
    for row in advice:
        recipe = [_value(row.recipe) if row.is_key else ""] if compared else []
        rows.append([row.key, _value(row.advised), *recipe, row.why])
    title = "Advice that differs from the recipe" if differing else "Advice"
    if not rows:
        rows = [["none", *([""] if compared else []), "", "the recipe is as advised"]]
    head = ["", "advised", *(["recipe"] if compared else []), "why"]
    return PageTable(title, head, rows, notes, wide=True)


def plan_tables(plan: PlanSummary, comparison: Comparison, command: str) -> list[PageTable]:
    """The tables of a plan that are not its plain numbers: ledger, windows, modes and advice."""
    ledger = [
        [name, *(f"{getattr(plan.ledger[unit], part):,}" for unit in ("samples", "tokens"))]
        for part, name in LEDGER_ROWS.items()
    ]
    windows = [
        [
            f"{row.window:,}",
            f"{row.batch_overhead:.1%}",
            f"{row.length_mixing:.3f}",
            f"{row.length_mixing_of_steps:.3f}",
        ]
        for row in comparison.windows
    ]
    note = "rows padded to the batch maximum; the smallest window sorts nothing; mixing 1 is as random as can be"
    return [
        *comparison_tables(comparison, command, differing=True),
        PageTable("Windows", ["samples", "padding", "length mixing", "of steps"], windows, [note]),
        PageTable("Where the corpus goes in an epoch", ["", "samples", "tokens"], ledger, []),
    ]


def write_stats_page(stats: CorpusStats, command: str, path: Path) -> Path:
    """Write the page of `ms-varlen stats`; missing folders are made. Returns `path`."""
    documents, histogram, comparison = stats.documents, stats.histogram, stats.comparison
    buckets: list[int] = next((row.advised for row in comparison.advice if row.key == "shapes.row_buckets"), [])
    marks = {name: documents[key] for key, name in (("p50", "median"), ("p90", "P90"), ("p99", "P99"), ("max", "max"))}
    edges = "Dotted: the edges of the advised buckets."
    figures = [
        (
            "Lengths",
            f"Documents before cutting. {edges}",
            svg_data(bucket_figure(histogram["edges"], histogram["counts"], marks, buckets)),
        ),
        ("Cumulative", edges, svg_data(cumulative_figure(stats.cumulative, buckets))),
    ]
    if comparison.shares:
        text = f"FLOPs of {stats.flops_of}."
        figures.append(("Share of real work", text, svg_data(share_figure(comparison.shares))))
    if comparison.windows:
        text = "Rows padded to the batch maximum."
        figures.append(("Sorting within windows", text, svg_data(window_figure(comparison.windows))))
    headline = [
        _number("Documents", f"{documents['documents']:,}", f"{documents['tokens']:,} tokens"),
        _number("Median", _tokens(documents["p50"]), "tokens"),
        _number("P99", _tokens(documents["p99"]), f"{documents['p99'] / documents['p50']:.1f} x the median"),
        _number("Maximum", _tokens(documents["max"]), "tokens"),
        *_share_numbers(comparison.shares),
    ]
    return _write(
        path,
        title=f"Lengths of {stats.target}",
        under=f"{stats.source}, tokenizer {stats.tokenizer}, seq_length {stats.seq_length:,}",
        headline=headline,
        figures=figures,
        tables=stats_tables(stats, command),
        refused=comparison.refused,
    )


def _share_numbers(shares: Mapping[str, Mapping[str, float]]) -> list[dict]:
    notes = {"padded_to_maximum": "padded to the maximum", "varlen": "varlen"}
    return [_number("Real FLOPs", f"{shares[key]['flops']:.1%}", note) for key, note in notes.items() if key in shares]


def write_plan_page(
    name: str, workload: Workload, plan: PlanSummary, comparison: Comparison, command: str, path: Path
) -> Path:
    """Write the page of `ms-varlen plan`; missing folders are made.

    Args:
        name: of the recipe.
        workload: of the recipe.
        plan, comparison: its numbers, and the modes compared.
        command: takes the advice.
        path: the page to write.
    Returns:
        `path`.
    """
    lengths, offsets, _ = epoch_batches(workload.plans)
    real = np.add.reduceat(lengths, offsets[:-1], dtype=np.int64)
    computed = workload.layout.computed_tokens(lengths, offsets)
    text = "T of an epoch's micro-batches, and their real tokens."
    figures = [
        ("Modes compared", "FLOPs of samples, of all that is computed.", svg_data(modes_figure(comparison.modes))),
        ("Sizes of micro-batches", text, svg_data(sizes_figure(real, computed, workload.shapes.max))),
    ]
    epoch = plan.epoch
    if comparison.windows:
        text = "Rows padded to the batch maximum: padding against randomness."
        figures.append(("Sorting within windows", text, svg_data(window_figure(comparison.windows))))
    if epoch.world_size > 1:
        text = f"{epoch.world_size} ranks; a step waits for the slowest."
        balance = rank_balance(workload.plans, workload.layout, CostModel.of_decoder(workload.model_config))
        figures.append(("Balance over ranks", text, svg_data(imbalance_figure(balance.after, balance.before))))
    fill = float(real.mean()) / workload.shapes.max
    headline = [
        _number("Steps an epoch", f"{epoch.steps_per_epoch:,}", f"{plan.epochs:g} epochs in the run"),
        _number("Real tokens a step", f"{epoch.tokens_per_step:,.0f}", _ranks(epoch.world_size)),
        _number("Fill", f"{fill:.1%}", f"of the largest T, {workload.shapes.max:,}"),
        _number("Pad ratio", f"{epoch.pad_ratio:.2%}", "of computed tokens"),
        _number("Graphs", f"{sum(plan.graphs.values())}", _roles(plan.graphs)),
        _imbalance(epoch),
    ]
    return _write(
        path,
        title=f"Plan of {name}",
        under=f"{plan.mode} · shapes {workload.shapes.kind}, {workload.shapes.describe()} · "
        f"{plan.parameters:,} parameters · {workload.recipe.data.source}",
        headline=headline,
        figures=figures,
        tables=plan_tables(plan, comparison, command),
        refused=comparison.refused,
    )


def _imbalance(epoch: EpochNumbers) -> dict:
    if epoch.world_size == 1:
        return _number("Slowest rank", "–", "one rank; --world-size plans for more")
    floor, before = epoch.imbalance_mean_floor, epoch.imbalance_mean_unbalanced
    note = f"over the mean; before {before:.1%}, possible {floor:.1%}"
    return _number("Slowest rank", f"{epoch.imbalance_mean:.1%}", note)


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
    """Whole numbers without decimals, others with one."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _gain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value)
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
