"""Plants every fault that people make, and prints which code names it, who found it, and how long that took.

python scripts/fault_table.py                 # the table, about a minute
python scripts/fault_table.py --mutations 300 # beside it: random mutations that no check was written for
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ms_varlen.data.layouts import Layout
from ms_varlen.diagnose.lint import lint_batch
from ms_varlen.errors import VarlenError
from ms_varlen.testing.planted import FAULTS, Fault, changed_columns

RECIPE = """
mode: varlen
data: {{source: {corpus}, tokenizer: bytes, eval_fraction: 0, store_dir: {folder}/stores}}
batch: {{token_budget: 256}}
shapes: {{kind: range, divisor: 16}}
model:
  config: {{architecture: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}}
  variable_seq_lengths: true
  seq_length: 64
  max_position_embeddings: 64
train: {{steps: 2, learning_rate: 1e-2}}
graph: {{mode: pynative}}
checkpoint: {{output_dir: {folder}/output, resume: never}}
"""


def write_recipe(folder: Path) -> Path:
    """A tiny recipe with a corpus of its own."""
    rng = random.Random(1)
    lengths = [min(int(rng.lognormvariate(2.6, 0.7)) + 3, 56) for _ in range(60)]
    texts = [f"{number} " + "".join(rng.choices("abcdefgh ", k=length)) for number, length in enumerate(lengths)]
    corpus, recipe = folder / "corpus.jsonl", folder / "recipe.yaml"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe.write_text(RECIPE.format(corpus=corpus, folder=folder))
    return recipe


def find(fault: Fault | None, recipe: Path) -> tuple[str, str | None, float]:
    """(who found it, the code, seconds); ("nobody", None, seconds) where all was well."""
    from ms_varlen.diagnose.align import align
    from ms_varlen.train.recipe import load_recipe

    begin = time.perf_counter()
    with fault.plant() if fault else contextlib.nullcontext():
        try:
            result = align(load_recipe(recipe, []), 1, lambda *_: None)
        except VarlenError as error:
            return "check", error.code, time.perf_counter() - begin
    if result["passed"]:
        return "nobody", None, time.perf_counter() - begin
    return "align", result["bisect"]["code"], time.perf_counter() - begin


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


def detection_rate(recipe: Path, count: int) -> dict[str, int]:
    """How many of `count` mutations the batch check, the linter, or nobody finds."""
    from ms_varlen.data.dataset import MicroBatches
    from ms_varlen.train.recipe import load_recipe
    from ms_varlen.train.workload import prepare

    workload = prepare(load_recipe(recipe, []))
    plan, layout = workload.plans.epoch(0), workload.layout
    assert isinstance(layout, Layout)
    batches = MicroBatches(workload.store.train, layout, workload.store.pad_id, lambda lens: {})
    rng = np.random.default_rng(0)
    found = {"check": 0, "lint": 0, "no change": 0}
    for index in range(count):
        ids = plan.micro_batch(index % plan.num_steps, 0)
        healthy = batches.columns(ids)
        what, mutated = mutate(healthy, rng)
        if all(np.array_equal(healthy[name], mutated[name]) for name in healthy):
            found["no change"] += 1
            continue
        with changed_columns(lambda _, mutated=mutated: mutated):
            try:
                batches.columns(ids)
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
    places = np.flatnonzero(healthy[name] != mutated[name]) if healthy[name].size == mutated[name].size else []
    if name == "input_ids" and len(places) and (np.asarray(places) >= real).all():
        return "an id in the padding, which counts for nothing"
    if name == "position_ids" and len(places) and (np.asarray(places) >= real).all():
        return "a position in the padding, which counts for nothing"
    if name == "labels":
        return "a target taken away, which is what masking a prompt looks like"
    return "an id that is consistent with its label"


def main() -> int:
    """Print the table; 1 when a fault was not found or misnamed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=0, help="random mutations to try beside the table")
    parser.add_argument("--only", help="the fault with this name alone")
    options = parser.parse_args()
    os.environ.setdefault("GLOG_v", "3")  # before MindSpore is loaded
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder))
        faults = [fault for fault in FAULTS if options.only in (None, fault.name)]
        print(f"{'fault':<52} {'code':<16} {'found by':<8} seconds")
        for fault in [None, *faults]:
            who, code, seconds = find(fault, recipe)
            expected = ("nobody", None) if fault is None else (fault.found_by, fault.code)
            mark = "" if (who, code) == expected else f"   EXPECTED {expected}"
            wrong += bool(mark)
            print(
                f"{fault.name if fault else 'none (a healthy run)':<52} {code or '-':<16} {who:<8} {seconds:.2f}{mark}"
            )
        if options.mutations:
            print(json.dumps(detection_rate(recipe, options.mutations), indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
