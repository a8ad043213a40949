"""The training loop: plan, accumulate, apply, evaluate, log, save.

One line of `metrics.jsonl` per step. A kill at any moment followed by a start gives the lines (times apart) and weights
of an uninterrupted run: the plan is a look-up, and only weights, moments and counters have a state.

Every rank runs this loop. Before a step ranks compare their lengths with the plan, after it they add up their losses;
rank 0 logs and saves.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from ms_varlen.batches.dataset import MicroBatches, MicroBatchLoader
from ms_varlen.batches.micro_batch import MicroBatch
from ms_varlen.checkpoint.run_folder import Run
from ms_varlen.checkpoint.store import Checkpoint, save_checkpoint
from ms_varlen.errors import CheckpointError, VarlenError
from ms_varlen.planning.plan import EpochPlan, EpochPlans, PlanState
from ms_varlen.ranks.agreement import StepCounts, StepLengths, StepPlace, StepReports
from ms_varlen.ranks.drift import check_replicas
from ms_varlen.ranks.exchange import Exchange
from ms_varlen.ranks.join import Ranks
from ms_varlen.ranks.stop import StopRequest
from ms_varlen.train.bad_steps import Skipped, check_bad_steps, culprits, dump_bad_step
from ms_varlen.train.graphs import Accumulated, TrainingGraphs
from ms_varlen.train.profiling import StepProfiler
from ms_varlen.train.schedule import learning_rate
from ms_varlen.workload.workload import Workload

logger = logging.getLogger("ms_varlen")


class TrainingLoop:
    """Runs a workload's steps.

    Args:
        workload: what to train on.
        graphs: the compiled cells.
        run: the run folder, and the checkpoint to resume from.
        on_step: called with each step's metrics, its line in metrics.jsonl.
        exchange: between the ranks; by default of a single rank.
        stop: requests to stop, read before each step.
    """

    def __init__(
        self,
        workload: Workload,
        graphs: TrainingGraphs,
        run: Run,
        on_step: Callable[[dict[str, Any]], None],
        exchange: Exchange | None = None,
        stop: StopRequest | None = None,
    ):
        self._workload, self._graphs, self._run, self._on_step = workload, graphs, run, on_step
        self._recipe = workload.recipe
        self._exchange = exchange or Exchange(Ranks())
        self._stop = stop or StopRequest()
        self._reports = StepReports(
            self._exchange, self._recipe.batch.micro_batches, max(1, self._recipe.batch.max_segments)
        )
        store = workload.store
        self._train_batches = MicroBatches(store.train, workload.layout, store.pad_id, graphs.attention.columns)
        self._eval_batches = MicroBatches(store.eval, workload.eval_layout, store.pad_id, graphs.attention.columns)
        self._step, self._state, self._skipped = 0, workload.plans.start(), Skipped()
        self._saved_step = self._skipped_before = 0
        folder = run.folder / "profile" / f"rank_{self._exchange.ranks.rank}"
        self._profiler = StepProfiler(self._recipe.device.profile_steps, folder)
        if run.checkpoint is not None:
            self._load(run.checkpoint, run.replanned)
            run.checkpoint = None  # its arrays are in the graphs now

    def _load(self, checkpoint: Checkpoint, replanned: list[str]) -> None:
        self._graphs.load(checkpoint.model, checkpoint.optimizer)
        saved = checkpoint.state
        self._step = self._saved_step = checkpoint.step
        self._state = resumed_state(self._workload.plans, saved["plan"], replanned)
        self._skipped = Skipped(**saved["skipped"])
        self._skipped_before = self._skipped.steps

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._step

    def run(self) -> dict[str, Any]:
        """Train to `train.steps`, or until a request to stop.

        Returns:
            the last step's metrics, the evaluation loss, the ledger of the epoch in progress, and `stopped`: a request
            stopped the run, after a save.
        Raises:
            VarlenError: too many steps were skipped, ranks do not agree, or the last save failed.
            KeyboardInterrupt: a request to stop came before the run's first step; there is nothing to save.
        """
        start, remaining = self._state, self._recipe.train.steps - self._step
        rank = self._exchange.ranks.rank
        loader = MicroBatchLoader(self._train_batches, lambda: self._workload.schedule(start, remaining, rank))
        micro_batches = iter(loader)
        metrics: dict[str, Any] = {"step": self._step, "loss": None, "graphs_compiled": self._graphs.counts()}
        with self._metrics_file() as lines:
            for state, plan in self._workload.plan_steps(start, remaining):
                if self._workload.plans.is_new(state):
                    self._skipped = Skipped(steps=self._skipped.steps)
                self._profiler.before(self._step + 1)
                done = self._one_step(state, plan, micro_batches)
                self._profiler.after(self._step, last=done is None or self._step == self._recipe.train.steps)
                if done is None:
                    break
                metrics = done
                self._state = self._workload.plans.after(state)
                self._report(lines, metrics)
                # Only those of this start count, so that a run stopped by bad steps can be started again.
                bad_steps = self._skipped.steps - self._skipped_before
                too_bad = bad_steps > self._recipe.train.max_bad_steps
                if too_bad or self._due(self._recipe.checkpoint.every):
                    self._save(last=too_bad or self._step == self._recipe.train.steps)
                check_bad_steps(bad_steps, self._recipe.train.max_bad_steps)
        if self._step == 0:
            raise KeyboardInterrupt
        stopped = self._step < self._recipe.train.steps
        if stopped and self._saved_step < self._step:
            self._save(last=True)
        return {**metrics, "skipped_steps": self._skipped.steps, "ledger": self.ledger(), "stopped": stopped}

    def _metrics_file(self) -> contextlib.AbstractContextManager[TextIO | None]:
        if not self._exchange.ranks.writes:
            return contextlib.nullcontext()
        return self._run.metrics_path.open("a", encoding="utf-8")

    def _report(self, lines: TextIO | None, metrics: dict[str, Any]) -> None:
        if lines is not None:
            try:
                lines.write(json.dumps(metrics, allow_nan=False) + "\n")
                lines.flush()
            except OSError as error:
                if self._recipe.checkpoint.on_save_error == "stop":
                    raise
                # The unwritten rest stays in the buffer; the next line writes it too.
                logger.error("%s cannot be written (%s); training goes on", self._run.metrics_path, error)
        self._on_step(metrics)

    def _due(self, every: int | None) -> bool:
        return self._step == self._recipe.train.steps or (every is not None and self._step % every == 0)

    def _one_step(self, state: PlanState, plan: EpochPlan, loader: Iterator[MicroBatch]) -> dict[str, Any] | None:
        """Train one step. Return its metrics, or None if a rank was asked to stop before it."""
        begin = time.perf_counter()
        batches = self._next_batches(loader)
        waited = time.perf_counter()
        counts = self._compare(state, plan, batches)
        compared = time.perf_counter()
        if counts.stop or isinstance(batches, VarlenError):
            return None
        own = self._graphs.accumulate_all(batches)
        # [R, M + 1]: what every rank's micro-batches lost, and the time it took.
        gathered = self._exchange.gather_floats([*own.losses, time.perf_counter() - compared])
        accumulated = Accumulated(gathered[:, :-1], counts.supervised)
        rate = learning_rate(self._recipe.train, self._step + 1)
        norm, applied = self._graphs.apply(rate, accumulated)
        if counts.supervised == 0:
            logger.warning("step %d has no supervised token: its loss is 0 and no weight changes", self._step + 1)
        seconds = time.perf_counter() - begin
        self._step += 1
        ids = plan.step_ids(state.step)
        metrics = {
            "step": self._step,
            "epoch": state.epoch,
            "loss": accumulated.loss if applied or not counts.supervised else None,
            "lr": rate,
            "grad_norm": norm if applied else None,
            **counts.metrics(),
            "step_ms": round(seconds * 1e3, 3),
            "data_ms": round((waited - begin) * 1e3, 3),
            **self._rank_metrics(compared - waited, gathered[:, -1]),
            "graphs_compiled": self._graphs.counts(),
            "sample_ids_sha256": ids_hash(ids),
        }
        if not applied and counts.supervised:
            metrics.update(self._skip(state, plan, batches, accumulated.losses, norm))
        if self._recipe.train.eval_every is not None and self._due(self._recipe.train.eval_every):
            metrics["eval_loss"] = self.evaluate()
            metrics["eval_perplexity"] = perplexity(metrics["eval_loss"])
            metrics["graphs_compiled"] = self._graphs.counts()
        return metrics

    def _next_batches(self, micro_batches: Iterator[MicroBatch]) -> list[MicroBatch] | VarlenError:
        """Return this rank's micro-batches of a step, or the error that prevented them, to share with all ranks."""
        try:
            return [next(micro_batches) for _ in range(self._recipe.batch.micro_batches)]
        except VarlenError as error:
            return error

    def _compare(self, state: PlanState, plan: EpochPlan, batches: list[MicroBatch] | VarlenError) -> StepCounts:
        """Compare the micro-batches of all ranks with the plan, and count them."""
        workload = self._workload
        place = StepPlace(self._step, state, self._recipe.mode, workload.plans.fingerprint)
        planned = StepLengths.of_plan(workload.plans.lengths, plan, state.step, workload.layout)
        found = batches if isinstance(batches, VarlenError) else StepLengths.of_micro_batches(batches)
        return self._reports.check(place, found, planned, self._stop.asked)

    def _rank_metrics(self, exchange_seconds: float, seconds: np.ndarray) -> dict[str, Any]:
        """Return metrics of several ranks: time to compare lengths, and the slowest rank's excess over the mean."""
        if seconds.size == 1:
            return {}
        return {
            "ranks": seconds.size,
            "exchange_ms": round(exchange_seconds * 1e3, 3),
            "imbalance": round(float(seconds.max() / seconds.mean() - 1), 6),
        }

    def _skip(
        self, state: PlanState, plan: EpochPlan, batches: list[MicroBatch], losses: np.ndarray, norm: float | None
    ) -> dict[str, Any]:
        """Count a step that held a NaN or an infinity, and dump it to a file. Return its sample ids for its metrics.

        The gradients of each micro-batch are computed again to find the faulty one, since ranks have added them up.
        """
        gradients = self._exchange.gather_floats([self._graphs.has_finite_gradient(columns) for columns in batches]) > 0
        ids = plan.step_ids(state.step)
        lengths = self._workload.plans.lengths
        self._skipped.steps += 1
        self._skipped.samples += int(ids.size)
        self._skipped.tokens += int(np.asarray(lengths[ids]).sum(dtype=np.int64))
        logger.warning(
            "step %d is skipped: its loss or gradient is not finite: %s (%d skipped so far); sample ids %s",
            self._step,
            culprits(losses, gradients),
            self._skipped.steps,
            ids[:16].tolist(),
        )
        if self._exchange.ranks.writes:
            place = StepPlace(self._step, state, self._recipe.mode, self._workload.plans.fingerprint)
            dump_bad_step(self._run.folder, place, plan, self._workload, losses, gradients, norm)
        return {"skipped": True, "sample_ids": ids.tolist()}

    def evaluate(self) -> float | None:
        """Loss per supervised token over the held-out samples, in nats; None if it is not finite.

        Each rank takes a slice of the micro-batches.
        """
        loss_sum, supervised = 0.0, 0
        ranks = self._exchange.ranks
        for micro_batch in MicroBatchLoader(
            self._eval_batches, lambda: self._workload.eval_schedule(ranks.rank, ranks.size)
        ):
            loss_sum += float(self._graphs.evaluate(micro_batch).asnumpy())
            supervised += micro_batch.supervised
        loss_sum, total = self._exchange.gather_floats([loss_sum, supervised]).sum(axis=0).tolist()
        return loss_sum / max(total, 1) if math.isfinite(loss_sum) else None

    def _save(self, last: bool) -> None:
        """Save on rank 0 while the others wait, so that none exits before the save is complete.

        Raises:
            VarlenError: the save failed, and the recipe says to stop or it is the last one.
            RanksError: ranks hold different weights; none of them is saved.
        """
        check_replicas(self._exchange, self._graphs.each_state(), self._step)
        self._exchange.together(lambda: self._written(last) if self._exchange.ranks.writes else None)
        # All ranks must decide alike whether something is left to save.
        self._saved_step = self._exchange.messages({"saved_step": self._saved_step})[0]["saved_step"]

    def _written(self, last: bool) -> None:
        try:
            self._write_checkpoint()
            self._saved_step = self._step
        except CheckpointError as error:
            if last or self._recipe.checkpoint.on_save_error == "stop":
                raise
            logger.error("%s (checkpoint.on_save_error is continue: training goes on)", error)

    def _write_checkpoint(self) -> None:
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
                "initial_weights": self._graphs.initial_weights,
                "seq_length": recipe.model.seq_length,
                "data_fingerprint": workload.store.fingerprint,
                "versions": self._graphs.versions,
            },
            keep=recipe.checkpoint.keep,
        )

    def ledger(self) -> dict[str, dict[str, Any]]:
        """Return the ledgers of tokens and samples, by unit, for the epoch in progress or just finished."""
        epoch, steps = self._state.epoch, self._state.step
        if epoch > 0 and self._workload.plans.is_new(self._state):
            epoch -= 1
            steps = self._workload.plans.epoch(epoch).num_steps
        parts = self._workload.ledger(epoch, steps, self._skipped.tokens, self._skipped.samples)
        return {unit: ledger.to_dict() for unit, ledger in parts.items()}


