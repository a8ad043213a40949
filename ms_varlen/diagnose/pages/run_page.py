"""Pages about a run and about an alignment: one HTML file each, which needs no network, no script and no other file."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ms_varlen.checkpoint.resume import RECIPE_FILE
from ms_varlen.checkpoint.run_folder import METRICS_FILE
from ms_varlen.diagnose.align.alignment import Alignment
from ms_varlen.diagnose.pages.figures import (
    difference_figure,
    length_figure,
    loss_figure,
    padding_figure,
    svg_data,
    throughput_figure,
    two_losses_figure,
)
from ms_varlen.errors import CheckpointError
from ms_varlen.files import write_atomically

REPORT_FILE = "report.html"
PLAN_FILE = "plan.json"
FIRST_STEPS = 5
"""Steps at a run's beginning, slowed by compiling, that the median speed leaves out."""

LEDGER_ROWS = {
    "total": "everything the source gave",
    "trained": "trained in an epoch",
    "skipped": "skipped, not finite",
    "pending": "not reached",
    "left_over": "left over at the epoch's end",
    "held_out": "held out for evaluation",
    "cut": "cut off overlong documents",
    "dropped": "dropped by cleaning (whole documents)",
}
PLAN_NOTES = {
    "shapes.kind": "how sizes are told to the graph",
    "shapes.min": "smallest size of a micro-batch, tokens",
    "shapes.max": "largest size of a micro-batch, tokens",
    "shapes.divisor": "every size is a multiple of it",
    "shapes.max_segments": "most attention segments of a micro-batch",
    "graphs.train": "graphs of the training step",
    "graphs.apply": "graphs of the optimizer",
    "graphs.eval": "graphs of evaluation",
    "shapes.buckets": "sizes of a micro-batch, tokens",
    "world_size": "ranks",
    "steps_per_epoch": "optimizer steps of the first epoch",
    "micro_batches_per_step": "on each rank; their gradients are summed",
    "batch_overhead": "computed / real - 1 of rows padded to their micro-batch's longest",
    "length_mixing": "1: lengths within a micro-batch differ as by chance, 0: sorted apart",
    "length_mixing_of_steps": "the same of steps",
    "imbalance_mean": "slowest rank over the mean, - 1, mean over steps",
    "imbalance_max": "the same, worst step",
    "imbalance_mean_unbalanced": "before balancing",
    "imbalance_max_unbalanced": "before balancing, worst step",
    "epochs": "passes over the samples in the whole run",
    "samples": "for training",
    "eval_samples": "held out",
    "tokens_real": "tokens of samples, one epoch",
    "tokens_computed": "with padding, one epoch",
    "tokens_per_step": "real tokens, mean",
    "pad_ratio": "1 - real / computed",
    "padding_overhead": "computed / real - 1",
    "sizes": "different sizes of micro-batches",
    "max_segments_used": "most samples of a micro-batch",
    "lengths.samples": "for training",
    "parameters": "weights of the model",
}


def write_report(run_folder: Path) -> Path:
    """Write a run's page, `report.html`, from what the run wrote so far.

    Args:
        run_folder: holds `metrics.jsonl`, `plan.json` and `recipe.yaml`.
    Returns:
        path of the page.
    Raises:
        CheckpointError: a file is missing, or the metrics are unreadable or hold no step.
    """
    metrics = _read_metrics(run_folder / METRICS_FILE)
    plan = json.loads(_read(run_folder / PLAN_FILE))
    recipe = _read(run_folder / RECIPE_FILE).decode()
    skipped = [line for line in metrics if line.get("skipped")]
    applied = [line for line in metrics if not line.get("skipped")]
    page = render(
        "report.html.j2",
        title=f"{plan['mode']} · {_short(plan['parameters'])} parameters · {_progress(metrics, recipe)}",
        folder=run_folder,
        headline=_headline(metrics, plan),
        figures=_run_figures(metrics, plan),
        skipped=skipped,
        trained=[_total("applied steps", applied), _total("skipped steps", skipped)],
        ledger=_ledger(plan["ledger"]),
        plan=_plan_rows(plan),
        recipe=recipe,
    )
    path = run_folder / REPORT_FILE
    write_atomically(path, [page.encode()])
    return path


