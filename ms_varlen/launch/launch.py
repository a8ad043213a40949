"""Start a recipe's ranks under msrun, watch them, and report the first error.

msrun alone kills its workers without a word on SIGINT and leaves them running on SIGTERM. `Launch` forwards both to the
workers, which save and exit. It kills all of them if they do not exit within STOP_SECONDS, or if one of them dies. When
it returns, no process of the launch is left on this node.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

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

SCHEDULER_SECONDS = 5
"""How long the scheduler may outlive the ranks; by itself it waits half a minute for dead ones."""
NOTHING_TO_SAVE_SECONDS = 10
"""How long ranks have to exit if none has joined the others: until then MindSpore holds signals back."""

INTERRUPTED = 130
"""Status of a rank that was asked to stop before its first step."""

JOINED = re.compile(r"rank \d+ of\s+\d+")
"""A rank logs this when it has joined the others."""
EXIT_CODE = 48
"""Place of the exit code in /proc/PID/stat, counted from behind the state."""
CONSEQUENCE = re.compile(r"rank \d+ stopped, and with it|, and is gone \(")
"""Follow-up errors: a rank prints these only because another rank failed first."""


class Launch:
    """A running msrun and its processes.

    Each rank leads a process group of its own, and msrun's group holds the scheduler: a SIGKILL goes to whole groups, a
    SIGTERM to the ranks alone, because the scheduler must serve them until they have saved.

    Args:
        cluster: the ranks to start.
        arguments: of the training script.
    """

    def __init__(self, cluster: Cluster, arguments: Sequence[str]):
        self._cluster = cluster
        # A child's environment cannot hold its own process id; the shell knows its own, and becomes msrun.
        shell = ["sh", "-c", f'{MSRUN_PID}=$$ exec "$@"', "msrun"]
        # msrun starts the first `python` of PATH.
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        launcher = os.getpid()
        adopt_orphans()
        with cluster.take_log_dir() as log:
            # In a new session, so that Ctrl-C on the terminal reaches this process alone.
            self._msrun = subprocess.Popen(
                [*shell, *cluster.command(arguments)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": search},
                start_new_session=True,
                preexec_fn=lambda: ask_for_signal_of_parents_death(launcher),
            )
        self._workers: dict[int, psutil.Process] = {}  # by rank
        self._scheduler: psutil.Process | None = None
        self._stop = StopRequest()
        self._asked: set[int] = set()  # ranks that got a SIGTERM
        self._stop_now = self._asked_early = self._gave_up = False
        self._scheduler_failed = self._scheduler_lingered = self._msrun_killed = False

    def ask_to_stop(self, number: int, _frame: object = None) -> None:
        """Handle SIGTERM and SIGINT: the first asks the ranks to stop, a second one kills them."""
        self._stop_now = self._stop.note(number) or self._stop_now

    def wait(self) -> int:
        """Watch the ranks until all have exited. Return 0, or the status of the first rank that failed."""
        deadline = linger = float("inf")
        while self._msrun.poll() is None or any(map(alive, self._workers.values())):
            self._find_processes()
            if not self._scheduler_failed and self._scheduler is not None and _failed(self._scheduler):
                self._scheduler_failed = True
                _say("the scheduler failed: the ranks are stopped")
            # If msrun is dead, the system has sent the workers a SIGTERM.
            if self._stop.asked or self._scheduler_failed or self._msrun.returncode is not None:
                self._asked_early = self._asked_early or not (self._asked or self._joined())
                self._ask_ranks()
                if deadline == float("inf") or self._scheduler_failed:
                    deadline = min(deadline, time.monotonic() + self._stop_seconds())
            if self._stop_now or time.monotonic() > deadline:
                _say(f"ranks are killed after {'a second signal' if self._stop_now else 'their time to stop'}")
                self._gave_up = True
                break
            if len(self._workers) == self._cluster.local_workers and not any(map(alive, self._workers.values())):
                linger = min(linger, time.monotonic() + SCHEDULER_SECONDS)
                if time.monotonic() > linger:
                    self._scheduler_lingered = True
                    break
            time.sleep(0.2)
        self._find_processes()
        self._msrun_killed = (self._msrun.poll() or 0) < 0
        self._kill_all()
        return self._status()

    def _stop_seconds(self) -> float:
        """How long ranks may take to exit. Without a scheduler they cannot wait for each other's save."""
        if self._scheduler_failed or not self._joined():
            return min(NOTHING_TO_SAVE_SECONDS, self._cluster.stop_seconds)
        return self._cluster.stop_seconds

    def _joined(self) -> bool:
        """Whether a rank of this node has joined the others."""
        logs = map(self._cluster.log_of, self._workers)
        return any(log.is_file() and JOINED.search(log.read_text("utf-8", "replace")) for log in logs)

    def _find_processes(self) -> None:
        """Note the ranks and the scheduler among msrun's children.

        A child between fork and exec still shows msrun's environment, without a role; it is found on the next look.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._msrun.pid).children():
                with contextlib.suppress(psutil.Error):
                    environment = process.environ()
                    if environment.get(ROLE) == SCHEDULER:
                        self._scheduler = process
                    elif ROLE in environment:
                        self._workers[int(environment["RANK_ID"])] = process

    def _ask_ranks(self) -> None:
        for rank in self._workers.keys() - self._asked:
            self._asked.add(rank)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._workers[rank].terminate()

    def _kill_all(self) -> None:
        """Kill all that is left of this launch."""
        for worker in self._workers.values():
            _kill_group(worker.pid)
        if self._scheduler is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._scheduler.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._msrun.wait(SCHEDULER_SECONDS)  # it logs which rank failed
        _kill_group(self._msrun.pid)
        self._msrun.wait()

    def _status(self) -> int:
        ranks = {worker.pid: rank for rank, worker in self._workers.items()}
        status, rank = failed_worker(self._cluster.msrun_log.read_text("utf-8", "replace"), ranks)
        if self._msrun_killed and status == 0:
            status, rank = self._failed_orphan()
        # If we killed a scheduler that outlived its ranks, ignore msrun's failure status: the run had succeeded. So it
        # had if msrun was killed together with everything else, but on a request to stop, and the ranks have saved.
        saved = self._msrun.returncode == 0 or self._scheduler_lingered or (self._msrun_killed and self._stop.asked)
        if status == 0 and saved and not self._scheduler_failed:
            return 0
        if self._stop.number is not None and (self._asked_early or (status == INTERRUPTED and not self._stop_now)):
            _say(f"stopped on {signal.Signals(self._stop.number).name} before the first step; nothing to save")
            return 128 + self._stop.number
        if status == 0 and self._msrun_killed:
            status = self._msrun.returncode
            _say(f"msrun was killed by {signal.Signals(-status).name}, and the ranks with it")
        status = 1 if self._scheduler_failed else status or 1
        self._report(rank, status)
        return status if status > 0 else 128 - status

    def _failed_orphan(self) -> tuple[int, int | None]:
        """As `failed_worker`, for ranks that outlived msrun: they are children of this process by then."""
        for rank, worker in self._workers.items():
            with contextlib.suppress(psutil.Error):
                if status := worker.wait(0):
                    return int(status), rank
        return 0, None

    def _report(self, rank: int | None, status: int) -> None:
        order = sorted(self._workers, key=lambda other: (other != rank, other))
        by_signal = status < 0 and not self._scheduler_failed
        if rank is not None and not self._scheduler_failed:
            how = f"was killed by {signal.Signals(-status).name}" if by_signal else f"exited with status {status}"
            if -status == signal.SIGKILL and not self._gave_up:
                how += " (the system does so when memory runs out, see dmesg)"
            _say(f"rank {rank} {how}, the others were killed too; its log is {self._cluster.log_of(rank)}")
        logs = {f"rank {other}": self._cluster.log_of(other) for other in order}
        scheduler = {"the scheduler": self._cluster.scheduler_log}
        logs = {**scheduler, **logs} if self._scheduler_failed else {**logs, **scheduler}
        # msrun's own errors follow from a rank's, but if it started nothing there is no other.
        logs |= {} if self._workers or self._scheduler else {"msrun": self._cluster.msrun_log}
        found = first_cause(logs)
        if found is not None:
            _say(f"first error of {found[0]}: {found[1]}")
        elif not by_signal:
            name, log = next(iter(logs.items()))
            _say(f"no log holds a known error; see {self._cluster.log_dir}; last lines of {name}:\n{last_lines(log)}")


def failed_worker(msrun_log: str, ranks: Mapping[int, int]) -> tuple[int, int | None]:
    """Return status (negative for a signal) and rank of the worker that failed first by msrun's log, else (0, None).

    Args:
        msrun_log: text of the log of this launch.
        ranks: rank by process id. A worker that exited before it was found is missing; its rank is None.
    """
    failed = re.search(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)", msrun_log)
    return (int(failed[2]), ranks.get(int(failed[1]))) if failed else (0, None)


def first_cause(logs: Mapping[str, Path]) -> tuple[str, str] | None:
    """Return name and first error of the first log that holds one; follow-up errors count only if there is no other."""
    errors = [(name, error) for name, log in logs.items() if (error := first_error(log))]
    return next(
        (found for found in errors if not CONSEQUENCE.search(" ".join(found[1].split()))), next(iter(errors), None)
    )


def first_error(log: Path) -> str | None:
    """Return the first error in a worker's log: our message with all its lines, or the last line of a traceback."""
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
    """Return the last lines of a log, for an unknown error, without MindSpore's own notes."""
    text = log.read_text("utf-8", "replace") if log.is_file() else ""
    lines = [
        line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(("[INFO]", "[WARNING]"))
    ]
    return "\n".join(lines[-most:])


@contextlib.contextmanager
def shown(log: Path) -> Iterator[None]:
    """Copy a log to the terminal while it grows, until the block is left."""
    done = threading.Event()
    follower = threading.Thread(target=_follow, args=(log, done))
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()


def _follow(log: Path, done: threading.Event) -> None:
    while not log.is_file() and not done.wait(0.2):
        pass
    if log.is_file():
        with log.open("r", encoding="utf-8", errors="replace") as lines:
            last = False
            while not last:
                last = done.wait(0.3)
                sys.stdout.write(lines.read())
                sys.stdout.flush()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _failed(process: psutil.Process) -> bool:
    """Whether a process is a zombie that failed; False if the system does not show its exit code."""
    try:
        state, *rest = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state == "Z" and rest[EXIT_CODE] != "0"


def _say(text: str) -> None:
    print(f"msrun_launch: {text}", file=sys.stderr, flush=True)
