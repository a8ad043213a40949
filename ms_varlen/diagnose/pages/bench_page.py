"""The tables and the page of a bench. The terminal and the page show the same tables."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ms_varlen.diagnose.bench.contenders import MAIN
from ms_varlen.diagnose.pages.figures import BLUE, GREY, ORANGE, PALE_BLUE, RED, STYLE, svg_data
from ms_varlen.diagnose.pages.run_page import render
from ms_varlen.files import write_atomically

DASH = "–"
BASELINES = {"padded": "seq_length", "padded_batch": "batch max"}
"""What the padded contenders pad to."""

LIMITS = (
    "of limit: the speed-up as a share of sum f(padded) / sum f(real), where f counts logits of pads; our padded runs "
    "compute none, so what they really compute is less, and of computable is the share of that: its distance from 100% "
    "is speed that varlen lacks, the rest of the distance to the FLOP limit is the strong baseline"
)
"""What the shares mean, in a sentence."""

SHORT = {"padded": "max", "padded_batch": "batch"}
"""The same as `batch.pad_to` names it, for headings."""


@dataclasses.dataclass(frozen=True)
class BenchTable:
    """A table for people.

    Attributes:
        title: above it.
        head: headings; the first column holds names, the others numbers.
        rows: cells, as text.
        notes: what the headings mean.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]


def bench_tables(result: Mapping[str, Any], short: bool = False) -> list[BenchTable]:
    """The numbers of a bench: speed, speed against padding, what it costs to get there, and single measurements.

    Args:
        result: what `bench` returned.
        short: contenders under their names in options, for narrow places; else in words.
    """
    words = {name: name if short else row["label"] for name, row in result["contenders"].items()}
    tables = [_speed_table(result, words), _padding_table(result, words), _cost_table(result, words)]
    tables.append(BenchTable("Single measurements", ["what", "found"], single_measurements(result), []))
    absent = _absent_rows(result, words)
    if absent:
        tables.append(BenchTable("Did not run", ["contender", "why"], absent, []))
    return tables


def _speed_table(result: Mapping[str, Any], words: Mapping[str, str]) -> BenchTable:
    head = ["contender", "real tok/s", "q1–q3", "step s", "rate real", "rate all", "pad ratio", "loss diff"]
    rows = []
    for name, row in _ran(result):
        speed = row["real_tokens_per_second"]
        cells = [
            words[name],
            f"{speed['median']:,.0f}",
            f"{speed['q1']:,.0f}–{speed['q3']:,.0f}",
            f"{row['step_seconds']['median']:.3f}",
            f"{row['rate_share_real']:.0%}",
            _text(row.get("rate_share_computed"), "{:.0%}"),
            _text(row.get("pad_ratio"), "{:.1%}"),
            _text(row["loss_max_abs_diff"], "{:.1e}"),
        ]
        rows.append(cells)
    notes = [
        "rate real, rate all: FLOPs of real tokens, and of all computed, as a share of matrix products' rate",
        "loss diff: largest difference of a step's loss from varlen's, on the same samples",
    ]
    return BenchTable("Speed", head, rows, notes)


def _padding_table(result: Mapping[str, Any], words: Mapping[str, str]) -> BenchTable:
    limits, head = result["flop_limit"], ["contender"]
    for name in limits:
        head += [f"x {SHORT[name]}", "of limit", "of computable"]
    rows = []
    for name, row in _ran(result):
        cells = [words[name]]
        for base in limits:
            speedup = row["speedup_over"][base]
            cells.append(_text(speedup and speedup["median"], "{:.2f}"))
            for key in ("share_of_flop_limit", "share_of_computable_limit"):
                cells.append(DASH if base == name else _text(row[key][base], "{:.0%}"))
        rows.append(cells)
    notes = [
        f"x {SHORT[name]}: times faster than padded to {BASELINES[name]}; FLOP limit {limit['limit']:.2f}, "
        f"computable limit {limit['computable_limit']:.2f}"
        for name, limit in limits.items()
    ]
    return BenchTable("Against padding", head, rows, [*notes, LIMITS] if limits else [])


