"""Who finds a planted fault: the batch check, align, the linter, or nobody."""

import contextlib
import functools
import random
import time
from pathlib import Path

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.diagnose.align.align import align
from ms_varlen.diagnose.doctor.doctor import examine
from ms_varlen.diagnose.doctor.findings import RED
from ms_varlen.diagnose.lint.lint import lint_batch
from ms_varlen.errors import VarlenError
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.train.run import train
from ms_varlen.workload.workload import prepare
from tests.support.planted import Fault, changed_columns
from tests.support.tiny_recipe import numbered, write_corpus, write_recipe


def detection_recipe(folder: Path) -> Path:
    """Write a recipe of two layers and its corpus of short documents; return its path."""
    rng = random.Random(1)
    lengths = [min(int(rng.lognormvariate(2.6, 0.7)) + 3, 56) for _ in range(60)]
    write_corpus(folder, numbered(rng, lengths))
    return write_recipe(
        folder,
        data={"eval_fraction": 0},
        batch={"token_budget": 256},
        model={"config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}},
        train={"steps": 2},
        checkpoint={"resume": "never"},
    )


def find(fault: Fault | None, recipe: Path) -> tuple[str, str | None, float]:
    """(who found it, the code, seconds); ("nobody", None, seconds) where all was well."""
    begin = time.perf_counter()
    with fault.plant() if fault else contextlib.nullcontext():
        try:
            result = align(load_recipe(recipe, []), 1, lambda *_: None)
        except VarlenError as error:
            return "check", error.code, time.perf_counter() - begin
    if result.verdict.passed:
        return "nobody", None, time.perf_counter() - begin
    return "align", result.bisect.code, time.perf_counter() - begin


RECIPE_FAULTS: tuple[tuple[str, str, list[str]], ...] = (
    (
        "bucket list that misses the maximum",
        "SHAPE-BUCKET",
        ["mode=bucketed", "shapes.kind=buckets", "shapes.row_buckets=[16, 32]", "batch.max_segments=64"],
    ),
    ("range that is too small", "SHAPE-RANGE", ["shapes.max=128"]),
    ("budget that is no multiple of the divisor", "SHAPE-DIVISOR", ["batch.token_budget=250"]),
    ("positions that do not cover seq_length", "SHAPE-POSITIONS", ["model.max_position_embeddings=32"]),
    ("head size that an NPU refuses", "ASCEND-LIMITS", ["model.config.num_attention_heads=4"]),
    ("a key that is none", "RECIPE", ["batch.batch_size=8"]),
    ("a source that is not there", "RECIPE", ["data.source=gone.jsonl"]),
)
"""Faults of a recipe that the doctor must name: what, its code, and the overrides that make it."""


FILE_FAULTS = {
    "padded checkpoint in a varlen run": "CKPT-MODE",
    "a flipped byte in manifest.json": "CKPT-CORRUPT",
    "a flipped byte in model.safetensors": "CKPT-CORRUPT",
    "a flipped byte in state.json": "CKPT-CORRUPT",
    "no optimizer.safetensors": "CKPT-CORRUPT",
    "a flipped byte in the token store": "DATA-STORE",
    "other texts of the same lengths under a run": "CKPT-RECIPE",
    "fewer steps than the checkpoint has": "CKPT-RECIPE",
}
"""Faults of files that a run left, or of what it would go on with, and their codes."""


def find_in_recipe(recipe: Path, overrides: list[str]) -> tuple[str, str | None, float]:
    """What the doctor says without its probe; as `find`."""
    begin = time.perf_counter()
    result = examine(recipe, overrides, for_ascend=True, probe=False)
    code = next((check["code"] for check in result["checks"] if check["level"] == RED), None)
    return ("doctor" if code else "nobody"), code, time.perf_counter() - begin


def find_in_files(recipe: Path, fault: str) -> tuple[str, str | None, float]:
    """Damage what a run left on disk, and ask the doctor; as `find`.

    Args:
        recipe: is trained for its two steps first.
        fault: one of `FILE_FAULTS`.
    """
    folder = recipe.parent / fault.replace(" ", "-")
    overrides = [f"checkpoint.output_dir={folder}", f"data.store_dir={folder}/stores"]
    if "padded" in fault:
        padded = ["mode=padded", "model.variable_seq_lengths=false", "batch.token_budget=null", "batch.rows=4"]
        train(load_recipe(recipe, [*overrides, *padded, "batch.pad_to=batch"]), lambda _: None)
        (checkpoint,) = (folder / "padded").glob("step_*")
        return find_in_recipe(recipe, [*overrides, f"checkpoint.resume={checkpoint}"])
    train(load_recipe(recipe, overrides), lambda _: None)
    (checkpoint,) = (folder / "varlen").glob("step_*")
    if "steps" in fault:
        return find_in_recipe(recipe, [*overrides, "checkpoint.resume=auto", "train.steps=1"])
    if "texts" in fault:
        other = folder / "other.jsonl"
        other.write_text((recipe.parent / "corpus.jsonl").read_text().replace("a", "b"))
        return find_in_recipe(recipe, [*overrides, "checkpoint.resume=auto", f"data.source={other}"])
    path = next(folder.glob("stores/*/train/tokens.bin")) if "store" in fault else checkpoint / fault.split()[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if not fault.startswith("no "):
        path.write_bytes(content)
    return find_in_recipe(recipe, [*overrides, "checkpoint.resume=auto"])


def mutate(columns: dict[str, np.ndarray], rng: np.random.Generator) -> tuple[str, dict[str, np.ndarray]]:
    """A small random change of one column, and what it was."""
    name = rng.choice(["labels", "position_ids", "seq_lens", "actual_seq_qlen", "input_ids"])
    values = columns[name].copy()
    kind = rng.choice(["add", "swap", "copy"])
    a, b = rng.integers(values.size, size=2)
    if kind == "add":
        values[a] += rng.choice([-1, 1])
    elif kind == "swap":
        values[a], values[b] = values[b], values[a]
    else:
        values[a] = values[b]
    return f"{kind} {name}", columns | {str(name): values.astype(np.int32)}


def _instead(mutated: dict[str, np.ndarray], _: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return mutated


def detection_rate(recipe: Path, count: int) -> dict[str, int]:
    """How many of `count` mutations the batch check, the linter, or nobody finds."""
    workload = prepare(load_recipe(recipe, []))
    plan = workload.plans.epoch(0)
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, lambda lens: {})
    rng = np.random.default_rng(0)
    found = {"check": 0, "lint": 0, "no change": 0}
    for index in range(count):
        ids = plan.micro_batch(index % plan.num_steps, 0)
        healthy = batches.micro_batch(ids)
        what, mutated = mutate(healthy, rng)
        if all(np.array_equal(healthy[name], mutated[name]) for name in healthy):
            found["no change"] += 1
            continue
        with changed_columns(functools.partial(_instead, mutated)):
            try:
                batches.micro_batch(ids)
            except VarlenError:
                found["check"] += 1
                continue
        if lint_batch(mutated, workload.store.pad_id):
            found["lint"] += 1
        else:
            key = f"silent: {what}, " + explain(healthy, mutated)
            found[key] = found.get(key, 0) + 1
    return found


def explain(healthy: dict[str, np.ndarray], mutated: dict[str, np.ndarray]) -> str:
    """Why nobody can know that a batch was changed."""
    real = int(healthy["seq_lens"].sum())
    name = next(name for name in healthy if not np.array_equal(healthy[name], mutated[name]))
    same_size = healthy[name].size == mutated[name].size
    places: np.ndarray = np.flatnonzero(healthy[name] != mutated[name]) if same_size else np.zeros(0, np.int64)
    if name == "input_ids" and len(places) and (places >= real).all():
        return "an id in the padding, which counts for nothing"
    if name == "position_ids" and len(places) and (places >= real).all():
        return "a position in the padding, which counts for nothing"
    if name == "labels":
        return "a target taken away, which is what masking a prompt looks like"
    return "an id that is consistent with its label"
