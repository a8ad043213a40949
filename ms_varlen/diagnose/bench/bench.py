"""The bench: the same steps by several contenders in turns, in one run on one machine; see `arena` for the turns."""

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.store.store import Progress
from ms_varlen.diagnose.align.alignment import alignment_warning
from ms_varlen.diagnose.bench import results
from ms_varlen.diagnose.bench.arena import Arena, BenchSettings, StartRanks, StartWorker, start_worker
from ms_varlen.diagnose.bench.contenders import MAIN, PEERS, Parts, bench_workload, step_parts
from ms_varlen.diagnose.bench.ranks import measure_ranks
from ms_varlen.files import write_atomically
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.workload.workload import Workload

logger = logging.getLogger("ms_varlen")

CALIBRATION_FILE = "calibration.json"


def bench(
    recipe: Recipe,
    settings: BenchSettings,
    on_round: Callable[[], None],
    progress: Progress | None = None,
    start: StartWorker = start_worker,
    start_ranks: StartRanks = measure_ranks,
) -> dict[str, Any]:
    """Run the contenders and compare them.

    Args:
        recipe: a varlen recipe.
        settings: who runs, and how many steps.
        on_round: told that a round of `settings.all_rounds` is done.
        progress: told how far the token store is, where one is built.
        start: makes a contender's process.
        start_ranks: see `measure_ranks`.
    Returns:
        `contenders` (a row each, `error` where it failed and `missing` where a package is not there), the machine's
        rate, the FLOP limits, and the calibration, which is also written into `output_dir`.
    """
    workload = bench_workload(recipe, progress)
    parts = step_parts(workload, settings.warmup + settings.steps)
    arena = Arena(recipe, recipe.checkpoint.output_dir / "bench", settings, start, start_ranks)
    arena.run(on_round)
    result = summarize(arena, workload, parts)
    result["warning"] = alignment_warning(recipe, result["versions"] or {})
    if result["warning"]:
        logger.warning("%s", result["warning"])
    if "calibration" in result:
        content = json.dumps(result["calibration"], indent=1).encode()
        write_atomically(recipe.checkpoint.output_dir / CALIBRATION_FILE, [content])
    return result


def summarize(arena: Arena, workload: Workload, parts: Parts) -> dict[str, Any]:
    """The numbers of a bench, from what its contenders said."""
    lengths = np.asarray(workload.store.train.lengths)
    timed = [lengths[np.concatenate(step)] for step in parts[arena.settings.warmup :]]
    rates = {body: float(np.median([reply[body] for reply in arena.rates])) for body in ("numpy", "mindspore")}
    judge = Judge(arena, timed, results.Work.of_decoder(workload.model_config), max(rates.values()))
    limits = {
        name: {key: value for key, value in limit.items() if not key.endswith("by_step")}
        for name, limit in judge.limits.items()
    }
    result = {
        "recipe": arena.recipe.checkpoint.output_dir.name,
        "machine": machine(),
        "versions": arena.facts[MAIN].get("versions"),
        "steps": arena.settings.steps,
        "warmup": arena.settings.warmup,
        "samples_per_step": [int(part.size) for part in timed],
        "real_tokens_per_step": [int(part.sum()) for part in timed],
        "parameters": workload.model_config.parameter_count(),
        "matrix_product_flops_per_second": rates,
        "flop_limit": limits,
        "range_over_static_at_equal_tokens": _at_equal_tokens(arena),
        "pipeline": arena.facts[MAIN].get("pipeline"),
        "ranks": arena.ranks,
        "groups": arena.settings.groups(),
        "contenders": {name: judge.row(name) for name in arena.contenders},
    }
    if arena.steps[MAIN]:
        result["peers"] = _versus_peers(arena)
        result["calibration"] = _calibration(arena, result)
    return result


def _at_equal_tokens(arena: Arena) -> dict[str, Any] | None:
    """How many times as long the range graph takes as a static graph of that very T, over pairs of the same step."""
    if not arena.equal:
        return None
    ratios = [ranged["seconds"] / static["seconds"] for ranged, static in arena.equal]
    return {**results.spread(ratios), "tokens": arena.equal[0][1]["tokens"], "repeats": len(ratios)}


def _versus_peers(arena: Arena) -> dict[str, Any]:
    """For each peer its best way, and how many times faster varlen is; None where it did not run."""
    steps = {name: arena.comparable(name) for name in arena.contenders}
    found: dict[str, Any] = {}
    for peer in arena.settings.peers:
        best = results.best_of(list(PEERS[peer]), steps, MAIN)
        found[peer] = best and {"best": best, "speedup": results.speedup(steps[MAIN], steps[best])}
    return found


