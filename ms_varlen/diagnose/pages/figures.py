"""The pictures of the report pages, drawn without a display or global state of matplotlib.

Every function takes plain arrays and returns a `Figure`; `svg_data` makes the text of an image out of one. A value that
is not there (a skipped step) is NaN and shows as a gap. Equal input gives equal bytes. Lines of many steps become
pixels: as paths, 50,000 steps made a page of 9 MB.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

BLUE, PALE_BLUE, ORANGE, RED, GREY = "#1b6ca8", "#a9cbe3", "#d9731a", "#b3261e", "#7a828c"
SIZE = (6.4, 3.5)  # inches
MOST_VECTOR_STEPS = 2000
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "ms_varlen",
}


@matplotlib.rc_context(STYLE)
def svg_data(figure: Figure) -> str:
    """A figure as a `data:` address that an `img` shows; text is drawn as paths, so no font is needed."""
    text = io.BytesIO()
    figure.savefig(text, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(text.getvalue()).decode()


@matplotlib.rc_context(STYLE)
def loss_figure(
    steps: np.ndarray, loss: np.ndarray, eval_steps: Sequence[int], eval_loss: Sequence[float], skipped: Sequence[int]
) -> Figure:
    """Loss by step.

    Args:
        steps: [n] step numbers.
        loss: [n] training loss, nats per token.
        eval_steps, eval_loss: where an evaluation ran, and what it gave.
        skipped: numbers of the steps that were skipped.
    """
    figure, axes = _step_axes(steps)
    _noisy_line(axes, steps, loss, "train")
    if len(eval_steps):
        axes.plot(eval_steps, eval_loss, "o-", color=ORANGE, markeredgecolor="white", markersize=6, label="eval")
    if len(skipped):
        bottom = axes.get_xaxis_transform()
        axes.plot(skipped, np.full(len(skipped), 0.03), "x", color=RED, transform=bottom, label="skipped step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="upper right")
    return figure


@matplotlib.rc_context(STYLE)
def throughput_figure(steps: np.ndarray, tokens_per_second: np.ndarray, median: float) -> Figure:
    """Real tokens per second by step [n], and the median that the page names."""
    figure, axes = _step_axes(steps)
    _noisy_line(axes, steps, tokens_per_second, "step")
    axes.axhline(median, color=ORANGE, linestyle="--", label=f"median {median:,.0f}")
    axes.set_ylim(0, float(np.nanmax(tokens_per_second)) * 1.2)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("real tokens per second")
    axes.legend(loc="lower right", ncols=3)
    return figure


@matplotlib.rc_context(STYLE)
def padding_figure(steps: np.ndarray, real: np.ndarray, computed: np.ndarray, largest: int) -> Figure:
    """Padding by step: the ratio above; below, the tokens it comes from, as running means.

    Args:
        steps: [n] step numbers.
        real: [n] tokens of samples.
        computed: [n] tokens that the model computed, padding included.
        largest: the most tokens a step can compute.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    ratio_axes, token_axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    _set_step_axis(ratio_axes, steps)
    ratio_axes.set_xlabel("")
    _set_step_axis(token_axes, steps)
    ratio = 100 * (1 - real / computed)
    _noisy_line(ratio_axes, steps, ratio, "pad ratio")
    ratio_axes.set_ylim(0, min(100.0, max(1.0, float(ratio.max()) * 1.25)))
    ratio_axes.set_ylabel("pad ratio (%)")
    window = _window(steps)
    real, computed = running_mean(real, window), running_mean(computed, window)
    token_axes.axhline(largest, color=GREY, linestyle="--", label=f"largest size {largest:,}")
    token_axes.fill_between(steps, real, computed, color=ORANGE, alpha=0.35, linewidth=0, label="padding")
    _line_with_lone_points(token_axes, steps, computed, color=ORANGE, linewidth=1, label="computed")
    _line_with_lone_points(token_axes, steps, real, color=BLUE, linewidth=1, label="real")
    token_axes.set_ylim(0, max(largest, int(computed.max())) * 1.45)
    token_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    token_axes.set_ylabel("tokens per step")
    token_axes.legend(loc="upper right", ncols=4)
    figure.align_ylabels()
    return figure


