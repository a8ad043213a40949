"""Scenarios that test_ranks.py runs on the ranks of one msrun: `ranks_run.py FOLDER SCENARIO ...`.

Each rank writes a value or an error, and the seconds, of each scenario to `outcomes_<rank>.json`.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # msrun starts this file as a program

from tests.support.tiny_recipe import tiny_recipe

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def write_corpus(path, lengths, seed=0):
    """Write documents of these lengths in tokens of the byte tokenizer, end-of-text included."""
    rng = random.Random(seed)
    lines = (json.dumps({"text": "".join(rng.choices("abcdefgh ", k=length - 1))}) + "\n" for length in lengths)
    path.write_text("".join(lines))


def values(folder, name, corpus="corpus", **changes):
    """Return the recipe as plain values; `changes` replace ``section__key``."""
    recipe = tiny_recipe(
        folder,
        data={"source": f"{folder}/{corpus}.jsonl", "eval_fraction": 0.2},
        batch={"token_budget": 64},
        model={"seq_length": 32, "max_position_embeddings": 32},
        train={"steps": 3, "schedule": "constant"},
        checkpoint={"output_dir": f"{folder}/{name}", "every": 1, "keep": 9},
    )
    for key, value in changes.items():
        section, _, key = key.rpartition("__")
        (recipe[section] if section else recipe)[key] = value
    return recipe


MODES = {
    "varlen": {},
    "packed": {"mode": "packed"},
    "padded": {"mode": "padded", "batch": {"rows": 3}, "model__variable_seq_lengths": False},
}


def train(recipe):
    """Train; return the summary and the lengths of the micro-batches of this rank."""
    from ms_varlen.batches.dataset import MicroBatches
    from ms_varlen.recipe.recipe import parse_recipe
    from ms_varlen.train.run import train

    original, lengths = MicroBatches.micro_batch, []

    def noted(batches, ids):
        columns = original(batches, ids)
        lengths.append(columns["seq_lens"].tolist())
        return columns

    with mock.patch.object(MicroBatches, "micro_batch", noted):
        summary = train(parse_recipe(recipe), lambda metrics: None)
    return {"summary": summary, "lengths": lengths}


def served(change):
    """Change the columns of the micro-batches of this rank."""
    from ms_varlen.batches.dataset import MicroBatches

    original = MicroBatches.micro_batch
    return mock.patch.object(MicroBatches, "micro_batch", lambda batches, ids: change(original, batches, ids))


def silent(columns):
    return columns | {"labels": np.full_like(columns["labels"], -100)}


@scenario
def varlen(folder, rank):
    return train(values(folder, "two", train__eval_every=2))


@scenario
def packed(folder, rank):
    return train(values(folder, "two", **MODES["packed"]))


@scenario
def padded(folder, rank):
    return train(values(folder, "two", **MODES["padded"]))


@scenario
def shuffled_corpus(folder, rank):
    return train(values(folder, "shuffled", corpus="shuffled" if rank == 1 else "corpus"))


@scenario
def truncated_corpus(folder, rank):
    return train(values(folder, "truncated", corpus="truncated" if rank == 1 else "corpus"))


@scenario
def other_recipe(folder, rank):
    return train(values(folder, "recipe", train__learning_rate=0.02 if rank == 1 else 0.01))


@scenario
def other_mode(folder, rank):
    return train(values(folder, "mode", **MODES["packed" if rank == 1 else "varlen"]))


@scenario
def other_samples(folder, rank):
    """In step 2 rank 1 gets one sample less than planned."""
    calls = []

    def change(original, batches, ids):
        calls.append(ids)
        return original(batches, ids[:-1] if len(calls) == 2 and rank == 1 else ids)

    with served(change):
        return train(values(folder, "samples"))


@scenario
def other_step(folder, rank):
    """Rank 1 is one step ahead."""
    from ms_varlen.train import loop

    original = loop.StepPlace
    with mock.patch.object(loop, "StepPlace", lambda step, *rest: original(step + rank, *rest)):
        return train(values(folder, "step"))


@scenario
def error_on_one_rank(folder, rank):
    from ms_varlen.errors import DataError

    def change(original, batches, ids):
        if rank == 1:
            raise DataError("record 7 must be whole, got half of it")
        return original(batches, ids)

    with served(change):
        return train(values(folder, "error"))


@scenario
def silent_rank(folder, rank):
    """Rank 1 has no label in step 1, no rank has one in step 2."""
    calls = []

    def change(original, batches, ids):
        calls.append(ids)
        columns = original(batches, ids)
        return silent(columns) if len(calls) == 2 or (len(calls) == 1 and rank == 1) else columns

    with served(change):
        return train(values(folder, "silent"))


@scenario
def nan_on_one_rank(folder, rank):
    from mindspore import Tensor

    from ms_varlen.train.graphs import TrainingGraphs

    original, calls = TrainingGraphs.accumulate, []

    def faulty(graphs, columns):
        calls.append(columns)
        loss = original(graphs, columns)
        return Tensor(np.float32("nan")) if len(calls) == 2 and rank == 1 else loss

    with mock.patch.object(TrainingGraphs, "accumulate", faulty):
        return train(values(folder, "nan"))


@scenario
def drifted(folder, rank):
    """One moment of rank 1 changes a little after step 2, before any weight depends on it."""
    from mindspore import Tensor, ops

    from ms_varlen.train.graphs import TrainingGraphs

    original, calls = TrainingGraphs.apply, []

    def faulty(graphs, *scalars):
        calls.append(scalars)
        result = original(graphs, *scalars)
        if len(calls) == 2 and rank == 1:
            moment = graphs.apply_cell.adam_v[2]
            value = moment.asnumpy().copy()
            value.flat[0] += 1e-4
            ops.assign(moment, Tensor(value))
        return result

    with mock.patch.object(TrainingGraphs, "apply", faulty):
        return train(values(folder, "drift"))


@scenario
def nan_gradient_of_one_rank(folder, rank):
    """The second micro-batch of rank 1 always has an infinite gradient and a finite loss."""
    from mindspore import Tensor, ops

    from ms_varlen.train.graphs import TrainingGraphs

    original, seen = TrainingGraphs.accumulate, []

    def faulty(graphs, columns):
        if not any(columns is other for other in seen):
            seen.append(columns)
        loss = original(graphs, columns)
        if rank == 1 and any(columns is bad for bad in seen[1:2]):
            gradient = graphs.accumulate_cell.accumulated[0]
            ops.assign(gradient, Tensor(np.full(gradient.shape, np.inf, np.float32)))
        return loss

    with mock.patch.object(TrainingGraphs, "accumulate", faulty):
        return train(values(folder, "inf", batch={"token_budget": 64, "micro_batches": 2}, train__steps=2))


@scenario
def stopped_before_the_first_step(folder, rank):
    """Rank 1 gets a SIGTERM as soon as it has joined; then the run starts again."""
    from ms_varlen.ranks.stop import StopRequest

    original = StopRequest.listen

    def asked(stop, number):
        original(stop, number)
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(StopRequest, "listen", asked), contextlib.suppress(KeyboardInterrupt):
        return train(values(folder, "early"))
    return train(values(folder, "early", train__steps=1))["summary"]


@scenario
def token_mean(folder, rank):
    """Loss sums 4 over 1 token and 6 over 3 tokens: the mean is 2.5."""
    import mindspore as ms
    from mindspore import Parameter, ParameterTuple, Tensor

    from ms_varlen.ranks.collectives import SumOverRanks
    from ms_varlen.recipe.sections import TrainConfig
    from ms_varlen.train.step import ApplyGradients

    weight = Parameter(Tensor(np.zeros(1, np.float32)), name="w")
    summed = Parameter(Tensor(np.array([[4.0, 6.0][rank]], np.float32)), name="accumulated.w")
    config = TrainConfig(steps=1, learning_rate=1.0, clip_grad_norm=None)
    apply = ApplyGradients(ParameterTuple([weight]), ParameterTuple([summed]), config, SumOverRanks())
    norm, applied = apply(*(Tensor(v, ms.float32) for v in (1.0, 4.0, 10.0, 0.0)))
    return [float(norm.asnumpy()), bool(applied.asnumpy()), float(apply.adam_m[0].asnumpy()[0])]


@scenario
def ends_unevenly(folder, rank):
    recipe = values(
        folder, "uneven", corpus="uneven", batch={"token_budget": 32}, shapes={"kind": "static", "divisor": 16}
    )
    from ms_varlen.recipe.recipe import parse_recipe
    from ms_varlen.workload.workload import prepare

    recipe["data"]["eval_fraction"] = 0.0
    recipe["train"]["steps"] = prepare(parse_recipe(recipe), world_size=2).plans.epoch(0).num_steps
    return train(recipe)


@scenario
def nine_samples(folder, rank):
    recipe = values(folder, "nine", corpus="nine", train__steps=1)
    recipe["data"]["eval_fraction"] = 0.0
    return train(recipe)


def twelve(folder, steps):
    rows = {"mode": "padded", "batch": {"rows": 1}, "model__variable_seq_lengths": False}
    recipe = values(folder, "twelve", corpus="twelve", train__steps=steps, **rows)
    recipe["data"]["eval_fraction"] = 0.0
    return recipe


@scenario
def twelve_on_four(folder, rank):
    return train(twelve(folder, 1))


@scenario
def twelve_on_two(folder, rank):
    return train(twelve(folder, 5))


@scenario
def elastic(folder, rank):
    """Two ranks, then one process, then two ranks again, in one epoch."""
    from ms_varlen.ranks.collectives import gather_words
    from ms_varlen.ranks.exchange import connect
    from ms_varlen.ranks.join import Ranks

    found = [train(values(folder, "elastic", train__steps=2))]
    recipe = Path(folder) / "elastic.yaml"
    recipe.write_text(json.dumps(values(folder, "elastic", train__steps=4)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "RANK_"))}

    def alone():
        if rank == 0:
            command = [sys.executable, "-m", "ms_varlen.cli.app", "train", str(recipe), "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found.append({"log": done.stderr})

    connect(Ranks(rank, 2), gather_words, 300).together(alone)
    return [*found, train(values(folder, "elastic", train__steps=6))]


def main():
    folder, *names = sys.argv[1:]
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    import mindspore as ms

    from ms_varlen.errors import VarlenError
    from ms_varlen.ranks.join import join_ranks
    from ms_varlen.recipe.sections import DeviceConfig

    ms.set_device("CPU")
    ranks = join_ranks(DeviceConfig())
    outcomes = {}
    for name in names:
        begin = time.time()
        try:
            outcomes[name] = {"value": SCENARIOS[name](folder, ranks.rank)}
        except VarlenError as error:
            outcomes[name] = {"error": str(error), "kind": type(error).__name__}
        outcomes[name]["seconds"] = time.time() - begin
        (Path(folder) / f"outcomes_{ranks.rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
