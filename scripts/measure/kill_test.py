"""Kill a run of two ranks at random moments until it is done: ``python scripts/measure/kill_test.py --kills 20``.

Each SIGKILL hits one rank or all of them, at a random moment or while a checkpoint is being written; then the run
restarts. At the end weights, metrics (without times) and ledger must equal those of an undisturbed run,
no process may be left, and the launcher must have reported each kill (status 137).
Prints one JSON object; exit status 0 if all holds.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
mode: varlen
data: {{source: {folder}/corpus.jsonl, tokenizer: bytes, eval_fraction: 0.1, store_dir: {folder}/stores}}
batch: {{token_budget: 256}}
shapes: {{kind: range, divisor: 32}}
model:
  config: {{architecture: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
  variable_seq_lengths: true
  seq_length: 64
  max_position_embeddings: 64
train: {{steps: {steps}, learning_rate: 1e-2, schedule: constant, eval_every: 50}}
graph: {{compile_cache: {folder}/cache}}
checkpoint: {{output_dir: {folder}/output, every: 5, keep: 2}}
"""
TIMES = {"step_ms", "data_ms", "exchange_ms", "imbalance"}


def start(recipe: Path, output: Path, port: int) -> subprocess.Popen:
    """Start the launcher in a new session."""
    environment = {**os.environ, "MASTER_PORT": str(port), "LOG_DIR": str(output.parent / f"log_{output.name}")}
    search = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    command = [sys.executable, "-m", "ms_varlen.launch", str(recipe), "2", "--"]
    return subprocess.Popen(
        [*command, f"checkpoint.output_dir={output}"],
        cwd=ROOT,
        env={**environment, "PATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def family(launcher: subprocess.Popen) -> list[psutil.Process]:
    """Return all processes below the launcher."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(launcher.pid).children(recursive=True)
    return []


def workers(launcher: subprocess.Popen) -> list[psutil.Process]:
    """Return the ranks among them."""
    found = []
    for process in family(launcher):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MS_ROLE") == "MS_WORKER":
                found.append(process)
    return found


def lines_of(run: Path) -> int:
    """Return the number of steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def kill_once(launcher: subprocess.Popen, run: Path, rng: random.Random) -> dict[str, Any] | None:
    """Wait for a random moment of training and kill. Return None if the run finished before."""
    target, saving = rng.choice(["worker", "group"]), rng.random() < 0.5
    goal = lines_of(run) + rng.randint(1, 12)
    while launcher.poll() is None and lines_of(run) < goal:
        time.sleep(0.01)
    if saving:
        end = time.monotonic() + 20
        while launcher.poll() is None and not list(run.glob(".tmp-step_*")) and time.monotonic() < end:
            time.sleep(0.0005)
    else:
        time.sleep(rng.random() * 0.2)
    ranks = workers(launcher)
    if launcher.poll() is not None or not ranks:
        return None
    step = lines_of(run)
    victims = [rng.choice(ranks)] if target == "worker" else ranks
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    begin, others = time.monotonic(), family(launcher)
    status = launcher.wait(120)
    left = [process.pid for process in others if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    found = {"target": target, "saving": saving, "after_step": step, "status": status, "left": left}
    return {**found, "seconds": round(time.monotonic() - begin, 1)}


def state_of(run: Path) -> dict[str, Any]:
    """Return what must be equal: the last weights and moments, metrics without times, and the saved state."""
    last = sorted(run.glob("step_*"))[-1]
    arrays = {
        f"{name}:{key}": value.tobytes()
        for name in ("model", "optimizer")
        for key, value in load_file(last / f"{name}.safetensors").items()
    }
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": last.name,
        "arrays": arrays,
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in metrics],
        "state": json.loads((last / "state.json").read_text()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8218)
    given = parser.parse_args()
    rng, folder = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="kill_test-"))
    texts = ("".join(rng.choices("abcdefgh ", k=min(int(rng.lognormvariate(3, 0.9)) + 3, 150))) for _ in range(200))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, steps=given.steps))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    launcher = start(recipe, folder / "whole", given.port)
    try:
        assert launcher.wait() == 0, f"the undisturbed run failed, see {folder}/log_whole"
        kills: list[dict[str, Any]] = []
        for attempt in range(1, given.kills + 50):
            launcher = start(recipe, folder / "killed", given.port + attempt % 50)
            killed = kill_once(launcher, folder / "killed" / "varlen", rng) if len(kills) < given.kills else None
            if killed is None:
                if launcher.wait() == 0:
                    break
                continue
            kills.append(killed)
            print(json.dumps(killed), file=sys.stderr, flush=True)
    finally:
        for process in family(launcher):
            process.kill()
    whole, disturbed = (state_of(folder / name / "varlen") for name in ("whole", "killed"))
    equal = {key: whole[key] == disturbed[key] for key in whole}
    left, unreported = sum(len(kill["left"]) for kill in kills), sum(kill["status"] != 137 for kill in kills)
    print(json.dumps({"kills": len(kills), "equal": equal, "left": left, "untold": unreported}))
    well = all(equal.values()) and not left and not unreported and len(kills) == given.kills
    if well:
        shutil.rmtree(folder)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
