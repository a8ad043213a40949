"""Start a recipe's ranks under msrun, look after them, and tell what went wrong: what `scripts/msrun_launch.sh` runs.

    python -m ms_varlen.train.launch recipes/quickstart.yaml 2 -- train.steps=20

msrun alone ends its workers without a word on SIGINT and leaves them running on SIGTERM. Here both are forwarded to the
workers, which save and leave; when they do not within STOP_SECONDS, or one of them dies, all are ended. Where a node
runs this, no process of it stays behind. Imports no MindSpore.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ms_varlen.errors import RecipeError
from ms_varlen.train.ranks import ROLE, SCHEDULER, SET_PARENT_DEATH_SIGNAL
from ms_varlen.train.recipe import load_recipe

TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
SCHEDULER_SECONDS = 5
"""How long the scheduler may live on without workers; by itself it waits for dead ones for half a minute."""

USAGE = "msrun_launch.sh RECIPE [N] [-- section.key=value ...]"
VARIABLES = """\
N is the number of ranks over all nodes, 8 if left out. Environment, as for MindFormers' msrun_launcher.sh:
  LOCAL_WORKER      ranks of this node (N)
  MASTER_ADDR       address of node 0 (127.0.0.1)
  MASTER_PORT       its port (8118)
  NODE_RANK         number of this node (0)
  LOG_DIR           folder of worker_0.log, worker_1.log, ... and scheduler.log (output/msrun_log)
  CLUSTER_TIME_OUT  seconds to wait for all nodes at the start (7200)
  STOP_SECONDS      seconds that ranks have to save and leave after SIGTERM or SIGINT (600)
"""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks to start, and those of this node."""

    workers: int
    local_workers: int
    master_addr: str
    master_port: int
    node_rank: int
    log_dir: Path
    cluster_time_out: int
    stop_seconds: float

    @classmethod
    def from_environment(cls, workers: int, environment: Mapping[str, str]) -> "Cluster":
        """The cluster that the variables of the usage describe."""
        return cls(
            workers=workers,
            local_workers=int(environment.get("LOCAL_WORKER", workers)),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(environment.get("MASTER_PORT", 8118)),
            node_rank=int(environment.get("NODE_RANK", 0)),
            log_dir=Path(environment.get("LOG_DIR", "output/msrun_log")),
            cluster_time_out=int(environment.get("CLUSTER_TIME_OUT", 7200)),
            stop_seconds=float(environment.get("STOP_SECONDS", 600)),
        )

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        return self.node_rank * self.local_workers if self.local_workers < self.workers else 0

    def log_of(self, rank: int) -> Path:
        """The log of a rank of this node."""
        return self.log_dir / f"worker_{rank}.log"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """msrun with the training script; it prints no worker's log, so that it starts no `tail` for each."""
        return [
            sys.executable,
            *("-m", "mindspore.parallel.cluster.run"),
            f"--worker_num={self.workers}",
            f"--local_worker_num={self.local_workers}",
            f"--master_addr={self.master_addr}",
            f"--master_port={self.master_port}",
            f"--node_rank={self.node_rank}",
            f"--log_dir={self.log_dir}",
            f"--cluster_time_out={self.cluster_time_out}",
            "--join=True",
            f"--tail_worker_log={self.workers}",
            str(TRAIN_SCRIPT),
            *arguments,
        ]


