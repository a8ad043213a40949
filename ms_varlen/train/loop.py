"""The training loop: plan, accumulate, apply, evaluate, write down, save.

One line of `metrics.jsonl` per step. A kill at any moment followed by a start gives the lines (times apart) and weights
of an uninterrupted run: the plan is a look-up, and nothing else has a state besides weights, moments and counters.
"""

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from ms_varlen.checkpoint.run_dir import Run
from ms_varlen.checkpoint.store import Checkpoint, save_checkpoint
from ms_varlen.data.dataset import Columns, MicroBatches, MicroBatchLoader
from ms_varlen.data.layouts import IGNORE_INDEX
from ms_varlen.planning.epoch_plan import EpochPlan, PlanState
from ms_varlen.train.graphs import TrainingGraphs
from ms_varlen.train.schedule import learning_rate
from ms_varlen.train.workload import Workload

logger = logging.getLogger("ms_varlen")


@dataclasses.dataclass
class Skipped:
    """What steps with a NaN or an infinity took out of the current epoch, and how many there were in all."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0


class TrainingLoop:
    """Runs a workload's steps.

    Args:
        workload: what to train on.
        graphs: the compiled cells.
        run: the run folder, and the checkpoint to go on from.
        on_step: told each step's metrics, its line in metrics.jsonl.
    """

    def __init__(self, workload: Workload, graphs: TrainingGraphs, run: Run, on_step: Callable[[dict[str, Any]], None]):
        self._workload, self._graphs, self._run, self._on_step = workload, graphs, run, on_step
        self._recipe = workload.recipe
        store = workload.store
        self._train_batches = MicroBatches(store.train, workload.layout, store.pad_id, graphs.attention.columns)
        self._eval_batches = MicroBatches(store.eval, workload.eval_layout, store.pad_id, graphs.attention.columns)
        self._step, self._state, self._skipped = 0, workload.plans.start(), Skipped()
        if run.checkpoint is not None:
            self._load(run.checkpoint)
            run.checkpoint = None  # its arrays are in the graphs now

    def _load(self, checkpoint: Checkpoint) -> None:
        self._graphs.load(checkpoint.model, checkpoint.optimizer)
        saved = checkpoint.state
        self._step = checkpoint.step
        self._state = self._workload.plans.resume(saved["plan"])
        self._skipped = Skipped(**saved["skipped"])

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._step

    def run(self) -> dict[str, Any]:
        """Train to `train.steps`.

        Returns:
            the last step's metrics, the evaluation loss and the ledger of the epoch in progress.
        """
        start, remaining = self._state, self._recipe.train.steps - self._step
        micro_batches = iter(MicroBatchLoader(self._train_batches, lambda: self._workload.schedule(start, remaining)))
        metrics: dict[str, Any] = {}
        with self._run.metrics_path.open("a", encoding="utf-8") as lines:
            for state, plan in self._workload.plan_steps(start, remaining):
                if state.step == 0:
                    self._skipped = Skipped(steps=self._skipped.steps)
                metrics = self._one_step(state, plan, micro_batches)
                self._state = self._workload.plans.after(state)
                _write_line(lines, metrics)
                self._on_step(metrics)
                if self._due(self._recipe.checkpoint.every):
                    self._save()
        return {**metrics, "skipped_steps": self._skipped.steps, "ledger": self.ledger()}

    def _due(self, every: int | None) -> bool:
        return self._step == self._recipe.train.steps or (every is not None and self._step % every == 0)

    def _one_step(self, state: PlanState, plan: EpochPlan, micro_batches: Iterator[Columns]) -> dict[str, Any]:
        begin = time.perf_counter()
        sums = StepSums()
        loss_sums = []
        for _ in range(self._recipe.batch.micro_batches):
            waiting = time.perf_counter()
            columns = next(micro_batches)
            sums.data_seconds += time.perf_counter() - waiting
            loss_sums.append(self._graphs.accumulate(columns))
            sums.add(columns)
        loss_sum = math.fsum(float(value.asnumpy()) for value in loss_sums)
        rate = learning_rate(self._recipe.train, self._step + 1)
        norm, applied = self._apply(rate, sums.supervised, loss_sum)
        seconds = time.perf_counter() - begin
        self._step += 1
        ids = plan.step_ids(state.step)
        metrics = {
            "step": self._step,
            "epoch": state.epoch,
            "loss": loss_sum / max(sums.supervised, 1) if applied or not sums.supervised else None,
            "lr": rate,
            "grad_norm": norm if applied else None,
            **sums.metrics(),
            "step_ms": round(seconds * 1e3, 3),
            "data_ms": round(sums.data_seconds * 1e3, 3),
            "graphs_compiled": self._graphs.counts(),
            "sample_ids_sha256": ids_hash(ids),
        }
        if not applied and sums.supervised:
            metrics.update(self._skip(ids))
        if self._recipe.train.eval_every is not None and self._due(self._recipe.train.eval_every):
            metrics["eval_loss"] = self.evaluate()
            metrics["graphs_compiled"] = self._graphs.counts()
        return metrics

    def _apply(self, rate: float, supervised: int, loss_sum: float) -> tuple[float | None, bool]:
        """Apply the accumulated gradient; a step without supervised tokens has none and changes nothing."""
        if supervised == 0:
            logger.warning("step %d has no supervised token: its loss is 0 and no weight changes", self._step + 1)
            return 0.0, False
        norm, applied = self._graphs.apply(rate, supervised, loss_sum)
        return norm, applied

    def _skip(self, ids: np.ndarray) -> dict[str, Any]:
        """Book a step that held a NaN or an infinity; its sample ids go into its line."""
        self._skipped.steps += 1
        self._skipped.samples += int(ids.size)
        self._skipped.tokens += int(np.asarray(self._workload.store.train.lengths)[ids].sum(dtype=np.int64))
        logger.warning(
            "step %d is skipped: its loss or gradient is not finite (%d skipped so far); sample ids %s",
            self._step,
            self._skipped.steps,
            ids[:16].tolist(),
        )
        return {"skipped": True, "sample_ids": ids.tolist()}

    def evaluate(self) -> float | None:
        """Loss per supervised token over the held-out samples, in nats; None where it is not finite."""
        loss_sum, supervised = 0.0, 0
        for columns in MicroBatchLoader(self._eval_batches, self._workload.eval_schedule):
            loss_sum += float(self._graphs.evaluate(columns).asnumpy())
            supervised += int((columns["labels"] != IGNORE_INDEX).sum())
        return loss_sum / max(supervised, 1) if math.isfinite(loss_sum) else None

    def _save(self) -> None:
        recipe, workload = self._recipe, self._workload
        model, optimizer = self._graphs.weights()
        save_checkpoint(
            self._run.folder,
            self._step,
            model,
            optimizer,
            state={
                "plan": self._workload.plans.to_dict(self._state),
                "skipped": dataclasses.asdict(self._skipped),
                "seed": recipe.train.seed,
                "ledger": self.ledger(),
            },
            manifest={
                "mode": recipe.mode,
                "layout": workload.layout.mode,
                "shapes": dataclasses.asdict(workload.shapes),
                "model_config": workload.model_config.model_dump(mode="json"),
                "seq_length": recipe.model.seq_length,
                "data_fingerprint": workload.store.fingerprint,
                "versions": self._graphs.versions,
            },
            keep=recipe.checkpoint.keep,
        )

    def ledger(self) -> dict[str, dict[str, Any]]:
        """Where the tokens and the samples of the epoch in progress, or just finished, went, by unit."""
        epoch, steps = self._state.epoch, self._state.step
        if steps == 0 and epoch > 0:
            epoch -= 1
            steps = self._workload.plans.epoch(epoch).num_steps
        parts = self._workload.ledger(epoch, steps, self._skipped.tokens, self._skipped.samples)
        return {unit: ledger.to_dict() for unit, ledger in parts.items()}


@dataclasses.dataclass
class StepSums:
    """Counts over the micro-batches of a step."""

    real: int = 0
    computed: int = 0
    supervised: int = 0
    segments: int = 0
    data_seconds: float = 0.0

    def add(self, columns: Columns) -> None:
        """Count one micro-batch."""
        self.real += int(columns["seq_lens"].sum(dtype=np.int64))
        self.computed += int(columns["input_ids"].size)
        self.supervised += int((columns["labels"] != IGNORE_INDEX).sum())
        self.segments += int(columns["seq_lens"].size)

    def metrics(self) -> dict[str, Any]:
        """The counts under their names in metrics.jsonl."""
        return {
            "tokens_real": self.real,
            "tokens_computed": self.computed,
            "tokens_supervised": self.supervised,
            "segments": self.segments,
            "pad_ratio": 1 - self.real / self.computed,
        }


def ids_hash(ids: np.ndarray) -> str:
    """SHA-256 of sorted sample ids [n] as little-endian int64: the same in every layout of a plan."""
    return hashlib.sha256(np.sort(ids).astype("<i8").tobytes()).hexdigest()


def _write_line(lines: TextIO, metrics: dict[str, Any]) -> None:
    lines.write(json.dumps(metrics, allow_nan=False) + "\n")
    lines.flush()
