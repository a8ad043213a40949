"""A contender of the bench in a process of its own, which runs one step when it is asked to.

So contenders take turns step by step while each keeps its own libraries, threads, compile cache and memory. Both ends
are here: `Worker` starts a process and asks it, `serve` answers inside it. One JSON object a line goes each way; the
worker's other output goes to its log file.

    python -m ms_varlen.diagnose.bench.process ms_varlen.diagnose.bench.worker
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ms_varlen.errors import VarlenError

Reply = dict[str, Any]
Answer = Callable[..., Reply]


class WorkerError(VarlenError):
    """A contender that could not be started or could not continue; the bench leaves it out and says why."""


class Worker:
    """A contender's process; leaving the context ends it.

    Args:
        module: what it runs; see `serve`.
        settings: handed to it, JSON values.
        log: file for everything that it prints.
        environment: of the process; by default that of this one.
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ms_varlen.diagnose.bench.process", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(os.environ if environment is None else environment),
                text=True,
            )
        self._send(settings)

    def ask(self, command: str, **values: Any) -> Reply:
        """Have a command carried out.

        Raises:
            WorkerError: it failed, or the process ended.
        """
        self._send({"command": command, **values})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"it ended with status {self._process.wait()} at {command!r}, see {self._log}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, values: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"it ended with status {self._process.wait()}, see {self._log}") from None


def serve(module: str) -> None:
    """Answer commands until the other end closes.

    Args:
        module: its function `start` takes the settings and returns command -> function; a function takes the command's
            values and returns a reply. Imported and called at the first command, so that a failure to start is an
            answer too.
    """
    with Path("/proc/self/oom_score_adj").open("w") as adjust:
        adjust.write("1000")  # short of memory, the system ends a contender and not the bench
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, libraries in C++ too, prints to the log
    settings = json.loads(sys.stdin.readline())
    answers: Mapping[str, Answer] | None = None
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answers = answers or importlib.import_module(module).start(settings)
            reply = answers[values.pop("command")](**values)
        except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as error:
            first = str(error).strip().partition("\n")[0]
            reply = {"error": f"{type(error).__name__}: {first}" if not isinstance(error, VarlenError) else str(error)}
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def peak_rss_mb() -> float:
    """Most memory that this process ever held, in MB (10^6 bytes)."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) * 1024 / 1e6


if __name__ == "__main__":
    serve(sys.argv[1])
