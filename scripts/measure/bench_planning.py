"""Measure packing, bucketing and whole plans next to the alternatives, in one run on one machine.

Each contender gets a process of its own, for its peak memory, and the same lengths: lognormal, median 180, sigma 1.0453
(P99 2048), clipped to 1..4096, seed 0. TRL is optional: without it (`pip install trl`) its rows say so.

    python scripts/measure/bench_planning.py --samples 100000  # a minute at most
    python scripts/measure/bench_planning.py  # 1 and 10 million; the two Python loops up to 1 million
    python scripts/measure/bench_planning.py --huge  # 100 million as well, below 8 GB
    python scripts/measure/bench_planning.py --ranks 8 64 1024  # plans of 100 million, as `ms-varlen plan` makes
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ms_varlen.planning.balance import micro_batch_costs
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.buckets import BLOCK
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.packing import pack_best_fit, pack_shuffled
from ms_varlen.planning.statistics import length_histogram, length_statistics
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.workload.sizes import SampleLengths, plan_lengths
from ms_varlen.workload.summary import epoch_numbers
from ms_varlen.workload.translation import compare_variants, sampled

CAPACITY = 4096
MAX_SEGMENTS = 32
LOOP_LIMIT = 1_000_000
HUGE = 100_000_000
TOKEN_BUDGET = 16384
MODEL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
Packs = tuple[np.ndarray, np.ndarray]
"""Tokens and samples of each pack."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A packer: `pack(prepare(lengths))` is timed for `pack`, and `read(lengths, its result)` tells what it made."""

    pack: Callable[[Any], Any]
    read: Callable[[np.ndarray, Any], Packs]
    prepare: Callable[[np.ndarray], Any] = lambda lengths: lengths
    is_loop: bool = False
    needs: str | None = None


def lognormal(samples: int) -> np.ndarray:
    """[samples] int32 lengths, made in blocks."""
    rng = np.random.default_rng(0)
    lengths = np.empty(samples, np.int32)
    for first in range(0, samples, BLOCK):
        block = lengths[first : first + BLOCK]
        block[:] = np.clip(np.round(rng.lognormal(np.log(180), 1.0453, block.size)), 1, CAPACITY)
    return lengths


def read_order(lengths: np.ndarray, packed: Batches) -> Packs:
    """Tokens and samples of our packs."""
    return micro_batch_costs(lengths.take, packed).astype(np.int64), packed.sizes


def first_fit_decreasing(lengths: np.ndarray) -> list[list[int]]:
    """Samples of each pack; a tree of maxima finds the first pack that fits."""
    # Any two packs hold more than one capacity together, which bounds their number.
    leaves = 1 << (2 * int(lengths.sum(dtype=np.int64)) // CAPACITY + 1).bit_length()
    tree = [CAPACITY] * (2 * leaves)
    packs: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            node += tree[node] < length
        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(sample)
        tree[node] -= length
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right
    return packs


def read_lists(lengths: np.ndarray, packs: list[list[int]]) -> Packs:
    """Packs given as lists of samples."""
    return np.array([lengths[pack].sum() for pack in packs]), np.array([len(pack) for pack in packs])


def arrow_table(lengths: np.ndarray) -> Any:
    """The lengths as a table of sequences, tokens of one byte."""
    import pyarrow as pa
    import trl.data_utils  # noqa: F401 - seconds, which are not to be timed

    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), np.zeros(offsets[-1], np.int8))})


def trl_bfd(table: Any) -> Any:
    """TRL's packing of one whole table; by default it packs 1000 rows at a time, which fills less.

    It moves the tokens as well, which is four tenths of its time.
    """
    from trl.data_utils import _pack_bfd

    return _pack_bfd(table, CAPACITY)


def read_table(lengths: np.ndarray, packed: Any) -> Packs:
    """Packs given as a table of sequences."""
    tokens, samples = (np.diff(packed[name].combine_chunks().offsets) for name in ("input_ids", "seq_lengths"))
    return tokens, samples


CONTENDERS = {
    "pack_shuffled": Contender(
        lambda lengths: pack_shuffled(lengths, CAPACITY, MAX_SEGMENTS, np.random.default_rng(0)), read_order
    ),
    "pack_best_fit": Contender(lambda lengths: pack_best_fit(lengths, CAPACITY, lengths.size), read_order),
    "first_fit_decreasing": Contender(first_fit_decreasing, read_lists, is_loop=True),
    "trl_bfd": Contender(trl_bfd, read_table, arrow_table, is_loop=True, needs="trl"),
}


def measure(name: str, samples: int) -> dict:
    """One contender, in this process."""
    contender = CONTENDERS[name]
    lengths = lognormal(samples)
    prepared = contender.prepare(lengths)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    packed = contender.pack(prepared)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens, segments = contender.read(lengths, packed)
    assert tokens.sum() == lengths.sum(dtype=np.int64)
    assert tokens.max() <= CAPACITY
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "packs": tokens.size,
        "fill": float(tokens.mean() / CAPACITY),
        "most_segments": int(segments.max()),
        "peak_gb": peak / 1e9,
    }


