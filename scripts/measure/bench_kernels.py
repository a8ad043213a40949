"""Single measurements: the attention kernel alone, and the data pipeline alone from a store that is not in memory.

Attention runs forward and backward in graph mode, in turns with matrix products, for the lengths of `CASES`. Its work
counts as 6 N D s^2 FLOPs a segment (7 with the scores that the backward pass computes again). The pipeline serves
micro-batches of recipes/bench_cpu.yaml in one process, the pages of its store dropped from the system's cache before.

    python scripts/measure/bench_kernels.py  # 2 minutes; builds a store of 2 GB the first time
    python scripts/measure/bench_kernels.py --repeats 3 --store-mb 50  # a try
    python scripts/measure/bench_kernels.py --json output/kernels.json
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before OpenMP is loaded

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from rich.console import Console
from rich.table import Table

from ms_varlen.batches.dataset import MicroBatches, MicroBatchLoader
from ms_varlen.diagnose.bench.bench import machine
from ms_varlen.diagnose.bench.contenders import bench_workload
from ms_varlen.diagnose.bench.results import spread
from ms_varlen.diagnose.bench.worker import MatrixProduct, drop_from_cache
from ms_varlen.lengths import SeqLens
from ms_varlen.ops.attention import attention_columns, attention_inputs, varlen_attention
from ms_varlen.ops.body import body_in_use
from ms_varlen.recipe.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "bench_cpu.yaml"
BYTES_PER_SAMPLE = 2 * 300 + 20
CASES = {
    "2048 100 150 180 90": [2048, 100, 150, 180, 90],
    "8 x 512": [512] * 8,
    "1 x 4096": [4096],
    "16 mixed": [69, 341, 55, 213, 104, 1321, 87, 480, 178, 132, 260, 33, 700, 190, 150, 90],
}


class Attend(nn.Cell):
    """`varlen_attention` as a cell."""

    def construct(self, q, k, v, *lengths):
        return varlen_attention(q, k, v, lengths)


class Attention:
    """Forward and backward of one case, ready to run.

    Args:
        lengths: tokens of each segment.
        heads, kv_heads, size: N, n and D.
    """

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, size: int):
        lens, random = SeqLens.packed(lengths, max(lengths)), np.random.default_rng(0)
        shapes = [(lens.tokens, count, size) for count in (heads, kv_heads, kv_heads, heads)]
        *self._qkv, self._dout = (Tensor(random.standard_normal(shape, np.float32)) for shape in shapes)
        self._lengths = attention_inputs(attention_columns(lens, body_in_use()), body_in_use())
        self._gradients = ops.GradOperation(get_all=True, sens_param=True)(Attend())
        self.flops = 6.0 * heads * size * sum(length**2 for length in lengths)

    def run(self) -> float:
        """Seconds of one forward and backward pass."""
        begin = time.perf_counter()
        for gradient in self._gradients(*self._qkv, *self._lengths, self._dout)[:3]:
            gradient.asnumpy()
        return time.perf_counter() - begin


def measure_attention(repeats: int, heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    """Seconds and share of the matrix products' rate of each case, in turns; the first turn is warm-up."""
    product = MatrixProduct()
    ms.set_context(mode=ms.GRAPH_MODE)
    cases = {name: Attention(lengths, heads, kv_heads, size) for name, lengths in CASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    rates = []
    for repeat in range(repeats + 1):
        turn = {name: case.run() for name, case in cases.items()}
        rate = max(product.step().values())
        if repeat:
            rates.append(rate)
            for name, taken in turn.items():
                seconds[name].append(taken)
    rate = float(np.median(rates))
    rows = {}
    for name, case in cases.items():
        median = float(np.median(seconds[name]))
        rows[name] = {
            "seconds": spread(seconds[name]),
            "flops": case.flops,
            "rate_share": case.flops / median / rate,
            "rate_share_with_scores_again": 7 / 6 * case.flops / median / rate,
        }
    ratio = np.divide(seconds["1 x 4096"], seconds["8 x 512"])
    return {
        "body": body_in_use(),
        "heads": [heads, kv_heads, size],
        "matrix_product_flops_per_second": rate,
        "cases": rows,
        # 8 where the cost is proportional to the sum of squares.
        "4096_over_8x512": {**spread(ratio), "by_squares": 8.0},
    }


def measure_pipeline(store_mb: int, folder: Path, most_seconds: float) -> dict[str, Any]:
    """Tokens per second of the data set alone, the store read from the disk."""
    samples = int(store_mb * 1e6 / BYTES_PER_SAMPLE)
    source = f"data.source=lognormal(median=180, p99=2048, samples={samples}, seed=0)"
    overrides = [source, f"data.store_dir={folder}", "data.overlong=truncate", f"checkpoint.output_dir={folder}"]
    workload = bench_workload(load_recipe(RECIPE, overrides))
    plan, store = workload.plans.epoch(0), workload.store
    batches = MicroBatches(store.train, workload.layout, store.pad_id, lambda lens: attention_columns(lens, "kernel"))
    size = drop_from_cache(store.folder)
    steps = range(plan.num_steps)
    tokens, begin = 0, time.perf_counter()
    for columns in MicroBatchLoader(batches, lambda: (plan.micro_batch(step, 0) for step in steps)):
        tokens += int(columns["seq_lens"].sum(dtype=np.int64))
        if time.perf_counter() - begin > most_seconds:
            break
    seconds = time.perf_counter() - begin
    return {"store_mb": size / 1e6, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def show(result: dict[str, Any]) -> None:
    """The tables."""
    console = Console()
    attention, pipeline = result["attention"], result["pipeline"]
    rate = attention["matrix_product_flops_per_second"]
    table = Table(title=f"Attention ({attention['body']}), forward and backward; products {rate / 1e9:.0f} GFLOP/s")
    for heading in ("lengths", "ms", "q1–q3", "GFLOP/s", "share of rate", "scores again"):
        table.add_column(heading, justify="left" if heading == "lengths" else "right")
    for name, row in attention["cases"].items():
        low, middle, high = (1e3 * row["seconds"][key] for key in ("q1", "median", "q3"))
        shares = [f"{row[key]:.0%}" for key in ("rate_share", "rate_share_with_scores_again")]
        table.add_row(name, f"{middle:.1f}", f"{low:.1f}–{high:.1f}", f"{row['flops'] / 1e6 / middle:.0f}", *shares)
    console.print(table)
    ratio = attention["4096_over_8x512"]
    console.print(
        f"1 x 4096 takes {ratio['median']:.1f} times as long as 8 x 512; the squares say {ratio['by_squares']}"
    )
    if pipeline:
        speed, size = pipeline["tokens_per_second"] / 1e6, pipeline["store_mb"]
        console.print(f"data alone: {speed:.1f} M tokens/s from a store of {size:.0f} MB, caches dropped")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="Example: python scripts/measure/bench_kernels.py --repeats 10"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed turns of each case of attention; default 20")
    parser.add_argument("--heads", type=int, default=4, help="query heads; default 4")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads; default 4")
    parser.add_argument("--head-dim", type=int, default=64, help="size of a head; default 64")
    parser.add_argument("--store-mb", type=int, default=2000, help="MB of the data store; 0 leaves the data out")
    parser.add_argument("--store-dir", type=Path, default=Path("output/bench_kernels"), help="where the store is kept")
    parser.add_argument("--seconds", type=float, default=30.0, help="most seconds of the data pipeline; default 30")
    parser.add_argument("--json", type=Path, help="file to write everything to")
    options = parser.parse_args()
    attention = measure_attention(options.repeats, options.heads, options.kv_heads, options.head_dim)
    pipeline = None
    if options.store_mb:
        pipeline = measure_pipeline(options.store_mb, options.store_dir, options.seconds)
    result = {"machine": machine(), "attention": attention, "pipeline": pipeline}
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
