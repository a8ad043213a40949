"""What a run of MindFormers' Trainer leaves about its plan, and the way back from its step count. No MindSpore.

`plan.json` says what the plan was made from, and each line of `metrics.jsonl` the place that its step led to. So a
checkpoint of MindFormers, which knows its step alone, becomes a state that `EpochPlans.resume` takes.
"""

import json
from pathlib import Path
from typing import Any

from ms_varlen.checkpoint.same_data import check_data
from ms_varlen.errors import CheckpointError

PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"


def check_plan(folder: Path, fingerprint: str, data_fingerprint: str) -> None:
    """Refuse to go on with another plan or other data than those that the steps so far were trained by.

    Args:
        folder: the monitor's output folder.
        fingerprint: of the plan in use.
        data_fingerprint: of the token store in use.
    Raises:
        CheckpointError: they differ, or `plan.json` is not there.
    """
    plan = _read_plan(folder)
    found = plan["plan_fingerprint"]
    if found != fingerprint:
        raise CheckpointError(
            f"the plan must be that of {folder / PLAN_FILE} ({found}), got {fingerprint}: corpus, seed, batch or ranks "
            "changed, so a step count says nothing about the samples; set back what changed, or begin anew without "
            "load_checkpoint"
        )
    check_data(folder / PLAN_FILE, plan, data_fingerprint, "begin anew without load_checkpoint")


def _read_plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} must be there to go on from a step of MindFormers, got no file; give the monitor the output_dir "
            "of the run that wrote the checkpoint"
        )
    return json.loads(path.read_bytes())


def saved_plan_state(folder: str | Path, steps: int) -> dict[str, Any]:
    """The place in our plan after `steps` steps of a run with MindFormers' Trainer.

    Args:
        folder: the monitor's output folder.
        steps: MindFormers' step count, as in the name of its checkpoint.
    Returns:
        what `EpochPlans.resume` and `EpochPlans.resume_changed` take.
    Raises:
        CheckpointError: the run has no such step.
    """
    folder = Path(folder)
    plan = _read_plan(folder)
    place = {"epoch": 0, "step": 0} if steps == 0 else None
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        if metrics["step"] == steps:
            place = metrics["place"]
    if place is None:
        raise CheckpointError(
            f"{folder / METRICS_FILE} must hold step {steps}, got no such line; give a step of the run"
        )
    return {**place, "fingerprint": plan["plan_fingerprint"], "settings": plan["settings"], "trained_before": None}