def _cost_table(result: Mapping[str, Any], words: Mapping[str, str]) -> BenchTable:
    head = ["contender", "graphs", "compile s", "warm", "to 1st step s", "warm", "done s", "warm"]
    rows = []
    for name, row in _ran(result):
        graphs, cold = row.get("graphs"), row.get("cold") or {}
        warm = row.get("warm") or {}
        if warm.get("compile_cache") != "warm":
            warm = {}
        cells = [words[name], DASH if graphs is None else str(sum(graphs.values()))]
        for key in ("compile_seconds", "to_first_step_seconds", "first_step_done_seconds"):
            in_steps = key == "compile_seconds" and row.get("compiled_in_steps")
            cells += ["in steps" if in_steps else _text(cold.get(key), "{:.2f}"), _text(warm.get(key), "{:.2f}")]
        rows.append([*cells, _text(row["peak_rss_mb"], "{:,.0f}"), _text(row.get("data_wait_share"), "{:.2%}")])
    notes = [
        "warm: in a new process with the compile cache filled; imports apart",
        "to 1st step: until the first step begins, and what it takes longer than the same step again; done: until it "
        "has been computed",
        "memory: most resident memory of the contender's process; data wait: share of a training loop's time",
    ]
    return BenchTable("Cost", [*head, "memory MB", "data wait"], rows, notes)


def single_measurements(result: Mapping[str, Any]) -> list[list[str]]:
    """What is measured once in a bench: a name and its finding each, in words."""
    rates = result["matrix_product_flops_per_second"]
    products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    rows = [["fp32 matrix products, GFLOP/s", products]]
    equal, pipeline, ranks = (result[key] for key in ("range_over_static_at_equal_tokens", "pipeline", "ranks"))
    if equal:
        text = f"{equal['median']:.3f} (q1–q3 {equal['q1']:.3f}–{equal['q3']:.3f}); T = {equal['tokens']}, "
        rows.append(["seconds of range / static at equal T", text + f"{equal['repeats']} pairs in turns"])
    if pipeline:
        speed, size = pipeline["tokens_per_second"], pipeline["store_mb"]
        rows.append(["data alone, caches dropped", f"{speed / 1e6:.1f} M tokens/s, store of {size:.3g} MB"])
    if ranks:
        rows.append([f"start of {ranks['ranks']} ranks, cold and warm cache", ranks.get("error") or _of_ranks(ranks)])
    if len(result["groups"]) > 1:
        groups = "; ".join(f"{group}: {', '.join(names)}" for group, names in result["groups"].items())
        rows.append(["in memory at once", groups])
    return rows


def _of_ranks(ranks: Mapping[str, Any]) -> str:
    seconds = {
        key: " and ".join(", ".join(f"{reply[key]:.2f}" for reply in ranks[state]) for state in ("cold", "warm"))
        for key in ("compile_seconds", "start_seconds")
    }
    states = {reply["compile_cache"] for reply in ranks["warm"]}
    shared = ranks["entries"] == 1 and states == {"warm"}
    text = f"compile s {seconds['compile_seconds']}; until the first step begins {seconds['start_seconds']}; "
    text += "one entry serves every rank" if shared else f"{ranks['entries']} entries, {', '.join(sorted(states))}"
    return text + (", losses bit-equal" if ranks["same_losses"] else ", LOSSES DIFFER")


def _absent_rows(result: Mapping[str, Any], words: Mapping[str, str]) -> list[list[str]]:
    rows = []
    for name, row in result["contenders"].items():
        if "missing" in row:
            rows.append([words[name], f"not installed: {row['missing']}"])
        if "error" in row:
            rows.append([words[name], row["error"]])
    return rows


def _ran(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, row) for name, row in result["contenders"].items() if "step_seconds" in row]


def _text(value: float | None, form: str) -> str:
    return DASH if value is None else form.format(value)