def bench_packing(samples: int) -> None:
    """Print a row per contender; `ratio` is its processor time to that of `pack_shuffled`."""
    print(f"\npacking {samples:,} samples at capacity {CAPACITY}; pack_shuffled takes at most {MAX_SEGMENTS} to a pack")
    print(f"{'':22}{'seconds':>9}{'cpu s':>9}{'ratio':>8}{'packs':>11}{'full':>10}{'segments':>10}{'peak GB':>9}")
    ours = None
    for name, contender in CONTENDERS.items():
        if contender.needs and importlib.util.find_spec(contender.needs) is None:
            print(f"{name:22}not installed: pip install {contender.needs}")
            continue
        if contender.is_loop and samples > LOOP_LIMIT:
            print(f"{name:22}not run above {LOOP_LIMIT:,} samples: a Python loop over samples")
            continue
        row = run_child(name, "--samples", str(samples))
        ours = ours or row["cpu_seconds"]
        print(
            f"{name:22}{row['seconds']:9.2f}{row['cpu_seconds']:9.2f}{row['cpu_seconds'] / ours:8.1f}{row['packs']:11,}"
            f"{row['fill']:10.3%}{row['most_segments']:10}{row['peak_gb']:9.2f}",
            flush=True,
        )


def measure_plan(mode: str, world_size: int, samples: int) -> dict:
    """All that `ms-varlen plan` computes of a corpus of these lengths, in this process."""
    recipe = parse_recipe(
        {
            "mode": mode,
            "data": {"source": "pydoc", "tokenizer": "bytes"},
            "batch": {"token_budget": TOKEN_BUDGET},
            "model": {
                "config": {"architecture": "llama", **MODEL},
                "variable_seq_lengths": True,
                "seq_length": CAPACITY,
                "max_position_embeddings": CAPACITY,
            },
            "train": {"steps": 1000, "learning_rate": 1e-4},
            "checkpoint": {"output_dir": "output/bench_planning"},
        }
    )
    lengths = SampleLengths(lognormal(samples), "lognormal", CAPACITY)
    cost = CostModel.of_decoder(recipe.model.config.with_vocab_size(32000))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plans, _, layout = plan_lengths(recipe, lengths, cost, world_size)
    numbers = epoch_numbers(plans, layout, cost)
    planned = time.perf_counter() - begin
    length_statistics(lengths.train), length_histogram(lengths.train)
    compare_variants(recipe, sampled(lengths), cost, world_size)
    return {
        **dataclasses.asdict(numbers),
        "plan_seconds": planned,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def bench_plans(modes: list[str], ranks: list[int], samples: int) -> None:
    """Print a row per mode and number of ranks; imbalance is the slowest rank's work over the mean, by FLOPs."""
    print(f"\nplans of {samples:,} samples, at most {CAPACITY} tokens each, token budget {TOKEN_BUDGET}, Llama of 7 B")
    print(
        f"{'':8}{'ranks':>6}{'seconds':>9}{'cpu s':>8}{'peak GB':>9}{'steps':>12}{'pad ratio':>11}"
        f"{'imbalance':>11}{'at least':>10}{'before':>9}"
    )
    for mode, world_size in itertools.product(modes, ranks):
        row = run_child("plan", "--modes", mode, "--ranks", str(world_size), "--samples", str(samples))
        print(
            f"{mode:8}{world_size:6}{row['seconds']:9.1f}{row['cpu_seconds']:8.1f}{row['peak_gb']:9.2f}"
            f"{row['steps_per_epoch']:12,}{row['pad_ratio']:11.2%}{row['imbalance_mean']:11.2%}"
            f"{row['imbalance_mean_floor']:10.2%}{row['imbalance_mean_unbalanced']:9.2%}",
            flush=True,
        )


def run_child(name: str, *arguments: str) -> dict:
    """What this script measures in a process of its own."""
    command = [sys.executable, __file__, "--child", name, *arguments]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", help="1 and 10 million; 100 million with --ranks")
    parser.add_argument("--huge", action="store_true", help=f"pack {HUGE:,} samples as well, for peak memory")
    parser.add_argument("--ranks", type=int, nargs="+", help="make whole plans for these numbers of ranks instead")
    parser.add_argument("--modes", nargs="+", default=["varlen", "packed"], choices=["varlen", "packed"])
    parser.add_argument("--child", choices=[*CONTENDERS, "plan"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "plan":
        print(json.dumps(measure_plan(options.modes[0], options.ranks[0], options.samples[0])))
        return
    if options.child:
        print(json.dumps(measure(options.child, options.samples[0])))
        return
    print(f"numpy {np.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    if options.ranks:
        for samples in options.samples or [HUGE]:
            bench_plans(options.modes, options.ranks, samples)
        return
    sizes = options.samples or [1_000_000, 10_000_000]
    for samples in [*sizes, *([HUGE] if options.huge else [])]:
        bench_packing(samples)


if __name__ == "__main__":
    main()
