"""`ms-varlen` in child processes, for test_resume.py and test_cli.py: a tiny recipe, its runs, and faults in them.

As a script this file is a server that imports MindSpore once and forks for every command, which saves most of a small
run's time. Each line on stdin is `{"command": ["train", "recipe.yaml"], "faults": [{"kind": "kill_in_step", "step":
2}]}`; each line on stdout is the result: `status` (minus the signal's number after a kill), `stdout` and `stderr`.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # it also runs as a program, which imports its neighbours

from tests.support.tiny_recipe import numbered, write_corpus, write_recipe  # noqa: E402

PROGRAM = Path(sys.executable).with_name("ms-varlen")
TIMES = {"step_ms", "data_ms"}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """The recipe of a tiny decoder, its first run, which compiled all graphs, and a server for further runs.

    Attributes:
        recipe: path of the recipe: 12 steps of two micro-batches, 4 steps an epoch.
        cache: folder of token stores and graphs.
        run: the first run's folder.
        done: what the program printed.
        program: the server.
    """

    recipe: str
    cache: Path
    run: Path
    done: subprocess.CompletedProcess
    program: "Server"

    def train(self, folder, *arguments, faults=()):
        """`ms-varlen train` of the recipe into another folder."""
        return self.program("train", self.recipe, f"checkpoint.output_dir={folder}", *arguments, faults=faults)


@functools.cache
def first_run(base):
    """Write the recipe and a corpus of short and long documents below `base` and run it, once for all modules."""
    folder = base / "tiny"
    folder.mkdir()
    rng = random.Random(1)
    lengths = [min(int(rng.lognormvariate(3, 0.9)) + 3, 150) for _ in range(60)]
    write_corpus(folder, numbered(rng, lengths))
    recipe = write_recipe(
        folder,
        data={"store_dir": None},
        batch={"token_budget": 256, "micro_batches": 2},
        shapes={"divisor": 32},
        model={"config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
        train={"steps": 12, "warmup_steps": 2, "schedule": "constant", "eval_every": 3},
        graph={"mode": "graph"},
        checkpoint={"every": 3},
    )
    done = ms_varlen(folder / "cache", "train", str(recipe), "--json")
    assert done.returncode == 0, done.stderr
    return Tiny(str(recipe), folder / "cache", folder / "output" / "varlen", done, Server(folder / "cache"))


def environment(cache):
    """Return the variables of a child that keeps token stores and graphs below `cache`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MS_COMPILER_CACHE", "GLOG"))}
    return {**kept, "XDG_CACHE_HOME": str(cache), "COLUMNS": "200"}


def ms_varlen(cache, *arguments):
    """Run the installed program."""
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=300, env=environment(cache)
    )


class Server:
    """This module as a server; call it with the arguments of `ms-varlen`."""

    def __init__(self, cache):
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(cache)
        )
        atexit.register(self._process.communicate)  # the server exits when its stdin ends

    def __call__(self, *command, faults=()):
        request = json.dumps({"command": command, "faults": faults})
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(command, **answer)


def metrics(folder):
    """Return the lines of a run's metrics.jsonl without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def arrays(checkpoint):
    """Bytes of every array of a checkpoint, by file and name."""
    files = ("model.safetensors", "optimizer.safetensors")
    return {(file, name): value.tobytes() for file in files for name, value in load_file(checkpoint / file).items()}


def checkpoints(folder):
    """Steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def at_step(kind, step):
    """A fault between accumulating a step's gradient and applying it: where its learning rate is looked up."""
    from ms_varlen.train import loop
    from tests.support.faults import kill_when

    if kind == "kill_in_step":
        return kill_when("ms_varlen.train.loop:learning_rate", only=lambda _, at: at == step)
    original = loop.learning_rate

    def interrupting(config, at):
        if at == step:
            print(f"interrupted at {time.time()}", file=sys.stderr, flush=True)
            signal.raise_signal(signal.SIGINT)
        return original(config, at)

    return mock.patch.object(loop, "learning_rate", interrupting)


def in_micro_batch(kind, number):
    """A fault in the `number`-th micro-batch that is trained: NaN in a weight's gradient, or no label."""
    from mindspore import Tensor

    from ms_varlen.train.graphs import TrainingGraphs

    if kind == "no_labels":
        return without_labels(number)
    original, calls = TrainingGraphs.accumulate, []

    def faulty(graphs, columns):
        calls.append(columns)
        loss_sum = original(graphs, columns)
        if len(calls) == number:
            gradient = graphs.accumulate_cell.accumulated[0]
            gradient.set_data(Tensor(np.full(gradient.shape, np.nan, np.float32)))
        return loss_sum

    return mock.patch.object(TrainingGraphs, "accumulate", faulty)


def without_labels(number):
    """No label in the `number`-th micro-batch that is served."""
    from ms_varlen.batches.dataset import MicroBatches

    original, calls = MicroBatches.micro_batch, []

    def faulty(batches, ids):
        columns = original(batches, ids)
        calls.append(ids)
        return columns if len(calls) != number else columns | {"labels": np.full_like(columns["labels"], -100)}

    return mock.patch.object(MicroBatches, "micro_batch", faulty)


def moved_end(number):
    """One segment end, off by one in what attention is given for the `number`-th micro-batch."""
    from ms_varlen.lengths import SeqLens
    from ms_varlen.train import graphs

    original, calls = graphs.attention_columns, []

    def tampered(lens, body):
        calls.append(lens)
        if len(calls) == number:
            lengths = lens.seq_lens.copy()
            lengths[:2] += [-1, 1]
            lens = SeqLens.packed(lengths, lens.tokens, lens.tokens)
        return original(lens, body)

    return mock.patch.object(graphs, "attention_columns", tampered)


def full_disk(step):
    """No room for the checkpoint of a step."""
    from ms_varlen.checkpoint import store

    original = store.save_file

    def no_room(tensors, path, **kwargs):
        if path.parent.name.endswith(store.step_name(step)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path, **kwargs)

    return mock.patch.object(store, "save_file", no_room)


def nan_weight():
    """A NaN among the weights, from the first step on."""
    from mindspore import Tensor

    from ms_varlen.train.loop import TrainingLoop

    original = TrainingLoop.run

    def poisoned(loop):
        weight = loop._graphs.apply_cell.weights[0]
        weight.set_data(Tensor(np.full(weight.shape, np.nan, np.float32)))
        return original(loop)

    return mock.patch.object(TrainingLoop, "run", poisoned)


def context(kind, **where):
    """The context in which a fault happens."""
    from tests.support.faults import kill_at

    if kind in ("kill_in_step", "interrupt"):
        return at_step(kind, **where)
    if kind in ("nan", "no_labels"):
        return in_micro_batch(kind, **where)
    others = {"moved_end": moved_end, "nan_weight": nan_weight, "full_disk": full_disk}
    return others[kind](**where) if kind in others else kill_at(kind, **where)


def main():
    # Set as `main` of the program does, before MindSpore is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    from ms_varlen.cli import app as cli
    from ms_varlen.diagnose.align import align  # noqa: F401 (imported for the children)
    from ms_varlen.diagnose.pages import run_page  # noqa: F401
    from ms_varlen.train import run  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                with contextlib.ExitStack() as stack:
                    for fault in request["faults"]:
                        stack.enter_context(context(**fault))
                    sys.exit(cli.main(request["command"]))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            err.seek(0)
            print(json.dumps({"returncode": status, "stdout": out.read(), "stderr": err.read()}), flush=True)


if __name__ == "__main__":
    main()
