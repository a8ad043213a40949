"""The contenders of a bench and their turns.

Each contender is a process of its own (`bench_process`). Those of a group are in memory at once: in each round every
one of them runs the same step of the recipe's plan, from the same initial weights, while the others wait; the order is
rotated from round to round. Groups follow one another, ours first, and each runs the main contender again. NumPy's and
MindSpore's matrix products take their turn too and give the machine's rate.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ms_varlen.diagnose.bench import results
from ms_varlen.diagnose.bench.contenders import EQUAL, MAIN, OURS, OURS_GROUP, PEERS, RATE, Contender
from ms_varlen.diagnose.bench.process import Reply, Worker, WorkerError
from ms_varlen.diagnose.bench.ranks import measure_ranks
from ms_varlen.errors import RecipeError
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.train.schedule import learning_rate

logger = logging.getLogger("ms_varlen")

STREAM_STEPS = 4
EQUAL_REPEATS = 15

StartWorker = Callable[[Contender, dict[str, Any], Path], Any]
StartRanks = Callable[[dict[str, Any], int, Path], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to run.

    Attributes:
        modes: names of `OURS`.
        peers: names of `PEERS`.
        steps: timed steps.
        warmup: steps before them.
        ranks: ranks whose start is measured too; 1 leaves it out.
    """

    modes: Sequence[str]
    peers: Sequence[str]
    steps: int
    warmup: int
    ranks: int = 1

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

    def groups(self) -> dict[str, list[str]]:
        """Group -> names of its contenders that can run; the main one is in each, and a group of it alone is none."""
        found: dict[str, list[str]] = {OURS_GROUP: []}
        for name, row in self.contenders().items():
            if not row.missing:
                found.setdefault(row.group, [MAIN]).append(name)
        return found

    def rounds(self, group: str) -> int:
        """Steps of a group, warm-up included."""
        contenders = self.contenders()
        most = [
            contenders[name].steps or self.steps for name in self.groups()[group] if contenders[name].group == group
        ]
        return self.warmup + min(self.steps, max(most))

    @property
    def all_rounds(self) -> int:
        """Steps of all groups."""
        return sum(map(self.rounds, self.groups()))


def start_worker(contender: Contender, settings: dict[str, Any], log: Path) -> Worker:
    """A contender's process. Peers get the user's own environment: waiting OpenMP threads are what they are used to."""
    environment = dict(os.environ)
    if contender.needs:
        environment.pop("GOMP_SPINCOUNT", None)
        environment["LOG_MF_PATH"] = str(log.parent / "mindformers_log")  # else in the current folder
    return Worker(contender.module, {**settings, "variant": contender.variant}, log, environment)


