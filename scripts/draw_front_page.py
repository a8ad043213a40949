"""Draw the two pictures of README.md: docs/images/speed.svg and docs/images/token_axis.svg.

    python scripts/draw_front_page.py [--png FOLDER]

The speeds are in docs/images/speed.json, as one bench run recorded them. The token axis is the plan of the recipes
themselves: `quickstart` and `padded` share corpus and seed, so both take the samples in the same order. The built-in
corpus, and with it the second picture, depends a little on the Python version. Takes a few seconds.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ms_varlen.lengths import SeqLens
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.workload import Workload, prepare

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 8.4  # inches, 806 CSS pixels, about the width of a README on GitHub
POINTS = 9  # 12 CSS pixels
STYLE = {
    "svg.hashsalt": "ms_varlen",
    "font.size": POINTS,
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.6,
    "hatch.color": "#8a8a8a",
}
KINDS = {"varlen": "#d55e00", "padded": "#0072b2", "peer": "#8a8a8a"}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#7a5195")
GAP = 0.25  # between rows, whose height is 1


def speed_figure(run: dict) -> Figure:
    """Real tokens per second of each contender of a bench run, as recorded in speed.json."""
    bars = run["contenders"]
    figure = Figure(figsize=(WIDTH, 0.34 * len(bars) + 0.75), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(bars))[::-1]
    axes.barh(places, [bar["value"] for bar in bars], color=[KINDS[bar["kind"]] for bar in bars], height=0.72)
    for place, bar in zip(places, bars, strict=True):
        axes.text(bar["value"] + 40, place, f"{bar['value']:,}", va="center", fontsize=POINTS)
    axes.set_yticks(places, [bar["name"] for bar in bars])
    axes.set_xticks([])
    axes.set_xlim(0, 1.12 * max(bar["value"] for bar in bars))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("Real tokens per second (more is better)", loc="left", fontsize=POINTS + 1, weight="bold")
    axes.set_xlabel(f"{run['machine']}, fp32, one run of ms-varlen bench, {run['recorded']}", loc="left")
    return figure


def token_axis_figure(varlen: Workload, padded: Workload) -> Figure:
    """The first micro-batch of a varlen plan, above the padded micro-batches that hold the same samples."""
    lengths = np.asarray(varlen.store.train.lengths)
    ids = varlen.plans.epoch(0).micro_batch(0, 0)
    axis = varlen.layout.place(lengths[ids])
    plan, batches, seen = padded.plans.epoch(0), [], 0
    while seen < ids.size:
        batches.append(plan.micro_batch(len(batches), 0))
        seen += batches[-1].size
    assert np.array_equal(np.concatenate(batches)[: ids.size], ids), "both recipes must take the samples in one order"

    rows = padded.layout.rows
    figure = Figure(figsize=(WIDTH, 3.3))
    axes = figure.add_axes((0.01, 0.02, 0.98, 0.96))
    axes.set_xlim(-10, axis.tokens + 10)
    axes.set_ylim(rows * (1 + GAP) + 6.9, -1.6)
    axes.axis("off")
    axes.text(
        0,
        -0.5,
        f"varlen: {ids.size} samples on one axis, T = {axis.tokens:,}, "
        f"{axis.tokens - axis.real_tokens:,} tokens of padding",
        weight="bold",
    )
    _pads(axes, 0, 0, axis.tokens)
    for i, (start, length) in enumerate(zip(axis.starts, axis.seq_lens, strict=True)):
        _sample(axes, start, 0, length, i)
    placed = [padded.layout.place(lengths[batch]) for batch in batches]
    computed = sum(lens.tokens for lens in placed)
    real = sum(lens.real_tokens for lens in placed)
    axes.text(
        0,
        3.7,
        f"padded: the same samples (and {seen - ids.size} more) in {len(batches)} micro-batches of {rows} rows, "
        f"{computed:,} tokens, {computed - real:,} of padding",
        weight="bold",
    )
    left, first = 0.0, 0
    space = (axis.tokens - sum(lens.tokens // rows for lens in placed)) / max(1, len(placed) - 1)
    for lens in placed:
        _padded_rows(axes, lens, rows, left, 4.4, first)
        left += lens.tokens // rows + min(space, 250)
        first += lens.segments
    bottom = rows * (1 + GAP) + 5.2
    _pads(axes, 0, bottom, 90)
    longest = max(int(lens.seq_lens.max()) for lens in placed)
    axes.text(110, bottom + 0.8, "padding")
    axes.text(500, bottom + 0.8, f"one colour per sample; widths to scale, longest sample {longest:,} tokens")
    return figure


def _padded_rows(axes: Axes, lens: SeqLens, rows: int, left: float, top: float, first: int) -> None:
    width = lens.tokens // rows
    for row in range(rows):
        _pads(axes, left, top + row * (1 + GAP), width)
    for i, (start, length) in enumerate(zip(lens.starts, lens.seq_lens, strict=True)):
        _sample(axes, left, top + (start // width) * (1 + GAP), length, first + i)


def _pads(axes: Axes, left: float, top: float, width: float) -> None:
    axes.add_patch(Rectangle((left, top), width, 1, facecolor="#f2f2f2", edgecolor="#8a8a8a", hatch="////", lw=0))


def _sample(axes: Axes, left: float, top: float, length: float, number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    axes.add_patch(Rectangle((left, top), length, 1, facecolor=colour, edgecolor="white", lw=0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="also write both as PNG into this folder, to look at them")
    arguments = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        figures = {
            "speed": speed_figure(json.loads((IMAGES / "speed.json").read_text(encoding="utf-8"))),
            "token_axis": token_axis_figure(
                prepare(load_recipe(ROOT / "recipes/quickstart.yaml")),
                prepare(load_recipe(ROOT / "recipes/padded.yaml")),
            ),
        }
        for name, figure in figures.items():
            figure.savefig(IMAGES / f"{name}.svg", facecolor="white", metadata={"Date": None})
            if arguments.png:
                figure.savefig(arguments.png / f"{name}.png", facecolor="white", dpi=140)


if __name__ == "__main__":
    main()
