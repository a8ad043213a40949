"""Why a run is no faster than padding: each cause with its measured share, and the setting to change.

A few steps of the recipe are timed on this machine; the rest is counted on its plan. Seconds of padded rows are not
measured but scaled by the model's FLOPs, since both run the same operators.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.data.store.store import Progress
from ms_varlen.diagnose.doctor.doctor import COARSE
from ms_varlen.diagnose.doctor.findings import GREEN, YELLOW, Check, worst
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.modes import Mode
from ms_varlen.planning.cost import CostModel
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import TrainingGraphs, compile_graphs
from ms_varlen.workload.sizes import SampleLengths
from ms_varlen.workload.summary import PlanSummary
from ms_varlen.workload.translation import epoch_work, sampled, variant
from ms_varlen.workload.workload import Workload, prepare

AREA = "performance"
WARM_UP, TIMED = 2, 5
SHARE = 0.05
"""A cause that takes at least this share of the time is named."""
FEWEST_GRAPHS = 3
"""Train, apply, evaluate: what a range compiles."""
SMALL_GAIN = 1.1
"""A speed-up over padding below this is none."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a few steps took, in seconds.

    Attributes:
        step, data: medians of a step, and of its wait for data.
        compile: of one training graph.
        static_step: of one micro-batch by a static graph of the same size, over that of the recipe's graph; None where
            the recipe's graphs are static.
    """

    step: float
    data: float
    compile: float
    static_step: float | None


def examine_performance(recipe: Recipe, progress: Progress | None = None) -> dict[str, Any]:
    """Measure, and name the causes.

    Returns:
        `checks`, `worst`, `codes` as `doctor.examine` has them, and `shares` (of the run's time, by cause).
    """
    workload = prepare(recipe, progress)
    timing = measure(workload)
    facts = run_facts(workload, timing)
    checks = causes(recipe, facts)
    return {
        "checks": [check.to_dict() for check in checks],
        "worst": worst(checks),
        "codes": [check.code for check in checks if check.code is not None],
        "shares": {key: value for key, value in facts.items() if isinstance(value, float)},
    }


def measure(workload: Workload) -> Timing:
    """Time a few steps. Buckets are timed through one graph for all sizes, since only one compile is wanted."""
    recipe = workload.recipe
    if workload.shapes.kind == "buckets":
        shapes = workload.shapes.as_range()
        layout = dataclasses.replace(workload.layout, shapes=shapes)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": None})})
        workload = dataclasses.replace(workload, recipe=recipe, shapes=shapes, layout=layout)
    target = set_up_device(recipe.device, recipe.graph)
    graphs = TrainingGraphs(workload, target)
    begin = time.perf_counter()
    compile_graphs(recipe.graph.model_copy(update={"compile_cache": "off"}), graphs)
    compiled = (time.perf_counter() - begin) / max(graphs.predicted - 1, 1)  # apply is small next to the rest
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns)
    steps, waits = [], []
    plan = workload.plans.epoch(0)
    for step in range(min(WARM_UP + TIMED, plan.num_steps)):
        took, waited = _step(graphs, batches, [plan.micro_batch(step, m) for m in range(recipe.batch.micro_batches)])
        steps.append(took)
        waits.append(waited)
    first = min(WARM_UP, len(steps) - 1)
    static = None
    if workload.shapes.kind == "range" and recipe.graph.mode == "graph":
        static = _static_share(workload, graphs, batches, target)
    return Timing(statistics.median(steps[first:]), statistics.median(waits[first:]), compiled, static)


def _step(graphs: TrainingGraphs, batches: MicroBatches, parts: list[np.ndarray]) -> tuple[float, float]:
    """Seconds of one step, and of them for making its batches (which training does during the step)."""
    begin = time.perf_counter()
    micro_batches = [batches.micro_batch(ids) for ids in parts]
    waited = time.perf_counter() - begin
    graphs.step(micro_batches, 0.0)
    return time.perf_counter() - begin, waited


def _static_share(workload: Workload, graphs: TrainingGraphs, batches: MicroBatches, target: str) -> float:
    """Seconds of one micro-batch by a static graph of its size, over those of the recipe's graph, in turns."""
    columns = batches.micro_batch(workload.plans.epoch(0).micro_batch(0, 0))
    size, divisor = columns["input_ids"].size, workload.shapes.divisor
    shapes = TokenShapes("static", size, size, divisor, workload.shapes.max_segments)
    layout = dataclasses.replace(workload.layout, shapes=shapes)
    static = TrainingGraphs(dataclasses.replace(workload, shapes=shapes, layout=layout), target)
    seconds: dict[str, list[float]] = {"own": [], "static": []}
    for _ in range(WARM_UP + TIMED):
        for name, contender in (("own", graphs), ("static", static)):
            start = time.perf_counter()
            float(contender.accumulate(columns).asnumpy())
            seconds[name].append(time.perf_counter() - start)
    ratios = np.array(seconds["static"][WARM_UP:]) / np.array(seconds["own"][WARM_UP:])
    return float(np.quantile(ratios, 0.75))  # so that one step that was disturbed does not name a cause


def run_facts(workload: Workload, timing: Timing) -> dict[str, Any]:
    """What the causes are judged by, from the plan and the timing."""
    recipe, plan = workload.recipe, PlanSummary.of(workload)
    store = workload.store
    lengths = sampled(SampleLengths.of(store))
    cost = CostModel.of_decoder(workload.model_config)
    padded = variant(recipe, Mode.PADDED, "range", float(np.mean(lengths.train, dtype=np.float64)))
    own, base = epoch_work(recipe, lengths, cost), epoch_work(padded, lengths, cost)
    speedup = base.per_token(base.flops(cost)) / own.per_token(own.flops(cost))
    graphs = sum(workload.predicted_graphs.values())
    run = timing.step * recipe.train.steps
    compiling = timing.compile * graphs
    return {
        "graphs": graphs,
        "p50": float(plan.lengths["p50"]),
        "p99": float(plan.lengths["p99"]),
        "speedup_over_padded": speedup,
        "seconds_per_graph": timing.compile,
        "seconds_per_step": timing.step,
        "compile_share": compiling / (compiling + run),
        "compile_seconds": compiling,
        "excess_compile_share": timing.compile * max(graphs - FEWEST_GRAPHS, 0) / (compiling + run),
        "saved_seconds": max(speedup - 1, 0.0) * run,
        "alignment_share": plan.epoch.pad_ratio,
        "data_share": min(timing.data / timing.step, 1.0),
        "dynamic_share": 0.0 if timing.static_step is None else max(1 - timing.static_step, 0.0),
        "imbalance_share": 1 - 1 / (1 + plan.epoch.imbalance_mean),
    }


def causes(recipe: Recipe, facts: dict[str, Any]) -> list[Check]:
    """Each cause: yellow where it holds, green with its share where it does not; the largest share first.

    A spread that is too small has no share of its own: it comes last of those that hold.
    """
    shares = {
        "PERF-GRAPHS": facts["excess_compile_share"],
        "PERF-ALIGNMENT": facts["alignment_share"],
        "PERF-DATA": facts["data_share"],
        "PERF-DYNAMIC": facts["dynamic_share"],
        "PERF-BALANCE": facts["imbalance_share"],
    }
    found = sorted(_causes(recipe, facts), key=lambda check: -shares.get(check.code or "", 0.0))
    return sorted(found, key=lambda check: check.level == GREEN)


def _causes(recipe: Recipe, facts: dict[str, Any]) -> Iterator[Check]:
    yield _judged(
        facts["excess_compile_share"] >= 2 * SHARE,
        f"compiling {facts['graphs']} graphs takes {facts['compile_seconds']:.1f} s ({facts['compile_share']:.0%} of "
        f"the run), {recipe.mode} saves {facts['saved_seconds']:.1f} s over padding in {recipe.train.steps} steps",
        f"compiling more than the {FEWEST_GRAPHS} graphs of shapes.kind=range should take less than {2 * SHARE:.0%} of "
        "the run; fewer sizes (shapes.num_buckets), or range",
        "PERF-GRAPHS",
    )
    yield _judged(
        facts["p99"] < 2 * facts["p50"] or facts["speedup_over_padded"] < SMALL_GAIN,
        f"P99 is {facts['p99']:.0f} tokens, the median {facts['p50']:.0f}; by FLOPs {facts['speedup_over_padded']:.2f} "
        "times as fast as rows padded to the batch maximum",
        "P99 should be at least twice the median for varlen to pay; mode=padded may be as good",
        "PERF-SPREAD",
    )
    yield _judged(
        facts["alignment_share"] > COARSE.get(recipe.mode, 1.0),
        f"{facts['alignment_share']:.0%} of the computed tokens are padding (shapes.divisor {recipe.shapes.divisor})",
        f"padding should be at most {COARSE.get(recipe.mode, 1.0):.0%}; a smaller shapes.divisor, more sizes, or "
        "mode=varlen",
        "PERF-ALIGNMENT",
    )
    yield _judged(
        facts["data_share"] >= 0.5,
        f"making a step's batches takes {facts['data_share']:.1%} of the step, beside it",
        "it should take less than half, since it runs beside the step; put data.store_dir on a local disk",
        "PERF-DATA",
    )
    yield _judged(
        facts["dynamic_share"] >= 2 * SHARE,
        f"a static graph of the same size takes {1 - facts['dynamic_share']:.0%} of this graph's time",
        "a range should cost what a static size does; shapes.kind=buckets with a few sizes",
        "PERF-DYNAMIC",
    )
    yield _judged(
        facts["imbalance_share"] >= SHARE,
        f"ranks wait {facts['imbalance_share']:.1%} of the step for the slowest",
        "it should be below 5%; a larger batch.token_budget or more batch.micro_batches",
        "PERF-BALANCE",
    )


def _judged(holds: bool, found: str, remedy: str, code: str) -> Check:
    return Check(AREA, YELLOW, f"{found}: {remedy}", code) if holds else Check(AREA, GREEN, found)
