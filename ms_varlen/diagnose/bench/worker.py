"""One of our own contenders in its process, and the machine's matrix-product rate in another; see `bench_process`."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from safetensors.numpy import save_file

from ms_varlen.batches.dataset import MicroBatches, MicroBatchLoader
from ms_varlen.batches.micro_batch import Columns, MicroBatch
from ms_varlen.diagnose.bench.contenders import (
    EQUAL,
    MAIN,
    RATE,
    bench_workload,
    contender_workload,
    middle_step,
    step_parts,
)
from ms_varlen.diagnose.bench.process import Answer, Reply, peak_rss_mb
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.lengths import SeqLens
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.dense_attention import dense_attention
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import AttentionPath, TrainingGraphs, compile_graphs

PRODUCT_SIZE = 2048
PIPELINE_SECONDS = 5.0
DENSE_PACKS = "dense packs"


def dense_packs() -> AttentionPath:
    """Dense attention over whole packs under a mask that keeps their samples apart, instead of lengths."""

    def declared(shapes: TokenShapes) -> dict[str, Tensor]:
        return {"attend_mask": Tensor(shape=[1, shapes.max, shapes.max], dtype=ms.bool_)}

    return AttentionPath(dense_attention, isolating_mask, declared, DENSE_PACKS)


def isolating_mask(lens: SeqLens) -> Columns:
    """attend_mask: [1, T, T] bool, True where a token may attend to one before it in its own segment."""
    ids = lens.segment_ids
    return {"attend_mask": np.tril(ids[:, None] == ids)[None]}


class OwnContender:
    """Builds, compiles and runs one of `OURS`, or `EQUAL`.

    Args:
        settings: `recipe` (resolved), `name`, and `steps` (of the plan, warm-up included); of several `ranks` also
            which `rank` this is.
    """

    def __init__(self, settings: Mapping[str, Any]):
        begin = time.perf_counter()
        recipe, name = parse_recipe(settings["recipe"]), settings["name"]
        workload = bench_workload(recipe, world_size=settings.get("ranks", 1))
        self.middle, parts = 0, step_parts(workload, settings["steps"], settings.get("rank", 0))
        if name in (MAIN, EQUAL):
            self.middle = middle_step(workload, parts)
        self.workload, self.parts = contender_workload(name, workload, parts)
        target = set_up_device(recipe.device, recipe.graph)
        attention = dense_packs() if name == "packed_dense" else None
        declare = name != "varlen_recompile"
        self.graphs = TrainingGraphs(self.workload, target, attention, declare)
        compiling = time.perf_counter()
        cache = compile_graphs(recipe.graph, self.graphs) if declare else None
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
        micro_batches = [self.batches.micro_batch(ids) for ids in self.parts[index]]
        supervised = sum(micro_batch.supervised for micro_batch in micro_batches)
        graphs_before = self.graphs.counts()["train"]
        begin = time.perf_counter()
        loss = self._train(micro_batches, rate)
        seconds = time.perf_counter() - begin
        tokens = int(sum(columns["input_ids"].size for columns in micro_batches))
        return {
            "seconds": seconds,
            "loss": loss,
            "tokens_computed": tokens,
            "tokens_with_logits": supervised if body_in_use() == "kernel" else tokens,
            "squared_tokens": sum(map(self._squared_tokens, micro_batches)),
            "compiled": self.graphs.counts()["train"] - graphs_before,
        }

    def _squared_tokens(self, columns: MicroBatch) -> int:
        """What attention's work grows with: squares of causal segments; a dense mask computes the other half too."""
        if self.graphs.attention.name == DENSE_PACKS:
            return 2 * columns["input_ids"].size ** 2
        return int((np.diff(columns["actual_seq_qlen"], prepend=0).astype(np.int64) ** 2).sum())

    def middle_step(self) -> Reply:
        """Train on the first micro-batch of `middle_step`, at a rate of 0: seconds, and T."""
        columns = self.batches.micro_batch(self.parts[self.middle][0])
        begin = time.perf_counter()
        self._train([columns], 0.0)
        return {"seconds": time.perf_counter() - begin, "tokens": columns["input_ids"].size}

    def _train(self, micro_batches: list[MicroBatch], rate: float) -> float:
        return self.graphs.step(micro_batches, rate).loss

    def stream(self, steps: int) -> Reply:
        """Train on steps one after another from the data set, as training does; the share of time that it waits."""
        loader = MicroBatchLoader(self.batches, lambda: (ids for step in self.parts[:steps] for ids in step))
        micro_batches = iter(loader)
        waits, begin = [], time.perf_counter()
        for step in self.parts[:steps]:
            waiting = time.perf_counter()
            columns = [next(micro_batches) for _ in step]
            waits.append(time.perf_counter() - waiting)
            self._train(columns, 0.0)
        # The first wait is that for the data set to start, once in a run.
        return {"data_wait_share": sum(waits[1:]) / (time.perf_counter() - begin - waits[0])}

    def pipeline(self) -> Reply:
        """Tokens per second of the data set alone, the store's pages dropped from the system's cache before."""
        size = drop_from_cache(self.workload.store.folder)
        tokens, begin = 0, time.perf_counter()
        plan = self.workload.plans.epoch(0)
        ids = (plan.micro_batch(s, m) for s in range(plan.num_steps) for m in range(plan.settings.micro_batches))
        for columns in MicroBatchLoader(self.batches, lambda: ids):
            tokens += int(columns["seq_lens"].sum(dtype=np.int64))
            if time.perf_counter() - begin > PIPELINE_SECONDS:
                break
        seconds = time.perf_counter() - begin
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


def drop_from_cache(folder: Path) -> int:
    """Have the system forget the pages of a store's files that no process holds; the files' bytes."""
    size = 0
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(file.fileno()).st_size
    return size


def start(settings: dict[str, Any]) -> dict[str, Answer]:
    """The commands of a contender of our own, or of the matrix product."""
    if settings["name"] == RATE:
        rate = MatrixProduct()
        return {"ready": lambda: {}, "step": rate.step, "finish": lambda: {}}
    own = OwnContender(settings)
    commands = (own.ready, own.step, own.middle_step, own.stream, own.pipeline, own.save_weights, own.finish)
    return {command.__name__: command for command in commands}
