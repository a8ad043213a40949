"""The doctor's probe: one micro-batch of the recipe's own data through forward, backward and the optimizer step.

It stops at the first stage that fails. Nothing is saved: weights, moments and graphs end with the process.
"""

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.micro_batch import MicroBatch
from ms_varlen.diagnose.doctor.findings import GREEN, RED, Check
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import Accumulated, TrainingGraphs, compile_graphs
from ms_varlen.workload.workload import Workload

AREA = "probe"


def probe_checks(workload: Workload) -> Iterator[Check]:
    """Compile, forward, backward, apply; a check for each stage that was reached."""
    recipe = workload.recipe
    try:
        graphs = TrainingGraphs(workload, set_up_device(recipe.device, recipe.graph))
        compile_graphs(recipe.graph, graphs)
    except (RuntimeError, ValueError) as error:
        yield Check(AREA, RED, f"compile: {_first_line(error)}", getattr(error, "code", None) or "SHAPE-RANGE")
        return
    yield Check(AREA, GREEN, f"compiled {sum(graphs.counts().values())} of {graphs.predicted} graphs predicted")
    micro_batch, real = _largest_micro_batch(workload, graphs)
    stages: dict[str, Callable[[TrainingGraphs, MicroBatch], Check]] = {
        "forward": _forward,
        "backward": _backward,
        "padding": functools.partial(_padding, real=real),
        "apply": _apply,
    }
    for name, stage in stages.items():
        try:
            check = stage(graphs, micro_batch)
        except (RuntimeError, ValueError) as error:
            check = Check(AREA, RED, f"{name}: {_first_line(error)}", getattr(error, "code", None) or "LOSS-NAN")
        yield check
        if check.level == RED:
            return
    yield _graph_count(graphs)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip(" -")), type(error).__name__)


def _largest_micro_batch(workload: Workload, graphs: TrainingGraphs) -> tuple[MicroBatch, np.ndarray]:
    """The micro-batch of the first step with the most padding, and which of its places are real: [T] bool."""
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns)
    lengths, plan = np.asarray(workload.store.train.lengths), workload.plans.epoch(0)
    parts = [plan.micro_batch(0, index) for index in range(workload.recipe.batch.micro_batches)]
    real = [workload.layout.place(lengths[ids]).real_mask for ids in parts]
    most = int(np.argmax([(~mask).sum() for mask in real]))
    return batches.micro_batch(parts[most]), real[most]


def _forward(graphs: TrainingGraphs, micro_batch: MicroBatch) -> Check:
    loss = graphs.accumulate_all([micro_batch]).loss
    if micro_batch.supervised == 0:
        return Check(AREA, RED, "forward: a micro-batch must have a supervised token, got none; see data", "LABEL-NONE")
    if not math.isfinite(loss):
        return Check(
            AREA, RED, f"forward: the loss must be finite, got {loss}; see the lengths and the weights", "LOSS-NAN"
        )
    return Check(AREA, GREEN, f"forward: loss {loss:.4f} per supervised token")


def _backward(graphs: TrainingGraphs, micro_batch: MicroBatch) -> Check:
    bad = [name for name, gradient in graphs.gradients().items() if not np.isfinite(gradient).all()]
    if bad:
        return Check(
            AREA,
            RED,
            f"backward: gradients must be finite, got NaN or infinity in {bad[0]} ({len(bad)} parameters)",
            "LOSS-NAN",
        )
    return Check(AREA, GREEN, "backward: all gradients are finite")


def _padding(graphs: TrainingGraphs, micro_batch: MicroBatch, real: np.ndarray) -> Check:
    """Other ids in the padding must change no bit of any gradient: padding is computed, and counts for nothing."""
    pads = int(real.size - real.sum())
    if pads == 0:
        return Check(AREA, GREEN, "padding: none in this micro-batch")
    before = graphs.gradients()
    graphs.clear_gradients()
    ids = micro_batch["input_ids"].copy()
    ids[~real] = np.where(ids[~real] == 1, 0, 1)
    graphs.accumulate(micro_batch | {"input_ids": ids})
    after = graphs.gradients()
    moved = [name for name in before if not np.array_equal(before[name], after[name])]
    if moved:
        return Check(
            AREA,
            RED,
            f"padding: the gradient of padding must be exactly 0, got a change in {moved[0]} ({len(moved)} parameters) "
            f"when {pads} padded ids changed; give tails segments of their own and the label {IGNORE_INDEX}",
            "PAD-GRADIENT",
        )
    return Check(AREA, GREEN, f"padding: {pads} padded places have no gradient, to the last bit")


def _apply(graphs: TrainingGraphs, micro_batch: MicroBatch) -> Check:
    before = graphs.model_weights()
    norm, applied = graphs.apply(1e-3, Accumulated(np.zeros(1), micro_batch.supervised))
    if not applied:
        return Check(
            AREA, RED, f"apply: the gradient's norm must be finite, got {norm}; lower the learning rate", "LOSS-NAN"
        )
    changed = sum(not np.array_equal(before[name], value) for name, value in graphs.model_weights().items())
    if changed == 0:
        return Check(
            AREA, RED, "apply: a step must change weights, got none changed; see supervised tokens", "LABEL-NONE"
        )
    return Check(AREA, GREEN, f"apply: gradient norm {norm:.4f}, {changed} of {len(before)} parameters changed")


def _graph_count(graphs: TrainingGraphs) -> Check:
    counts, predicted = graphs.counts(), graphs.predicted
    if sum(counts.values()) > predicted:
        return Check(
            AREA,
            RED,
            f"graphs compiled must be the {predicted} predicted, got {counts}; declare what varies",
            "SHAPE-RECOMPILE",
        )
    return Check(AREA, GREEN, f"graphs compiled: {counts}, as predicted")