def write_bench_report(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a bench.

    Args:
        result: what `bench` returned.
        path: the page to write; missing folders are made.
    Returns:
        `path`.
    """
    ran = _ran(result)
    figures = [
        (
            "Real tokens per second",
            "Median step and quartiles. Pale: ours; orange: others.",
            svg_data(speed_figure(ran)),
        )
    ]
    for base, limit in result["flop_limit"].items():
        text = (
            "Median and quartiles over steps, same samples. FLOP limit: sum f(padded) / sum f(real); computable: what "
            "padded really computes over what the samples need."
        )
        compared = [(name, row) for name, row in ran if row["speedup_over"][base]]
        image = svg_data(speedup_figure(compared, base, limit))
        figures.append((f"Times faster than padded to {BASELINES[base]}", text, image))
    page = render(
        "bench.html.j2",
        title=f"Bench of {result['recipe']}",
        result=result,
        headline=_headline(result),
        figures=figures,
        tables=bench_tables(result),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [page.encode()])
    return path


def _headline(result: Mapping[str, Any]) -> list[dict]:
    """The numbers on top of the page: `name`, `value` and `note`."""
    main = result["contenders"][MAIN]
    rates = result["matrix_product_flops_per_second"]
    numbers = []
    if "step_seconds" in main:
        numbers.append(("Real tokens per second", f"{main['real_tokens_per_second']['median']:,.0f}", "varlen, range"))
        for base, limit in result["flop_limit"].items():
            name = f"Against padded to {BASELINES[base]}"
            note = (
                f"{main['share_of_flop_limit'][base]:.0%} of the FLOP limit {limit['limit']:.2f}, "
                f"{main['share_of_computable_limit'][base]:.0%} of the computable {limit['computable_limit']:.2f}"
            )
            numbers.append((name, f"{main['speedup_over'][base]['median']:.2f} x", note))
        for peer, found in result["peers"].items():
            if found:
                name, note = f"Against {peer}'s best", result["contenders"][found["best"]]["label"]
                numbers.append((name, f"{found['speedup']['median']:.2f} x", note))
        share = f"{main['rate_share_real']:.0%}"
        numbers.append(
            ("Of the matrix-product rate", share, f"real work; {max(rates.values()) / 1e9:.0f} GFLOP/s fp32")
        )
    equal = result["range_over_static_at_equal_tokens"]
    if equal:
        note = f"times the seconds of a static graph of T = {equal['tokens']}"
        numbers.append(("Range at equal T", f"{equal['median']:.2f} x", note))
    if result["pipeline"]:
        speed, size = (result["pipeline"][key] for key in ("tokens_per_second", "store_mb"))
        numbers.append(("Data alone", f"{speed / 1e6:.1f} M", f"tokens per second, store of {size:.3g} MB"))
    return [{"name": name, "value": value, "note": note} for name, value, note in numbers]


@matplotlib.rc_context(STYLE)
def speed_figure(ran: list[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Bars of real tokens per second, one for each contender that ran."""
    figure, axes = _bars(ran, [row["real_tokens_per_second"] for _, row in ran], "{x:,.0f}")
    axes.set_xlabel("real tokens per second")
    return figure


@matplotlib.rc_context(STYLE)
def speedup_figure(ran: list[tuple[str, Mapping[str, Any]]], base: str, limits: Mapping[str, float]) -> Figure:
    """Bars of the speed-up over a padded baseline, with the two limits as lines."""
    figure, axes = _bars(ran, [row["speedup_over"][base] for _, row in ran], "{x:.2f}")
    most = max(axes.get_xlim()[1], 1.05 * max(limits.values()))
    axes.set_xlim(0, most)
    # Side by side above the bars, so that close lines do not write over each other.
    lines = (("limit", "FLOP limit", "--", "left", 4), ("computable_limit", "computable", ":", "right", -4))
    for key, name, style, side, shift in lines:
        left = key == "limit" and limits[key] > 0.8 * most
        axes.axvline(limits[key], color=RED, linestyle=style, linewidth=1.2)
        axes.annotate(
            f"{name} {limits[key]:.2f}",
            (limits[key], 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4 if left else shift, 14 if left else 2),
            textcoords="offset points",
            ha="right" if left else side,
            color=RED,
        )
    axes.set_xlabel(f"times faster than padded to {BASELINES[base]}")
    return figure


def _bars(ran: list[tuple[str, Mapping[str, Any]]], values: list[Mapping[str, float]], form: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(ran)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(ran))
    medians = [value["median"] for value in values]
    colours = [BLUE if name == MAIN else PALE_BLUE if row["ours"] else ORANGE for name, row in ran]
    axes.barh(places, medians, color=colours, height=0.66)
    for place, value in zip(places, values, strict=True):
        axes.plot([value["q1"], value["q3"]], [place, place], color=GREY, linewidth=2, solid_capstyle="butt")
        text = form.replace("x", "0", 1).format(value["median"])
        axes.annotate(text, (max(value["q3"], value["median"]), place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [_short(row["label"]) for _, row in ran])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(value["q3"] for value in values))
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return figure, axes


def _short(label: str) -> str:
    """A label on two lines where it is long."""
    if len(label) <= 34:
        return label
    words, first = label.split(), ""
    while words and len(first) + len(words[0]) < 34:
        first = f"{first} {words.pop(0)}".strip()
    return f"{first}\n{' '.join(words)}"
