"""Start a recipe's ranks under msrun, look after them, and tell what went wrong: what `scripts/msrun_launch.sh` runs.

    python -m ms_varlen.launch.launch recipes/quickstart.yaml 2 -- train.steps=20

msrun alone ends its workers without a word on SIGINT and leaves them running on SIGTERM. Here both are forwarded to the
workers, which save and leave; when they do not within STOP_SECONDS, or one of them dies, all are ended. Where a node
runs this, no process of it stays behind. Imports no MindSpore.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from ms_varlen.errors import VarlenError
from ms_varlen.launch.cluster import Cluster
from ms_varlen.ranks.stop import (
    MSRUN_PID,
    ROLE,
    SCHEDULER,
    StopRequest,
    adopt_orphans,
    alive,
    ask_for_signal_of_parents_death,
)
from ms_varlen.recipe.recipe import load_recipe

SCHEDULER_SECONDS = 5
"""How long the scheduler may live on without workers; by itself it waits for dead ones for half a minute."""
NOTHING_TO_SAVE_SECONDS = 10
"""How long ranks have to leave while none has joined the others: MindSpore holds signals back until then."""

INTERRUPTED = 130
"""Status of a rank that was asked to stop and had done no step yet."""

JOINED = re.compile(r"rank \d+ of\s+\d+")
"""What a rank logs when it has joined the others."""
EXIT_CODE = 48
"""Place of the exit code in /proc/PID/stat, counted from behind the state."""
CONSEQUENCE = re.compile(r"rank \d+ stopped, and with it|, and is gone \(")
"""Errors that a rank has because another one had one."""

USAGE = "msrun_launch.sh RECIPE [N] [-- section.key=value ...]"
VARIABLES = """\
N is the number of ranks over all nodes, 8 if left out. Environment, as for MindFormers' msrun_launcher.sh:
  LOCAL_WORKER      ranks of this node (N)
  MASTER_ADDR       address of node 0 (127.0.0.1); on several nodes one that all of them reach
  MASTER_PORT       its port (8118)
  NODE_RANK         number of this node (0)
  LOG_DIR           folder of worker_0.log, worker_1.log, ... and scheduler.log (output/msrun_log)
  CLUSTER_TIME_OUT  seconds to wait for all nodes at the start (7200)
  STOP_SECONDS      seconds that ranks have to save and leave after SIGTERM or SIGINT (600)