class Judge:
    """Turns contenders' answers into their rows.

    Args:
        arena: the contenders, their steps run.
        timed: [B] ints of each timed step, the samples' tokens.
        work: of the model.
        rate: FLOP/s of matrix products.
    Attributes:
        limits: name of a baseline -> its `flop_limit`.
    """

    def __init__(self, arena: Arena, timed: list[np.ndarray], work: results.Work, rate: float):
        self._arena, self._timed, self._work, self._rate = arena, timed, work, rate
        self._baselines = {
            name: arena.steps[name] for name, row in arena.contenders.items() if row.baseline and arena.steps[name]
        }
        self.limits = {name: results.flop_limit(steps, timed, work) for name, steps in self._baselines.items()}

    def row(self, name: str) -> dict[str, Any]:
        """One contender's numbers; nothing but its label and its fault where it did not come so far."""
        contender, steps, facts = self._arena.contenders[name], self._arena.steps[name], self._arena.facts[name]
        row = {"label": contender.label, "ours": not contender.needs, "group": contender.group}
        row |= {key: facts[key] for key in ("error", "missing") if key in facts}
        if not steps:
            return row
        row |= results.speeds(steps, [int(part.sum()) for part in self._timed])
        row["timed_steps"] = len(steps)
        row |= self._against_baselines(name)
        row["rate_share_real"] = results.rate_share(steps, [self._work.real(part) for part in self._timed], self._rate)
        row["loss_max_abs_diff"] = results.loss_difference(steps, self._arena.main_steps[contender.group])
        row["peak_rss_mb"] = facts.get("peak_rss_mb")
        row["first_step_seconds"] = facts["first_step_seconds"]
        if row["ours"]:
            row |= self._own_numbers(name)
        return row

    def _against_baselines(self, name: str) -> dict[str, Any]:
        steps = self._arena.comparable(name)
        shares = {
            key: {
                base: results.share_of_limit(steps, of, self.limits[base][by_step])
                for base, of in self._baselines.items()
            }
            for key, by_step in (
                ("share_of_flop_limit", "by_step"),
                ("share_of_computable_limit", "computable_by_step"),
            )
        }
        return {"speedup_over": {base: results.speedup(steps, of) for base, of in self._baselines.items()}, **shares}

    def _own_numbers(self, name: str) -> dict[str, Any]:
        """What only our own contenders tell: padding, work, graphs, compiling, waiting for data."""
        steps, facts = self._arena.steps[name], self._arena.facts[name]
        real = sum(int(self._timed[step].sum()) for step in steps)
        computed = {step: self._work.computed(values) for step, values in steps.items()}
        cold = {key: facts[key] for key in ("compile_cache", "compile_seconds", "start_seconds", "first_step_seconds")}
        return {
            "pad_ratio": 1 - real / sum(values["tokens_computed"] for values in steps.values()),
            "rate_share_computed": results.rate_share(steps, computed, self._rate),
            "compiled_in_steps": facts["compiled_in_steps"],
            "graphs": facts.get("graphs"),
            "data_wait_share": facts.get("data_wait_share"),
            "cold": _start(cold, facts),
            "warm": _start(facts["warm"], facts) if "warm" in facts else None,
        }


def _start(start: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a start took, imports apart.

    Returns:
        `to_first_step_seconds`: until the first step begins, and what the first step takes longer than the same step
        again; None where it was not run again. `first_step_done_seconds`: until the first step has been computed.
    """
    again = facts.get("first_step_again_seconds")
    extra = None if again is None else max(0.0, start["first_step_seconds"] - again)
    return {
        **start,
        "to_first_step_seconds": None if extra is None else start["start_seconds"] + extra,
        "first_step_done_seconds": start["start_seconds"] + start["first_step_seconds"],
    }


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def _calibration(arena: Arena, result: Mapping[str, Any]) -> dict[str, Any]:
    """What planning needs to turn lengths into seconds on this machine."""
    facts = arena.facts[MAIN]
    graphs = sum(facts.get("graphs", {}).values())
    return {
        "format": 1,
        "machine": result["machine"],
        "versions": facts.get("versions"),
        "parameters": result["parameters"],
        "body": facts["versions"]["attention"],
        **results.calibration(arena.steps[MAIN]),
        "seconds_per_compile": facts["compile_seconds"] / graphs if graphs else 0.0,
    }