class Launch:
    """A running msrun.

    Args:
        cluster: what to start.
        arguments: of the training script.
    """

    def __init__(self, cluster: Cluster, arguments: Sequence[str]):
        self._cluster = cluster
        cluster.log_dir.mkdir(parents=True, exist_ok=True)
        self._msrun_log = cluster.log_dir / "msrun.log"
        # msrun starts the `python` of the PATH.
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with self._msrun_log.open("wb") as log:
            # A session of its own: Ctrl-C on the terminal reaches this process alone.
            self._msrun = subprocess.Popen(
                cluster.command(arguments),
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": search},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._workers: dict[int, psutil.Process] = {}
        self._others: list[psutil.Process] = []
        self._asked: list[int] = []
        self._told: set[int] = set()

    def ask_to_stop(self, number: int, _frame: object = None) -> None:
        """Handler of SIGTERM and SIGINT."""
        self._asked.append(number)

    def wait(self) -> int:
        """Look after the ranks until all have ended; the exit status: 0, or that of the first that failed."""
        deadline = without_workers = float("inf")
        while self._msrun.poll() is None or any(map(_alive, self._workers.values())):
            self._look()
            if self._msrun.returncode is not None:  # then the system has sent the workers a SIGTERM
                deadline = min(deadline, time.monotonic() + self._cluster.stop_seconds)
            if self._asked:
                self._forward()
                deadline = min(deadline, time.monotonic() + self._cluster.stop_seconds)
            if len(self._asked) > 1 or time.monotonic() > deadline:
                _say(f"ranks are ended after {'a second signal' if len(self._asked) > 1 else 'STOP_SECONDS'}")
                break
            if self._workers and not any(map(_alive, self._workers.values())):
                without_workers = min(without_workers, time.monotonic() + SCHEDULER_SECONDS)
                if time.monotonic() > without_workers:
                    break
            time.sleep(0.2)
        self._look()
        self._end_all()
        return self._status()

    def _look(self) -> None:
        """Take down the processes that msrun has started so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._msrun.pid).children(recursive=True):
                if process in self._others or process in self._workers.values():
                    continue
                with contextlib.suppress(psutil.Error):
                    environment = process.environ()
                    if environment.get(ROLE) in (None, SCHEDULER) or process.ppid() != self._msrun.pid:
                        self._others.append(process)
                    else:
                        self._workers[int(environment["RANK_ID"])] = process

    def _forward(self) -> None:
        for rank, worker in self._workers.items():
            if rank not in self._told:
                self._told.add(rank)
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()

    def _end_all(self) -> None:
        """Nothing of this run lives on."""
        for process in [*self._workers.values(), *self._others]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._msrun.wait(SCHEDULER_SECONDS)  # it writes down what failed
        self._msrun.kill()
        self._msrun.wait()

    def _status(self) -> int:
        failed = re.search(
            r"Worker process (\d+) exit with exception\. Error code: (-?\d+)",
            self._msrun_log.read_text("utf-8", "replace"),
        )
        if failed is None and self._msrun.returncode == 0:
            return 0
        ranks = {worker.pid: rank for rank, worker in self._workers.items()}
        rank = ranks.get(int(failed[1])) if failed else None
        status = int(failed[2]) if failed else 1
        self._report(rank, status)
        return status if status > 0 else 128 - status

    def _report(self, rank: int | None, status: int) -> None:
        order = sorted(self._workers, key=lambda other: (other != rank, other))
        if rank is not None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            _say(f"rank {rank} {how}, the others were ended too; its log is {self._cluster.log_of(rank)}")
        for other in order:
            error = first_error(self._cluster.log_of(other))
            if error:
                _say(f"first error of rank {other}: {error}")
                return
        _say(f"no worker wrote an error; see {self._msrun_log}")


def first_error(log: Path) -> str | None:
    """The first error in a worker's log: a message of ours with all its lines, or the last line of a traceback."""
    if not log.is_file():
        return None
    text = log.read_text("utf-8", "replace")
    ours = re.search(r"^error: .*(?:\n  .*)*", text, re.MULTILINE)
    raised = re.search(r"^Traceback .*\n(?:[ \t].*\n|\n)*(?P<error>\S.*)", text, re.MULTILINE)
    found = [
        (match.start(), text)
        for match, text in ((ours, ours and ours[0]), (raised, raised and raised["error"]))
        if match
    ]
    return min(found)[1] if found else None


def _follow(log: Path, ended: threading.Event) -> None:
    """Copy a log to the terminal while it grows."""
    while not log.is_file() and not ended.wait(0.2):
        pass
    if log.is_file():
        with log.open("r", encoding="utf-8", errors="replace") as lines:
            while True:
                last = ended.is_set()
                sys.stdout.write(lines.read())
                sys.stdout.flush()
                if last:
                    return
                ended.wait(0.3)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"msrun_launch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; the exit status."""
    parser = argparse.ArgumentParser(
        prog="msrun_launch.sh", usage=USAGE, epilog=VARIABLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("workers", nargs="?", type=int, default=8)
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, overrides = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    try:
        load_recipe(given.recipe, [override for override in overrides if not override.startswith("--")])
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cluster = Cluster.from_environment(given.workers, os.environ)
    for stale in cluster.log_dir.glob("worker_*.log"):
        stale.unlink()
    _say(f"{cluster.workers} ranks, {cluster.local_workers} on this node; logs in {cluster.log_dir}")
    launch, ended = Launch(cluster, [given.recipe, *overrides]), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, launch.ask_to_stop)
    follower = threading.Thread(target=_follow, args=(cluster.log_of(cluster.first_rank), ended))
    follower.start()
    try:
        return launch.wait()
    finally:
        ended.set()
        follower.join()


if __name__ == "__main__":
    sys.exit(main())