Exit status: 0, also when the ranks were asked to stop and saved; that of the rank that failed first, 137 when it was
killed; 143 (SIGTERM) or 130 (SIGINT) when they were stopped before their first step; 1 or 2 when nothing was started.
"""


class Launch:
    """A running msrun.

    Args:
        cluster: what to start.
        arguments: of the training script.
    """

    def __init__(self, cluster: Cluster, arguments: Sequence[str]):
        self._cluster = cluster
        # A child's environment cannot hold its own process id; the shell knows it, and becomes msrun.
        shell = ["sh", "-c", f'{MSRUN_PID}=$$ exec "$@"', "msrun"]
        # msrun starts the `python` of the PATH.
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        launcher = os.getpid()
        adopt_orphans()
        with cluster.take_log_dir() as log:
            # A session of its own: Ctrl-C on the terminal reaches this process alone.
            self._msrun = subprocess.Popen(
                [*shell, *cluster.command(arguments)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": search},
                start_new_session=True,
                preexec_fn=lambda: ask_for_signal_of_parents_death(launcher),
            )
        self._workers: dict[int, psutil.Process] = {}
        self._started: list[psutil.Process] = []
        self._scheduler: psutil.Process | None = None
        self._scheduler_failed = self._left_alone = self._asked_early = self._msrun_killed = False
        self._given_up = False
        self._stop, self._at_once = StopRequest(), False
        self._told: set[int] = set()

    def ask_to_stop(self, number: int, _frame: object = None) -> None:
        """Handler of SIGTERM and SIGINT."""
        self._at_once = self._stop.note(number) or self._at_once

    def wait(self) -> int:
        """Look after the ranks until all have ended; the exit status: 0, or that of the first that failed."""
        deadline = without_workers = float("inf")
        while self._msrun.poll() is None or any(map(alive, self._workers.values())):
            self._look()
            if not self._scheduler_failed and self._scheduler is not None and _failed(self._scheduler):
                self._scheduler_failed = True
                _say("the scheduler ended with an error: the ranks are stopped")
            # When msrun is gone, the system has sent the workers a SIGTERM.
            if self._stop.asked or self._scheduler_failed or self._msrun.returncode is not None:
                self._asked_early = self._asked_early or not (self._told or self._joined())
                self._forward()
                if deadline == float("inf") or self._scheduler_failed:
                    deadline = min(deadline, time.monotonic() + self._stop_seconds())
            if self._at_once or time.monotonic() > deadline:
                _say(f"ranks are ended after {'a second signal' if self._at_once else 'their time to leave'}")
                self._given_up = True
                break
            if self._all_seen() and not any(map(alive, self._workers.values())):
                without_workers = min(without_workers, time.monotonic() + SCHEDULER_SECONDS)
                if time.monotonic() > without_workers:
                    self._left_alone = True
                    break
            time.sleep(0.2)
        self._look()
        self._msrun_killed = (self._msrun.poll() or 0) < 0
        self._end_all()
        return self._status()

    def _stop_seconds(self) -> float:
        """How long ranks may take to leave. Without a scheduler they cannot wait for each other's save."""
        if self._scheduler_failed or not self._joined():
            return min(NOTHING_TO_SAVE_SECONDS, self._cluster.stop_seconds)
        return self._cluster.stop_seconds

    def _joined(self) -> bool:
        """Whether a rank of this node has joined the others."""
        logs = map(self._cluster.log_of, self._workers)
        return any(log.is_file() and JOINED.search(log.read_text("utf-8", "replace")) for log in logs)

    def _look(self) -> None:
        """Take down the processes that msrun has started so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._msrun.pid).children(recursive=True):
                if process not in self._started:
                    self._started.append(process)
                if process != self._scheduler and process not in self._workers.values():
                    self._recognise(process)

    def _recognise(self, process: psutil.Process) -> None:
        """Note a rank or the scheduler. Between fork and exec it shows msrun's environment: the rest is asked again."""
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if ROLE not in environment or process.ppid() != self._msrun.pid:
                return
            if environment[ROLE] == SCHEDULER:
                self._scheduler = process
            else:
                self._workers[int(environment["RANK_ID"])] = process

    def _all_seen(self) -> bool:
        return len(self._workers) == self._cluster.local_workers

    def _forward(self) -> None:
        for rank, worker in self._workers.items():
            if rank not in self._told:
                self._told.add(rank)
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()

    def _end_all(self) -> None:
        """Nothing of this run lives on."""
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._msrun.wait(SCHEDULER_SECONDS)  # it writes down what failed
        self._msrun.kill()
        self._msrun.wait()

    def _status(self) -> int:
        ranks = {worker.pid: rank for rank, worker in self._workers.items()}
        status, rank = failed_worker(self._cluster.msrun_log.read_text("utf-8", "replace"), ranks)
        if self._msrun_killed and status == 0:
            status, rank = self._failed_orphan()
        # A scheduler that was ended for lingering is no failure of msrun's; the ranks had left well by then. Nor is it
        # one when msrun was ended with everything else, but the ranks have saved.
        saved = self._msrun.returncode == 0 or self._left_alone or (self._msrun_killed and self._stop.asked)
        if status == 0 and saved and not self._scheduler_failed:
            return 0
        if self._stop.number is not None and (self._asked_early or (status == INTERRUPTED and not self._at_once)):
            _say(f"stopped on {signal.Signals(self._stop.number).name} before the first step; nothing to save")
            return 128 + self._stop.number
        if status == 0 and self._msrun_killed:
            status = self._msrun.returncode
            _say(f"msrun was ended by {signal.Signals(-status).name}, and the ranks with it")
        status = 1 if self._scheduler_failed else status or 1
        self._report(rank, status)
        return status if status > 0 else 128 - status

    def _failed_orphan(self) -> tuple[int, int | None]:
        """As `failed_worker`, of ranks that outlived msrun; they are children of this process then."""
        for rank, worker in self._workers.items():
            with contextlib.suppress(psutil.Error):
                if status := worker.wait(0):
                    return int(status), rank
        return 0, None

    def _report(self, rank: int | None, status: int) -> None:
        order = sorted(self._workers, key=lambda other: (other != rank, other))
        by_signal = status < 0 and not self._scheduler_failed
        if rank is not None and not self._scheduler_failed:
            how = f"was ended by {signal.Signals(-status).name}" if by_signal else f"ended with status {status}"
            if -status == signal.SIGKILL and not self._given_up:
                how += " (the system does so when memory runs out, see dmesg)"
            _say(f"rank {rank} {how}, the others were ended too; its log is {self._cluster.log_of(rank)}")
        logs = {f"rank {other}": self._cluster.log_of(other) for other in order}
        scheduler = {"the scheduler": self._cluster.scheduler_log}
        logs = {**scheduler, **logs} if self._scheduler_failed else {**logs, **scheduler}
        # What msrun says of a rank's end follows from it, but when it started none its own error is all there is.
        logs |= {} if self._started else {"msrun": self._cluster.msrun_log}
        found = first_cause(logs)
        if found is not None:
            _say(f"first error of {found[0]}: {found[1]}")
        elif not by_signal:
            name, log = next(iter(logs.items()))
            _say(
                f"no log holds an error that is known; see {self._cluster.log_dir}; last of {name}:\n{last_lines(log)}"
            )