def write_align_report(result: Alignment, path: Path) -> Path:
    """Write the page of an alignment: the losses of two modes on the same samples, and how far they are apart.

    Args:
        result: what `align` returned; losses may be NaN or infinite.
        path: the page to write; missing folders are made.
    Returns:
        `path`.
    """
    verdict = result.verdict
    padded, loss = _floats(verdict.loss_padded), _floats(verdict.loss)
    steps = np.arange(1, loss.size + 1)
    losses = two_losses_figure(steps, padded, loss, ("padded", result.mode))
    differences = difference_figure(steps, np.abs(loss - padded), verdict.tolerance, verdict.first_failed_step)
    figures = [
        ("Loss of both", "Same weights at the start, same samples in every step.", svg_data(losses)),
        ("Difference of the losses", "Absolute, by step.", svg_data(differences)),
    ]
    page = render(
        "align.html.j2",
        title=f"Alignment of {result.mode} with {result.against}",
        result=result,
        verdict=verdict,
        figures=figures,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [page.encode()])
    return path


def _progress(metrics: list[dict], recipe: str) -> str:
    done, asked = metrics[-1]["step"], yaml.safe_load(recipe)["train"]["steps"]
    return f"{done:,} steps" if done == asked else f"{done:,} of {asked:,} steps"


def _headline(metrics: list[dict], plan: dict) -> list[dict]:
    """The numbers on top of a run's page: `name`, `value`, `note`, and `bad` where one asks for attention."""
    applied = [line for line in metrics if line["loss"] is not None]
    evaluated = [line for line in metrics if line.get("eval_loss") is not None]
    skipped = sum(bool(line.get("skipped")) for line in metrics)
    real, computed = (sum(line[key] for line in metrics) for key in ("tokens_real", "tokens_computed"))
    waiting = sum(line["data_ms"] for line in metrics) / sum(line["step_ms"] for line in metrics)
    graphs, planned = metrics[-1]["graphs_compiled"], plan["graphs"]
    more = [role for role, count in graphs.items() if count > planned.get(role, 0)]
    return [
        _number("Final loss", f"{applied[-1]['loss']:.4f}", _at(applied[-1]))
        if applied
        else _number("Final loss", "–", "every step was skipped", bad=True),
        _number("Final eval loss", f"{evaluated[-1]['eval_loss']:.4f}", _at(evaluated[-1]))
        if evaluated
        else _number("Final eval loss", "–", "no evaluation ran"),
        _number("Real tokens per second", f"{_median_speed(metrics):,.0f}", f"median; {waiting:.1%} data wait"),
        _number("Pad ratio", f"{1 - real / computed:.2%}", f"mean; planned {plan['pad_ratio']:.2%}"),
        _number(
            "Graphs compiled",
            str(sum(graphs.values())),
            ", ".join(f"{role} {count}" for role, count in graphs.items())
            + (f"; more than planned: {', '.join(more)}" if more else ""),
            bad=bool(more),
        ),
        _number("Skipped steps", f"{skipped:,}", f"of {len(metrics):,}", bad=skipped > 0),
    ]


def _number(name: str, value: str, note: str, bad: bool = False) -> dict:
    return {"name": name, "value": value, "note": note, "bad": bad}


def _at(line: dict) -> str:
    return f"nats per token, step {line['step']:,}"


def _median_speed(metrics: list[dict]) -> float:
    return float(np.median(_speed(metrics)[_left_out(metrics) :]))


