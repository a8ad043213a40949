"""The bench: the same steps by several contenders in turns, in one run on one machine.

Each contender is a process of its own (`bench_process`). In each round every one of them runs the same step of the
recipe's plan, from the same initial weights, while the others wait; the order is rotated from round to round. The first
rounds are warm-up. NumPy's and MindSpore's matrix products take their turn too and give the machine's rate.
Imports no MindSpore.
"""

import contextlib
import dataclasses
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.checkpoint.store import write_atomically
from ms_varlen.data.store import Progress
from ms_varlen.diagnose import bench_results as results
from ms_varlen.diagnose.alignment import alignment_warning
from ms_varlen.diagnose.bench_contenders import OURS, PEERS, RATE, Contender, Parts, bench_workload, step_parts
from ms_varlen.diagnose.bench_process import Reply, Worker, WorkerError
from ms_varlen.errors import RecipeError
from ms_varlen.train.recipe import Recipe
from ms_varlen.train.schedule import learning_rate
from ms_varlen.train.workload import Workload

logger = logging.getLogger("ms_varlen")

CALIBRATION_FILE = "calibration.json"
STREAM_STEPS = 4
MAIN = "varlen_range"
"""The contender that losses are compared with and that the calibration is fitted to."""

StartWorker = Callable[[Contender, dict[str, Any], Path], Any]


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to run.

    Attributes:
        modes: names of `OURS`.
        peers: names of `PEERS`.
        steps: timed steps.
        warmup: steps before them.
    """

    modes: Sequence[str]
    peers: Sequence[str]
    steps: int
    warmup: int

    def __post_init__(self):
        for option, chosen, known in (("--modes", self.modes, OURS), ("--peers", self.peers, PEERS)):
            unknown = [name for name in chosen if name not in known]
            if unknown:
                raise RecipeError([f"{option}: must be among {', '.join(known)}, got {', '.join(unknown)}"], "bench")
        if MAIN not in self.modes:
            raise RecipeError([f"--modes: must hold {MAIN}, which the others are compared with"], "bench")

    def contenders(self) -> dict[str, Contender]:
        """The chosen contenders, ours first."""
        ours = {name: OURS[name] for name in self.modes}
        return ours | {name: row for peer in self.peers for name, row in PEERS[peer].items()}


def start_worker(contender: Contender, settings: dict[str, Any], log: Path) -> Worker:
    """A contender's process. Peers get the user's own environment: waiting OpenMP threads are what they are used to."""
    environment = dict(os.environ)
    if contender.needs:
        environment.pop("GOMP_SPINCOUNT", None)
        environment["LOG_MF_PATH"] = str(log.parent / "mindformers_log")  # else in the current folder
    return Worker(contender.module, {**settings, "variant": contender.variant}, log, environment)


def bench(
    recipe: Recipe,
    settings: BenchSettings,
    on_round: Callable[[int], None],
    progress: Progress | None = None,
    start: StartWorker = start_worker,
) -> dict[str, Any]:
    """Run the contenders and compare them.

    Args:
        recipe: a varlen recipe.
        settings: who runs, and how many steps.
        on_round: told how many rounds are done, warm-up included.
        progress: told how far the token store is, where one is built.
        start: makes a contender's process.
    Returns:
        `contenders` (a row each, `error` where it failed and `missing` where a package is not there), the machine's
        rate, the FLOP limits, and the calibration, which is also written into `output_dir`.
    """
    workload = bench_workload(recipe, progress)
    parts = step_parts(workload, settings.warmup + settings.steps)
    folder = recipe.checkpoint.output_dir / "bench"
    with Arena(recipe, folder, settings, start) as arena:
        arena.start()
        arena.run(on_round)
        arena.finish()
        result = summarize(arena, workload, parts)
    result["warning"] = alignment_warning(recipe, result["versions"] or {})
    if result["warning"]:
        logger.warning("%s", result["warning"])
    if "calibration" in result:
        content = json.dumps(result["calibration"], indent=1).encode()
        write_atomically(recipe.checkpoint.output_dir / CALIBRATION_FILE, [content])
    return result


class Arena:
    """The contenders' processes and what they said.

    Attributes:
        contenders: name -> its row.
        steps: name -> timed step -> its answer.
        facts: name -> what else it said, or `error`, or `missing`.
        rates: an answer of the matrix product for each timed round.
    """

    def __init__(self, recipe: Recipe, folder: Path, settings: BenchSettings, start: StartWorker):
        self.recipe, self.folder, self.settings, self._start = recipe, folder, settings, start
        self.contenders = settings.contenders()
        self.steps: dict[str, dict[int, Reply]] = {name: {} for name in self.contenders}
        self.facts: dict[str, dict[str, Any]] = {name: {} for name in self.contenders}
        self.rates: list[Reply] = []
        self._workers: dict[str, Any] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> "Arena":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._weights.unlink(missing_ok=True)  # peers must not start from another run's
        # Empty caches, so that the first start of each contender is a cold one.
        self._caches = Path(tempfile.mkdtemp(prefix="compile_cache-", dir=self.folder))
        self._exits.callback(shutil.rmtree, self._caches, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def start(self) -> None:
        """Start everybody, one after another, so that nobody compiles while another does."""
        for name, contender in self.contenders.items():
            if contender.missing:
                self.facts[name]["missing"] = contender.install
                logger.warning("%s is left out, its packages are missing: %s", name, contender.install)
                continue
            with self._blamed(name):
                self._workers[name] = self._enter(name)
                self.facts[name].update(self._workers[name].ask("ready"))
                if name == MAIN:
                    self._workers[name].ask("save_weights", path=str(self._weights))
        self._workers[RATE] = self._enter(RATE)
        self._workers[RATE].ask("ready")

    @property
    def _weights(self) -> Path:
        return self.folder / "initial.safetensors"

    def _enter(self, name: str, purpose: str = "") -> Any:
        cache = self.recipe.graph.model_copy(update={"compile_cache": str(self._caches / name)})
        settings = {
            "recipe": self.recipe.model_copy(update={"graph": cache}).resolved(),
            "name": name,
            "steps": self.settings.warmup + self.settings.steps,
            "weights": str(self._weights.absolute()),
        }
        contender = self.contenders.get(name, Contender("the machine's matrix products"))
        log = self.folder / f"{name}{purpose}.log"
        return self._exits.enter_context(self._start(contender, settings, log))

    @contextlib.contextmanager
    def _blamed(self, name: str):
        """A contender that fails is out, and the rest go on."""
        try:
            yield
        except WorkerError as error:
            logger.warning("%s is out: %s", name, error)
            self.facts[name]["error"] = str(error)
            if name in self._workers:
                self._workers.pop(name).close()

    def run(self, on_round: Callable[[int], None]) -> None:
        """All rounds: in each, every contender runs the same step, in an order that is rotated."""
        warmup = self.settings.warmup
        for index in range(warmup + self.settings.steps):
            names = list(self._workers)
            shift = index % len(names)
            for name in names[shift:] + names[:shift]:
                self._turn(name, index, index - warmup)
            on_round(index + 1)

    def _turn(self, name: str, index: int, timed: int) -> None:
        if name == RATE:
            reply = self._workers[name].ask("step")
            if timed >= 0:
                self.rates.append(reply)
            return
        most = self.contenders[name].steps
        if most is not None and timed >= most:
            return
        with self._blamed(name):
            reply = self._workers[name].ask("step", index=index, rate=learning_rate(self.recipe.train, index + 1))
            if index == 0:
                self.facts[name]["first_step_seconds"] = reply["seconds"]
            self.facts[name].setdefault("compiled_in_steps", 0)
            self.facts[name]["compiled_in_steps"] += reply.get("compiled", 0)
            if timed >= 0:
                self.steps[name][timed] = reply

    def finish(self) -> None:
        """Ask everybody for what is left, end them, and start our own again with their caches warm."""
        names = [name for name in self._workers if name != RATE]
        for name in names:
            with self._blamed(name):
                self.facts[name].update(self._workers[name].ask("finish"))
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        for name in names:
            if not self.contenders[name].needs and self.facts[name].get("compile_cache") != "off":
                with self._blamed(name):
                    self._start_again(name)
        if MAIN in names and "pipeline" not in self.facts[MAIN]:  # PyNative mode has no cache to warm
            with self._blamed(MAIN):
                self._start_again(MAIN)

    def _start_again(self, name: str) -> None:
        with self._enter(name, "-warm") as worker:
            facts = self.facts[name]
            ready = worker.ask("ready")
            facts["warm_compile_cache"] = ready["compile_cache"]
            facts["warm_compile_seconds"] = ready["compile_seconds"]
            step = worker.ask("step", index=0, rate=learning_rate(self.recipe.train, 1))
            facts["warm_to_first_step_seconds"] = ready["start_seconds"] + step["seconds"]
            if name == MAIN:
                facts["pipeline"] = worker.ask("pipeline")
            facts.update(worker.ask("stream", steps=STREAM_STEPS))


def summarize(arena: Arena, workload: Workload, parts: Parts) -> dict[str, Any]:
    """The numbers of a bench, from what its contenders said."""
    lengths = np.asarray(workload.store.train.lengths)
    timed = [lengths[np.concatenate(step)] for step in parts[arena.settings.warmup :]]
    work = results.Work.of_decoder(workload.model_config)
    rates = {body: float(np.median([reply[body] for reply in arena.rates])) for body in ("numpy", "mindspore")}
    rate = max(rates.values())
    baselines = {
        name: arena.steps[name] for name, row in arena.contenders.items() if row.baseline and arena.steps[name]
    }
    limits = {name: results.flop_limit(steps, timed, work) for name, steps in baselines.items()}
    rows = {name: _row(name, arena, timed, work, rate, baselines, limits) for name in arena.contenders}
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
        "flop_limit": {name: {k: v for k, v in limit.items() if k != "by_step"} for name, limit in limits.items()},
        "pipeline": arena.facts[MAIN].get("pipeline"),
        "second_rank_reuse": "not tried: the cache keeps an entry for each rank",
        "contenders": rows,
    }
    if arena.steps[MAIN]:
        result["peers"] = _versus_peers(arena)
        result["calibration"] = _calibration(arena, result)
    return result


def _versus_peers(arena: Arena) -> dict[str, Any]:
    """For each peer its best way, and how many times faster varlen is; None where it did not run."""
    found: dict[str, Any] = {}
    for peer in arena.settings.peers:
        best = results.best_of(list(PEERS[peer]), arena.steps, MAIN)
        found[peer] = best and {"best": best, "speedup": results.speedup(arena.steps[MAIN], arena.steps[best])}
    return found


def _row(
    name: str,
    arena: Arena,
    timed: list[np.ndarray],
    work: results.Work,
    rate: float,
    baselines: Mapping[str, results.Steps],
    limits: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """One contender's numbers; nothing but its label and its fault where it did not come so far."""
    steps, facts = arena.steps[name], arena.facts[name]
    row = {"label": arena.contenders[name].label, "ours": not arena.contenders[name].needs}
    row |= {key: facts[key] for key in ("error", "missing") if key in facts}
    if not steps:
        return row
    real = [work.real(part) for part in timed]
    row |= results.speeds(steps, [int(part.sum()) for part in timed])
    row["timed_steps"] = len(steps)
    row["speedup_over"] = {base: results.speedup(steps, of) for base, of in baselines.items()}
    row["share_of_flop_limit"] = {
        base: results.share_of_limit(steps, of, limits[base]) for base, of in baselines.items()
    }
    row["rate_share_real"] = results.rate_share(steps, real, rate)
    row["loss_max_abs_diff"] = results.loss_difference(steps, arena.steps[MAIN]) if arena.steps[MAIN] else None
    row["peak_rss_mb"] = facts.get("peak_rss_mb")
    row["first_step_seconds"] = facts["first_step_seconds"]
    if row["ours"]:
        row |= _own_numbers(steps, facts, timed, work, rate)
    return row


def _own_numbers(
    steps: results.Steps, facts: Mapping[str, Any], timed: list[np.ndarray], work: results.Work, rate: float
) -> dict[str, Any]:
    """What only our own contenders tell: padding, work, graphs, compiling, waiting for data."""
    real = sum(int(timed[step].sum()) for step in steps)
    computed = {step: work.supervised(values) for step, values in steps.items()}
    keys = ("graphs", "warm_compile_cache", "warm_compile_seconds", "warm_to_first_step_seconds", "data_wait_share")
    return {
        "pad_ratio": 1 - real / sum(values["tokens_computed"] for values in steps.values()),
        "rate_share_computed": results.rate_share(steps, computed, rate),
        "compile_seconds": facts["compile_seconds"],
        "to_first_step_seconds": facts["start_seconds"] + facts["first_step_seconds"],
        "compiled_in_steps": facts["compiled_in_steps"],
        **{key: facts.get(key) for key in keys},
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
        **results.calibration(arena.steps[MAIN]),
        "seconds_per_compile": facts["compile_seconds"] / graphs if graphs else 0.0,
    }