def resumed_state(plans: EpochPlans, saved: dict[str, Any], replanned: list[str]) -> PlanState:
    """Return the place in the plan that a checkpoint saved, or the start of a new plan for the rest of its epoch.

    Args:
        plans: of the current recipe.
        saved: the place as `EpochPlans.to_dict` gave it.
        replanned: recipe keys that changed, for the log.
    Raises:
        CheckpointError: the place belongs to another corpus.
    """
    if saved["fingerprint"] == plans.fingerprint:
        return plans.resume(saved)
    state = plans.resume_changed(saved)
    before, now = saved["settings"]["world_size"], plans.settings.world_size
    reasons = [*replanned, *([f"ranks: were {before}, are {now}"] if before != now else [])]
    epoch = saved["epoch"]
    rest = plans.lengths.size - plans.trained_before(epoch).count
    logger.info(
        "the rest of epoch %d (%d samples) is planned again: %s%s",
        epoch,
        rest,
        "; ".join(reasons) or "the plan's settings changed",
        "; it fills no step and is left over" if state.epoch > epoch else "",
    )
    return state


def perplexity(loss: float | None) -> float | None:
    """Return e to the loss per token in nats; None if there is no loss or the result is not finite."""
    return math.exp(loss) if loss is not None and loss < math.log(sys.float_info.max) else None


def ids_hash(ids: np.ndarray) -> str:
    """SHA-256 of sorted sample ids [n] as little-endian int64: the same in every layout of a plan."""
    return hashlib.sha256(np.sort(ids).astype("<i8").tobytes()).hexdigest()
