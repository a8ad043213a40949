"""How long several ranks of one machine take to start, compile cache cold and warm: the main contender under `msrun`.

Each rank trains two steps of its part of the plan, gradients summed over the ranks. Their losses are compared: a rank
that loads another's graphs must compute the bits that it did with its own.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ms_varlen.diagnose.bench.contenders import MAIN
from ms_varlen.diagnose.bench.process import Reply, WorkerError

START_SECONDS = 600
# In a folder of its own: Python looks for modules next to the script first, and here some have names of its library's.
SCRIPT = """\
import pathlib
from ms_varlen.diagnose.bench.ranks import run_rank
run_rank(pathlib.Path(__file__).parent)
"""


def measure_ranks(settings: Mapping[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Start the ranks twice, the second time with the compile cache that the first left.

    Args:
        settings: of a contender; its compile cache is empty.
        ranks: processes to start.
        folder: for logs and answers.
    Returns:
        `ranks`, and for `cold` and `warm` what each rank said: seconds to compile, until the first step begins and of
        the first step, the state of its cache, the losses of two steps. `entries`: what the cache holds for all of
        them; `same_losses`: whether warm ranks computed the same bits as cold ones.
    Raises:
        WorkerError: a rank failed.
    """
    found = {name: _start(settings, ranks, folder / name) for name in ("cold", "warm")}
    cache = Path(settings["recipe"]["graph"]["compile_cache"])
    losses = [[reply["losses"] for reply in replies] for replies in found.values()]
    entries = len([path for path in cache.iterdir() if ".tmp-" not in path.name])
    return {"ranks": ranks, **found, "entries": entries, "same_losses": losses[0] == losses[1]}


def _start(settings: Mapping[str, Any], ranks: int, folder: Path) -> list[Reply]:
    folder.mkdir(parents=True, exist_ok=True)
    answers = [folder / f"rank_{rank}.json" for rank in range(ranks)]
    for path in answers:
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}"]
    command += [f"--local_worker_num={ranks}", f"--master_port={_free_port()}", f"--log_dir={folder.absolute()}"]
    command += ["--join=True", str(folder.absolute() / "start.py")]
    (folder / "start.py").write_text(SCRIPT)
    (folder / "settings.json").write_text(json.dumps({**settings, "name": MAIN}))
    # msrun starts the `python` of the PATH.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with (folder / "msrun.log").open("wb") as log:
        try:
            subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, "PATH": search}, timeout=START_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{ranks} ranks did not start within {START_SECONDS} s, see {folder}") from None
    if not all(path.is_file() for path in answers):
        raise WorkerError(f"a rank of {ranks} failed, see {folder}")
    return [json.loads(path.read_bytes()) for path in answers]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_rank(folder: Path) -> None:
    """One rank: compile, train two steps, and write down what it took."""
    from ms_varlen.diagnose.bench.worker import OwnContender
    from ms_varlen.ranks.join import join_ranks
    from ms_varlen.recipe.recipe import parse_recipe
    from ms_varlen.train.device import set_up_device
    from ms_varlen.train.schedule import learning_rate

    settings = json.loads((folder / "settings.json").read_bytes())
    recipe = parse_recipe(settings["recipe"])
    set_up_device(recipe.device, recipe.graph)
    ranks = join_ranks(recipe.device)
    contender = OwnContender({**settings, "rank": ranks.rank, "ranks": ranks.size})
    ready = contender.ready()
    first, second = (contender.step(step, learning_rate(recipe.train, step + 1)) for step in range(2))
    kept = {key: ready[key] for key in ("compile_seconds", "start_seconds", "compile_cache")}
    losses = [first["loss"], second["loss"]]
    answer = {**kept, "first_step_seconds": first["seconds"], "losses": losses}
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(answer))