class Arena:
    """The contenders' processes and what they said.

    Args:
        recipe: a varlen recipe.
        folder: for logs, caches and the initial weights.
        settings: who runs, and how many steps.
        start: makes a contender's process.
        start_ranks: see `measure_ranks`.
    Attributes:
        contenders: name -> its row.
        steps: name -> timed step -> its answer.
        main_steps: group -> the same of the main contender in that group.
        facts: name -> what else it said, or `error`, or `missing`.
        rates: an answer of the matrix product for each timed round.
        equal: of `middle_step`, one pair of answers each: the range graph's and the static graph's.
        ranks: what `measure_ranks` found, or `error`; None where it was left out.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        settings: BenchSettings,
        start: StartWorker = start_worker,
        start_ranks: StartRanks = measure_ranks,
    ):
        self.recipe, self.folder, self.settings = recipe, folder, settings
        self._start, self._start_ranks = start, start_ranks
        self.contenders = settings.contenders()
        self.steps: dict[str, dict[int, Reply]] = {name: {} for name in self.contenders}
        self.main_steps: dict[str, dict[int, Reply]] = {row.group: {} for row in self.contenders.values()}
        self.main_steps[OURS_GROUP] = self.steps[MAIN]
        self.facts: dict[str, dict[str, Any]] = {name: {} for name in self.contenders}
        self.rates: list[Reply] = []
        self.equal: list[tuple[Reply, Reply]] = []
        self.ranks: dict[str, Any] | None = None
        self._workers: dict[str, Any] = {}

    def run(self, on_round: Callable[[], None]) -> None:
        """Everything, one group after another; a contender that fails is out, and the rest continue.

        Args:
            on_round: told that a round is done.
        """
        for name, contender in self.contenders.items():
            if contender.missing:
                self.facts[name]["missing"] = contender.install
                logger.warning("%s is left out, its packages are missing: %s", name, contender.install)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._weights.unlink(missing_ok=True)  # peers must not start from another run's
        with tempfile.TemporaryDirectory(prefix="compile_cache-", dir=self.folder) as caches:
            self._caches = Path(caches)  # empty, so that the first start of each contender is a cold one
            for group, names in self.settings.groups().items():
                with contextlib.ExitStack() as self._exits:
                    self._run_group(group, names, on_round)
                self._workers.clear()
            self._start_all_again()
            self._measure_ranks()

    def _run_group(self, group: str, names: list[str], on_round: Callable[[], None]) -> None:
        """Start everybody, one after another, so that nobody compiles while another does; then take turns."""
        for name in names:
            with self._blamed(name):
                self._workers[name] = self._enter(name, "" if group == OURS_GROUP else f"-{group}")
                ready = self._workers[name].ask("ready")
                if name == MAIN and group == OURS_GROUP:
                    self._workers[name].ask("save_weights", path=str(self._weights))
                if name != MAIN or group == OURS_GROUP:
                    self.facts[name].update(ready)
        self._workers[RATE] = self._enter(RATE)
        self._workers[RATE].ask("ready")
        warmup = self.settings.warmup
        for index in range(self.settings.rounds(group)):
            taking = list(self._workers)
            shift = index % len(taking)
            for name in taking[shift:] + taking[:shift]:
                self._turn(group, name, index, index - warmup)
            on_round()
        if group == OURS_GROUP:
            self._compare_at_equal_tokens()
        for name in [name for name in self._workers if name != RATE and (name != MAIN or group == OURS_GROUP)]:
            with self._blamed(name):
                self.facts[name].update(self._workers[name].ask("finish"))

    @property
    def _weights(self) -> Path:
        return self.folder / "initial.safetensors"

    def _settings(self, name: str) -> dict[str, Any]:
        cache = self.recipe.graph.model_copy(update={"compile_cache": str(self._caches / name)})
        return {
            "recipe": self.recipe.model_copy(update={"graph": cache}).resolved(),
            "name": name,
            "steps": self.settings.warmup + self.settings.steps,
            "weights": str(self._weights.absolute()),
        }

    def _enter(self, name: str, suffix: str = "") -> Any:
        contender = self.contenders.get(name, Contender(name))
        log = self.folder / f"{name}{suffix}.log"
        return self._exits.enter_context(self._start(contender, self._settings(name), log))

    @contextlib.contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            logger.warning("%s is out: %s", name, error)
            self.facts[name]["error"] = str(error)
            if name in self._workers:
                self._workers.pop(name).close()

    def _turn(self, group: str, name: str, index: int, timed: int) -> None:
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
            if name != MAIN or group == OURS_GROUP:
                facts = self.facts[name]
                facts.setdefault("first_step_seconds", reply["seconds"])
                facts["compiled_in_steps"] = facts.get("compiled_in_steps", 0) + reply.get("compiled", 0)
            if timed >= 0:
                steps = self.main_steps[group] if name == MAIN else self.steps[name]
                steps[timed] = reply

    def _compare_at_equal_tokens(self) -> None:
        """One step by the range graph and by a static graph of that very size, in turns."""
        if "varlen_static" not in self._workers or MAIN not in self._workers:
            return
        try:
            static = self._enter(EQUAL)
            for repeat in range(EQUAL_REPEATS + 1):
                order = [self._workers[MAIN], static][:: 1 if repeat % 2 else -1]
                replies = {id(worker): worker.ask("middle_step") for worker in order}
                if repeat:  # the first is warm-up
                    self.equal.append((replies[id(self._workers[MAIN])], replies[id(static)]))
        except WorkerError as error:
            logger.warning("range and static at equal T are not compared: %s", error)

    def _start_all_again(self) -> None:
        """Start our own again with their caches warm; PyNative mode has none, but its data is looked at."""
        for name, facts in self.facts.items():
            if self.contenders[name].needs or "compile_cache" not in facts or "error" in facts:
                continue
            if facts["compile_cache"] != "off" or name == MAIN:
                with contextlib.ExitStack() as self._exits, self._blamed(name):
                    self._start_again(name)

    def _start_again(self, name: str) -> None:
        facts, worker = self.facts[name], self._enter(name, "-warm")
        ready = worker.ask("ready")
        # Twice the same step: what the first takes longer belongs to the start.
        first, again = (worker.ask("step", index=0, rate=learning_rate(self.recipe.train, 1)) for _ in range(2))
        facts["first_step_again_seconds"] = again["seconds"]
        facts["warm"] = {
            "compile_cache": ready["compile_cache"],
            "compile_seconds": ready["compile_seconds"],
            "start_seconds": ready["start_seconds"],
            "first_step_seconds": first["seconds"],
        }
        if name == MAIN:
            facts["pipeline"] = worker.ask("pipeline")
        facts.update(worker.ask("stream", steps=STREAM_STEPS))

    def _measure_ranks(self) -> None:
        if self.settings.ranks == 1 or self.facts[MAIN].get("compile_cache") == "off" or "error" in self.facts[MAIN]:
            return
        folder = self.folder / "ranks"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self.ranks = self._start_ranks(self._settings("ranks"), self.settings.ranks, folder)
        except WorkerError as error:
            logger.warning("the start of %d ranks is not measured: %s", self.settings.ranks, error)
            self.ranks = {"ranks": self.settings.ranks, "error": str(error)}

    def comparable(self, name: str) -> results.Steps:
        """A contender's steps with their seconds as if measured in the group of our own contenders."""
        group = self.contenders[name].group
        if group == OURS_GROUP:
            return self.steps[name]
        return results.as_beside(self.steps[name], self.main_steps[group], self.main_steps[OURS_GROUP])