@matplotlib.rc_context(STYLE)
def length_figure(edges: Sequence[int], counts: Sequence[int], marks: Mapping[str, float]) -> Figure:
    """How long the samples are.

    Args:
        edges: [k+1] bounds of the bins, tokens.
        counts: [k] samples in each.
        marks: lengths to point out, by name.
    """
    figure, axes = _axes()
    axes.stairs(counts, edges, fill=True, color=PALE_BLUE)
    axes.stairs(counts, edges, color=BLUE, linewidth=0.8)
    if edges[-1] > 10 * edges[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(0, max(counts) * 1.5)
    for row, (name, length) in enumerate(marks.items()):
        # A row of its own for each name, so that lengths close to each other stay readable.
        height = 0.97 - 0.075 * row
        axes.axvline(length, ymax=height, color=ORANGE, linewidth=1)
        beyond_half = axes.transLimits.transform(axes.transScale.transform((length, 1)))[0] > 0.5
        axes.annotate(
            f"{name} {length:,.0f}",
            (length, height),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4 if beyond_half else 4, 0),
            textcoords="offset points",
            ha="right" if beyond_half else "left",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axes.set_xlabel("length of a sample (tokens)")
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


@matplotlib.rc_context(STYLE)
def two_losses_figure(steps: np.ndarray, reference: np.ndarray, loss: np.ndarray, names: tuple[str, str]) -> Figure:
    """Two loss curves [n], nats per token; the first is drawn broad, so that both are seen when equal."""
    figure, axes = _step_axes(steps)
    _line_with_lone_points(axes, steps, reference, color=ORANGE, alpha=0.45, linewidth=5, markersize=9, label=names[0])
    _line_with_lone_points(axes, steps, loss, color=BLUE, label=names[1])
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="upper right")
    return figure


@matplotlib.rc_context(STYLE)
def difference_figure(steps: np.ndarray, difference: np.ndarray, tolerance: float, failed_step: int | None) -> Figure:
    """Differences [n] >= 0 by step on a log axis, with the largest allowed one and the first step above it.

    A log axis has no place for 0: equal values are drawn as triangles on its lower edge.
    """
    figure, axes = _step_axes(steps)
    positive = difference[(difference > 0) & np.isfinite(difference)]
    floor = float(positive.min(initial=tolerance / 100)) / 3
    _line_with_lone_points(
        axes, steps, np.where(difference > 0, difference, np.nan), color=BLUE, label="|difference|", linewidth=1.1
    )
    equal = steps[difference == 0]
    if equal.size:
        axes.plot(equal, np.full(equal.size, floor * 1.3), "v", color=GREY, markersize=3, label="equal")
    axes.axhline(tolerance, color=RED, linestyle="--", label=f"tolerance {tolerance:g}")
    if failed_step is not None:
        axes.axvline(failed_step, ymax=0.77, color=RED, linewidth=0.9, label=f"first failed step {failed_step}")
    axes.set_yscale("log")
    highest = float(positive.max(initial=tolerance))
    axes.set_ylim(floor, highest * (highest / floor) ** 0.3)  # room for the legend
    axes.set_ylabel("|difference| (nats per token)")
    axes.legend(loc="upper right", ncols=2)
    return figure


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values [n] among the `window` (odd, <= n) around each; NaN where there is none."""
    finite, kernel = np.isfinite(values), np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), kernel, "same")
    counts = np.convolve(finite, kernel, "same")
    return np.divide(sums, counts, out=np.full(values.size, np.nan), where=counts > 0.5)


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    return figure, figure.subplots()


def _step_axes(steps: np.ndarray) -> tuple[Figure, Axes]:
    figure, axes = _axes()
    _set_step_axis(axes, steps)
    return figure, axes


def _set_step_axis(axes: Axes, steps: np.ndarray) -> None:
    axes.set_xlim(float(steps[0]) - 0.5, float(steps[-1]) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step")
    if steps.size > MOST_VECTOR_STEPS:
        axes.set_rasterization_zorder(2.1)  # lines and areas; axes and text lie above


def _window(steps: np.ndarray) -> int:
    """Steps of a running mean: odd, 1 for a short run."""
    return steps.size // 40 | 1


def _noisy_line(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str) -> None:
    """A series as it is, and its running mean on top where there are steps enough for one."""
    window = _window(steps)
    if window == 1:
        _line_with_lone_points(axes, steps, values, color=BLUE, label=label)
        return
    _line_with_lone_points(axes, steps, values, color=PALE_BLUE, linewidth=0.9, label=label)
    axes.plot(steps, running_mean(values, window), color=BLUE, linewidth=1.7, label=f"mean of {window:,} steps")


def _line_with_lone_points(axes: Axes, steps: np.ndarray, values: np.ndarray, markersize: int = 4, **style) -> None:
    """A line with gaps; a value between two gaps, which a line does not show, gets a marker."""
    finite = np.concatenate([[False], np.isfinite(values), [False]])
    lone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    (line,) = axes.plot(steps, values, **style)
    axes.plot(steps[lone], values[lone], "o", color=line.get_color(), alpha=line.get_alpha(), markersize=markersize)
