"""The pictures of the pages of `stats` and `plan`: plain arrays in, a `Figure` out; see `figures`."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from ms_varlen.diagnose.advise.stats import ModeNumbers
from ms_varlen.diagnose.pages.figures import BLUE, GREY, ORANGE, PALE_BLUE, SIZE, STYLE, length_figure
from ms_varlen.planning.rows import WindowTrade

MOST_BINS = 64
THOUSANDS = StrMethodFormatter("{x:,.0f}")


@matplotlib.rc_context(STYLE)
def bucket_figure(
    edges: Sequence[int], counts: Sequence[int], marks: Mapping[str, float], boundaries: Sequence[int]
) -> Figure:
    """How long documents are, and where the bucket edges lie.

    Args:
        edges: [k+1] bounds of the bins, tokens.
        counts: [k] documents in each.
        marks: lengths to point out, by name.
        boundaries: [K] bucket edges, tokens.
    """
    figure = length_figure(edges, counts, marks)
    (axes,) = figure.axes
    _bucket_edges(axes, boundaries)
    axes.set_xlabel("length of a document (tokens)")
    axes.set_ylabel("documents")
    figure.legend(loc="outside lower center", handlelength=1)
    return figure


@matplotlib.rc_context(STYLE)
def cumulative_figure(cumulative: Mapping[str, Sequence[float]], boundaries: Sequence[int]) -> Figure:
    """Shares of documents and of tokens in documents up to a length; see `statistics.length_cumulative`."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    lengths = np.array(cumulative["lengths"], np.float64)
    if lengths[-1] > 10 * lengths[0]:
        axes.set_xscale("log")
    _bucket_edges(axes, boundaries)
    axes.plot(lengths, cumulative["documents"], color=BLUE, label="documents")
    axes.plot(lengths, cumulative["tokens"], color=ORANGE, label="their tokens")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("length of a document (tokens)")
    axes.set_ylabel("share up to this length")
    axes.legend(loc="upper left")
    return figure


@matplotlib.rc_context(STYLE)
def share_figure(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Real tokens and FLOPs as shares of those computed, by way of laying out."""
    figure, axes = _bars([name.replace("_", " ") for name in shares])
    places = np.arange(len(shares))
    for shift, unit, colour in ((-0.19, "tokens", PALE_BLUE), (0.19, "flops", BLUE)):
        values = np.array([share[unit] for share in shares.values()])
        axes.barh(places + shift, values, height=0.36, color=colour, label=unit.replace("flops", "FLOPs"))
        _percent_labels(axes, places + shift, values)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def modes_figure(modes: Sequence[ModeNumbers]) -> Figure:
    """Real FLOPs as a share of those computed, for each mode and kind of shapes; the recipe's own stands out."""
    labels = [f"{row.mode}, {row.kind}" + (" (recipe)" if row.is_recipe else "") for row in modes]
    figure, axes = _bars(labels)
    values, places = np.array([row.real_flop_share for row in modes]), np.arange(len(modes))
    axes.barh(places, values, height=0.7, color=[ORANGE if row.is_recipe else PALE_BLUE for row in modes])
    _percent_labels(axes, places, values)
    axes.set_xlabel("real FLOPs of those computed")
    return figure


@matplotlib.rc_context(STYLE)
def sizes_figure(real: np.ndarray, computed: np.ndarray, largest: int) -> Figure:
    """How large micro-batches are.

    Args:
        real, computed: [k] tokens of each, of samples and with padding.
        largest: the largest T that the shapes allow.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    # Whole steps between possible sizes, else bins of one and of two sizes alternate.
    step = int(np.gcd.reduce(computed))
    if 16 * step > largest:  # few sizes: bins narrow enough to see where they lie
        step = max(1, largest // MOST_BINS)
    width = step * -(-largest // (MOST_BINS * step))
    edges = np.arange(-(-largest // width) + 1) * width
    counts, reals = (np.histogram(-(-tokens // width) - 0.5, np.arange(edges.size))[0] for tokens in (computed, real))
    axes.stairs(counts, edges, fill=True, color=PALE_BLUE, label="T")
    axes.stairs(reals, edges, color=BLUE, linewidth=1.2, label="real tokens")
    axes.axvline(largest, color=ORANGE, linestyle="--", linewidth=1, label=f"largest T {largest:,}")
    axes.set_xlim(0, largest * 1.03)
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set_xlabel("size of a micro-batch (tokens)")
    axes.set_ylabel("micro-batches of an epoch")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


@matplotlib.rc_context(STYLE)
def window_figure(windows: Sequence[WindowTrade]) -> Figure:
    """Padding that sorting within windows saves, and mixing that it costs, by window."""
    figure = Figure(figsize=SIZE, layout="constrained")
    padding, mixing = figure.subplots(2, 1, sharex=True)
    sizes = [row.window for row in windows]
    padding.plot(sizes, [row.batch_overhead for row in windows], "o-", color=ORANGE)
    padding.set_ylim(0)
    padding.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    padding.set_ylabel("padding\n(of real tokens)")
    steps = [row.length_mixing_of_steps for row in windows]
    mixing.plot(sizes, steps, "s-", color=GREY, alpha=0.45, linewidth=5, markersize=9, label="of steps")  # may be equal
    mixing.plot(sizes, [row.length_mixing for row in windows], "o-", color=BLUE, label="of micro-batches")
    mixing.set_ylim(0, 1.2)
    mixing.set_ylabel("length mixing\n(1 = random)")
    mixing.set_xscale("log")
    mixing.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    mixing.set_xlabel("window (samples sorted together)")
    mixing.legend(loc="upper right", ncols=2)
    figure.align_ylabels()
    return figure


@matplotlib.rc_context(STYLE)
def imbalance_figure(after: np.ndarray, before: np.ndarray) -> Figure:
    """How far the slowest rank is over the mean in each step, after [n] and before [m] samples are dealt over ranks."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(0, max(float(before.max()), float(after.max()), 1e-3) * 1.02, 41)
    counts = [np.histogram(values, edges)[0] / values.size for values in (after, before)]
    axes.stairs(counts[0], edges, fill=True, color=PALE_BLUE, label=f"balanced, mean {after.mean():.1%}")
    axes.stairs(counts[1], edges, color=ORANGE, linewidth=1.3, label=f"before balancing, mean {before.mean():.1%}")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("work of the slowest rank over the mean")
    axes.set_ylabel("share of the steps")
    axes.legend(loc="upper right")
    return figure


def _bucket_edges(axes: Axes, boundaries: Sequence[int]) -> None:
    for number, boundary in enumerate(boundaries):
        label = None if number else f"{len(boundaries)} bucket edges"
        axes.axvline(boundary, color=GREY, linestyle=":", linewidth=0.9, zorder=0.9, label=label)


def _bars(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Axes for horizontal bars from 0 to 100 %, the first on top."""
    figure = Figure(figsize=(SIZE[0], max(SIZE[1], 0.7 + 0.25 * len(labels))), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(np.arange(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xticks(np.arange(0, 1.01, 0.2))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(False, axis="y")
    axes.set_xlabel("real work of that computed")
    return figure, axes


def _percent_labels(axes: Axes, places: np.ndarray, values: np.ndarray) -> None:
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1%}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
