"""One of our own contenders in its process, and the machine's matrix-product rate in another; see `bench_process`."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from safetensors.numpy import save_file

from ms_varlen.data.dataset import Columns, MicroBatches, MicroBatchLoader
from ms_varlen.data.layouts import IGNORE_INDEX
from ms_varlen.diagnose.bench_contenders import RATE, bench_workload, contender_workload, step_parts
from ms_varlen.diagnose.bench_process import Answer, Reply, peak_rss_mb
from ms_varlen.graph.compile_watch import CompileWatch
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import TrainingGraphs, compile_graphs
from ms_varlen.train.recipe import parse_recipe
from ms_varlen.train.workload import Workload

PRODUCT_SIZE = 2048
PIPELINE_SECONDS = 5.0
RECOMPILE = "varlen_recompile"


class UndeclaredGraphs(TrainingGraphs):
    """The same cells without `set_inputs`: MindSpore compiles a graph for each new size.

    Args:
        sizes: how many sizes there will be.
    """

    def __init__(self, workload: Workload, target: str, sizes: int):
        self._sizes = sizes
        super().__init__(workload, target)

    def _declare(self) -> CompileWatch:
        self._roles = {"train": (self.accumulate_cell,), "apply": (self.apply_cell,)}
        return CompileWatch(self._roles, {"train": self._sizes, "apply": 1}, self._sizes + 1)


class OwnContender:
    """Builds, compiles and runs one of `OURS`.

    Args:
        settings: `recipe` (resolved), `name`, and `steps` (of the plan, warm-up included).
    """

    def __init__(self, settings: Mapping[str, Any]):
        begin = time.perf_counter()
        recipe = parse_recipe(settings["recipe"])
        workload = bench_workload(recipe)
        self.workload, self.parts = contender_workload(
            settings["name"], workload, step_parts(workload, settings["steps"])
        )
        target = set_up_device(recipe.device, recipe.graph)
        cache = None
        if settings["name"] == RECOMPILE:
            self.graphs: TrainingGraphs = UndeclaredGraphs(self.workload, target, sum(len(step) for step in self.parts))
            compiling = time.perf_counter()
        else:
            self.graphs = TrainingGraphs(self.workload, target)
            compiling = time.perf_counter()
            cache = compile_graphs(recipe.graph, self.graphs)
        store = workload.store
        self.batches = MicroBatches(store.train, self.workload.layout, store.pad_id, self.graphs.attention.columns)
        self._ready = {
            "compile_seconds": time.perf_counter() - compiling,
            "start_seconds": time.perf_counter() - begin,
            "compile_cache": cache.state if cache else "off",
            "versions": self.graphs.versions,
        }

    def ready(self) -> Reply:
        """Seconds since the imports, and of them those of compiling; what the compile cache did; versions."""
        return self._ready

    def step(self, index: int, rate: float) -> Reply:
        """Train on a step, its micro-batches at hand: seconds, loss per token, and what was computed."""
        micro_batches = [self.batches.columns(ids) for ids in self.parts[index]]
        supervised = sum(_supervised(columns) for columns in micro_batches)
        graphs_before = self.graphs.counts()["train"]
        begin = time.perf_counter()
        loss = self._train(micro_batches, supervised, rate)
        seconds = time.perf_counter() - begin
        segments = [np.diff(columns["actual_seq_qlen"], prepend=0).astype(np.int64) for columns in micro_batches]
        return {
            "seconds": seconds,
            "loss": loss,
            "tokens_computed": int(sum(columns["input_ids"].size for columns in micro_batches)),
            "tokens_supervised": supervised,
            "squared_tokens": int(sum((lengths**2).sum() for lengths in segments)),
            "compiled": self.graphs.counts()["train"] - graphs_before,
        }

    def _train(self, micro_batches: list[Columns], supervised: int, rate: float) -> float:
        loss_sums = [self.graphs.accumulate(columns) for columns in micro_batches]
        loss_sum = math.fsum(float(value.asnumpy()) for value in loss_sums)
        self.graphs.apply(rate, supervised, loss_sum)
        return loss_sum / supervised

    def stream(self, steps: int) -> Reply:
        """Train on steps one after another from the data set, as training does; the share of time that it waits."""
        loader = MicroBatchLoader(self.batches, lambda: (ids for step in self.parts[:steps] for ids in step))
        micro_batches = iter(loader)
        waits, begin = [], time.perf_counter()
        for step in self.parts[:steps]:
            waiting = time.perf_counter()
            columns = [next(micro_batches) for _ in step]
            waits.append(time.perf_counter() - waiting)
            self._train(columns, sum(map(_supervised, columns)), 0.0)
        # The first wait is that for the data set to start, once in a run.
        return {"data_wait_share": sum(waits[1:]) / (time.perf_counter() - begin - waits[0])}

    def pipeline(self) -> Reply:
        """Tokens per second of the data set alone, the store's pages dropped from the system's cache before."""
        folder = self.workload.store.folder
        for path in folder.rglob("*.bin"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        tokens, begin = 0, time.perf_counter()
        plan = self.workload.plans.epoch(0)
        ids = (plan.micro_batch(s, m) for s in range(plan.num_steps) for m in range(plan.settings.micro_batches))
        for columns in MicroBatchLoader(self.batches, lambda: ids):
            tokens += int(columns["seq_lens"].sum(dtype=np.int64))
            if time.perf_counter() - begin > PIPELINE_SECONDS:
                break
        seconds = time.perf_counter() - begin
        size = sum(path.stat().st_size for path in folder.rglob("*.bin"))
        return {"tokens": tokens, "tokens_per_second": tokens / seconds, "store_mb": size / 1e6}

    def save_weights(self, path: str) -> Reply:
        """Write the weights under their Hugging Face names, for peers to start from."""
        save_file(self.graphs.weights()[0], Path(path))
        return {}

    def finish(self) -> Reply:
        """Graphs compiled, by role, and the most memory held."""
        return {"graphs": self.graphs.counts(), "peak_rss_mb": peak_rss_mb()}


class MatrixProduct:
    """The machine's fp32 rate: products of two square matrices by NumPy and by MindSpore."""

    def __init__(self):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        random = np.random.default_rng(0)
        self.matrices = [random.standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), np.float32) for _ in range(2)]
        self.tensors = [Tensor(matrix) for matrix in self.matrices]
        self.step()

    def step(self, **_: Any) -> Reply:
        """FLOP/s of one product by each."""
        begin = time.perf_counter()
        self.matrices[0] @ self.matrices[1]
        between = time.perf_counter()
        ops.matmul(*self.tensors).asnumpy()
        end = time.perf_counter()
        flops = 2 * PRODUCT_SIZE**3
        return {"numpy": flops / (between - begin), "mindspore": flops / (end - between)}


def _supervised(columns: Columns) -> int:
    return int((columns["labels"] != IGNORE_INDEX).sum())


def start(settings: dict[str, Any]) -> dict[str, Answer]:
    """The commands of a contender of our own, or of the matrix product."""
    if settings["name"] == RATE:
        rate = MatrixProduct()
        return {"ready": lambda: {}, "step": rate.step, "finish": lambda: {}}
    own = OwnContender(settings)
    commands = (own.ready, own.step, own.stream, own.pipeline, own.save_weights, own.finish)
    return {command.__name__: command for command in commands}