def failed_worker(msrun_log: str, ranks: Mapping[int, int]) -> tuple[int, int | None]:
    """The worker that msrun's log says failed first: its status, negative for a signal, and its rank; else (0, None).

    Args:
        msrun_log: text of the log of this launch.
        ranks: rank by process id; a worker that ended before anybody saw it is missing, and has rank None.
    """
    failed = re.search(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)", msrun_log)
    return (int(failed[2]), ranks.get(int(failed[1]))) if failed else (0, None)


def first_cause(logs: Mapping[str, Path]) -> tuple[str, str] | None:
    """The name and the first error of the first log with one, if possible with one that is not another rank's doing."""
    errors = [(name, error) for name, log in logs.items() if (error := first_error(log))]
    return next(
        (found for found in errors if not CONSEQUENCE.search(" ".join(found[1].split()))), next(iter(errors), None)
    )


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


def last_lines(log: Path, most: int = 6) -> str:
    """The end of a log, for an error that nothing is known of; MindSpore's own notes are left out."""
    text = log.read_text("utf-8", "replace") if log.is_file() else ""
    lines = [
        line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(("[INFO]", "[WARNING]"))
    ]
    return "\n".join(lines[-most:])


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


def _failed(process: psutil.Process) -> bool:
    """Whether a process that its parent has not taken note of yet ended with an error; False where that is not told."""
    try:
        state, *rest = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state == "Z" and rest[EXIT_CODE] != "0"


def _say(text: str) -> None:
    print(f"msrun_launch: {text}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with one line."""
        overrides = re.search(r"\b\S+=\S*", message)
        hint = "; put -- before overrides" if overrides else ""
        self.exit(2, f"error: {message}{hint}; usage: {USAGE}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; the exit status."""
    parser = _Parser(
        prog="msrun_launch.sh", usage=USAGE, epilog=VARIABLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("N", nargs="?", type=int, default=8)
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, overrides = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    try:
        cluster = Cluster.from_environment(given.N, os.environ)
        load_recipe(given.recipe, [override for override in overrides if not override.startswith("--")])
        cluster.check_address()
        launch = Launch(cluster, [given.recipe, *overrides])
    except VarlenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _look_after(launch, cluster)


def _look_after(launch: Launch, cluster: Cluster) -> int:
    """Pass signals on and show the log of a rank until all have ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, launch.ask_to_stop)
    _say(f"{cluster.workers} ranks, {cluster.local_workers} on this node; logs in {cluster.log_dir}")
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(cluster.log_of(cluster.first_rank), ended))
    follower.start()
    try:
        return launch.wait()
    finally:
        ended.set()
        follower.join()


if __name__ == "__main__":
    sys.exit(main())