def _left_out(metrics: list[dict]) -> int:
    """How many first steps the median speed leaves out: at most half of a very short run."""
    return min(FIRST_STEPS, len(metrics) // 2)


def _speed(metrics: list[dict]) -> np.ndarray:
    return _column(metrics, "tokens_real") / _column(metrics, "step_ms") * 1e3


def _run_figures(metrics: list[dict], plan: dict) -> list[tuple[str, str, str]]:
    """Heading, explanation and image of every picture of a run."""
    steps = _column(metrics, "step")
    evaluated = [line for line in metrics if line.get("eval_loss") is not None]
    loss = loss_figure(
        steps,
        _column(metrics, "loss"),
        [line["step"] for line in evaluated],
        [line["eval_loss"] for line in evaluated],
        [line["step"] for line in metrics if line.get("skipped")],
    )
    speed = throughput_figure(steps, _speed(metrics), _median_speed(metrics))
    largest = plan["shapes"]["max"] * plan["micro_batches_per_step"]
    padding = padding_figure(steps, _column(metrics, "tokens_real"), _column(metrics, "tokens_computed"), largest)
    first = metrics[_left_out(metrics)]["step"]
    figures = [
        ("Loss", "Mean over the supervised tokens of a step.", svg_data(loss)),
        ("Speed", f"Padding not counted; the median covers step {first} onwards.", svg_data(speed)),
        ("Padding", "What a step computed, and how much of it was samples.", svg_data(padding)),
    ]
    lengths = plan["lengths"]
    if "histogram" in lengths:
        marks = {name: lengths[name.lower()] for name in ("P50", "P90", "P99")} | {"max": lengths["max"]}
        histogram = lengths["histogram"]
        text = f"{lengths['samples']:,} training samples of {lengths['mean']:,.1f} tokens on average."
        image = svg_data(length_figure(histogram["edges"], histogram["counts"], marks))
        figures.append(("Lengths", text, image))
    return figures


def _total(name: str, lines: list[dict]) -> dict:
    """One row of what a run trained on."""
    keys = {"samples": "segments", "tokens": "tokens_real", "supervised": "tokens_supervised"}
    return {"name": name, "steps": len(lines)} | {k: sum(line[key] for line in lines) for k, key in keys.items()}


def _ledger(ledger: Mapping[str, Mapping[str, int]]) -> list[dict]:
    """Rows of the table of an epoch's ledger; its parts add up to the total."""
    return [
        {"name": name, **{unit: ledger[unit][part] for unit in ("samples", "tokens")}}
        for part, name in LEDGER_ROWS.items()
    ]


def _plan_rows(plan: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, str]]:
    """Key, value and explanation of a plan's numbers; the ledger and the histogram are shown elsewhere."""
    rows: list[tuple[str, Any, str]] = []
    for key, value in plan.items():
        path = f"{prefix}{key}"
        if path in ("ledger", "lengths.histogram"):
            continue
        if isinstance(value, Mapping):
            rows += _plan_rows(value, f"{path}.")
        else:
            rows.append((path, value, PLAN_NOTES.get(path, "tokens" if path.startswith("lengths.") else "")))
    return rows


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} must be in a run folder, found none in {path.parent}; give the folder that a run wrote to"
        ) from error


def _read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics file; a last one that is not complete, which a kill leaves, is not there yet."""
    lines = _read(path).decode().split("\n")[:-1]
    metrics = []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{path} line {number} must be a JSON object, found {text[:60]!r}; remove the line"
            ) from error
        metrics.append(line)
    if not metrics:
        raise CheckpointError(f"{path} must hold a step at least, found none; train one first")
    return metrics


def _column(metrics: list[dict], key: str) -> np.ndarray:
    return _floats([line[key] for line in metrics])


def _floats(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def render(template: str, **values: Any) -> str:
    """A page from one of the templates of this room; text is escaped."""
    environment = Environment(
        loader=PackageLoader("ms_varlen.diagnose.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"shown": _shown, "small": lambda value: "–" if value is None else f"{value:.2e}"}
    return environment.get_template(template).render(values)


def _shown(value: Any) -> str:
    """A value for people: thousands apart, four significant digits of a fraction, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _short(count: int) -> str:
    """A count as 950, 3.5 M or 7.2 B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)
