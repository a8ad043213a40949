"""Skipped steps (NaN or infinity): count them, dump their inputs, stop the run after `train.max_bad_steps`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.errors import VarlenError
from ms_varlen.files import write_atomically
from ms_varlen.planning.plan import EpochPlan
from ms_varlen.ranks.agreement import StepLengths, StepPlace
from ms_varlen.workload.workload import Workload


@dataclasses.dataclass
class Skipped:
    """Samples and tokens that skipped steps took out of the current epoch, and the steps skipped in all."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0


def check_bad_steps(steps: int, most: int) -> None:
    """Stop a run that skips too often.

    Args:
        steps: skipped since the run was started, for the first time or again.
        most: `train.max_bad_steps`.
    Raises:
        VarlenError: more than `most` steps were skipped.
    """
    if steps > most:
        raise VarlenError(
            f"skipped steps must be at most {most} (train.max_bad_steps), got {steps} since this start: their loss or "
            "gradient was not finite; look at the bad_step_*.json files in the run folder, lower train.learning_rate, "
            "or raise train.max_bad_steps"
        )


MOST_NAMED = 8
"""Micro-batches that a message names."""


def culprits(losses: np.ndarray, gradients: np.ndarray) -> str:
    """Name the micro-batches that hold a NaN or an infinity, in words.

    Args:
        losses: [R, M], the summed loss of each rank's micro-batches.
        gradients: [R, M] bool, whether the gradient of each alone is finite.
    """
    found = np.argwhere(~(np.isfinite(losses) & gradients)).tolist()
    if not found:
        return "computed again, each micro-batch is finite: their sum is not, or the fault does not repeat"
    named = [
        f"rank {rank}, micro-batch {index} (loss {losses[rank, index]:g}, its gradient is "
        f"{'finite' if gradients[rank, index] else 'not finite'})"
        for rank, index in found[:MOST_NAMED]
    ]
    return "; ".join(named) + (f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")


def dump_bad_step(
    folder: Path,
    place: StepPlace,
    plan: EpochPlan,
    workload: Workload,
    losses: np.ndarray,
    gradients: np.ndarray,
    norm: float | None,
) -> Path:
    """Write down what a skipped step trained on: `bad_step_00000012.json` in the run folder.

    Args:
        folder: of the run.
        place: of the step; `step` counts from 1.
        plan: that holds it.
        workload: of the run.
        losses, gradients: [R, M], as in `culprits`.
        norm: of the step's gradient.
    """
    lengths = StepLengths.of_plan(workload.plans.lengths, plan, place.state.step, workload.layout)
    ids = plan.step_ids(place.state.step)
    spans = list(zip(lengths.offsets.tolist(), lengths.offsets[1:].tolist(), strict=False))
    batches = [
        {
            "rank": index // losses.shape[1],
            "micro_batch": index % losses.shape[1],
            "sample_ids": ids[start:end].tolist(),
            "seq_lens": lengths.lengths[start:end].tolist(),
            "tokens": int(lengths.tokens[index]),
            "loss_sum": _json_number(float(losses.flat[index])),
            "gradient_finite": bool(gradients.flat[index]),
        }
        for index, (start, end) in enumerate(spans)
    ]
    record: dict[str, Any] = {
        "step": place.step,
        "epoch": place.state.epoch,
        "plan_step": place.state.step,
        "plan_fingerprint": place.plan,
        "data_fingerprint": workload.store.fingerprint,
        "layout": dataclasses.asdict(workload.layout),
        "grad_norm": None if norm is None else _json_number(norm),
        "micro_batches": batches,
    }
    path = folder / f"bad_step_{place.step:08d}.json"
    write_atomically(path, [json.dumps(record, indent=1, allow_nan=False).encode()])
    return path


def _json_number(value: float) -> float | str:
    """Replace NaN and infinities, which JSON lacks, by "nan", "inf" and "-inf"."""
    return value if np.isfinite(value) else str(value)
