"""What a run of MindFormers' Trainer leaves about its plan, and the way back from its step count. No MindSpore.

`plan.json` says what the plan was made from, and each line of `metrics.jsonl` the place that its step led to. So a
checkpoint of MindFormers, which knows its step alone, becomes a state that `EpochPlans.resume` takes.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.checkpoint.resume import check_data
from ms_varlen.errors import CheckpointError
from ms_varlen.planning.plan import EpochPlans, PlanSettings, PlanState

PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
WEIGHTS_ALONE = "from the weights alone (checkpoint.no_load_optim: True, resume_training: False)"

SETTINGS = {
    "policy": "data_loader.mode",
    "micro_batches": "runner_config.batch_size",
    "seed": "data_loader.seed",
    "world_size": "number of data-parallel ranks",
    "max_segments": "data_loader.compressed_eod_mask_length",
    "window": "data_loader.window",
    "quadratic_cost": "data_loader.model",
}
"""What decides a setting of a plan in a MindFormers YAML."""


def set_aside(*paths: Path) -> list[Path]:
    """Rename files of an earlier run, those that there are, to the first number that none of them has yet.

    Returns:
        their new paths, as metrics.1.jsonl.
    """
    number = 1
    while any(path.with_suffix(f".{number}{path.suffix}").exists() for path in paths):
        number += 1
    return [path.rename(path.with_suffix(f".{number}{path.suffix}")) for path in paths if path.exists()]


def check_plan(folder: Path, steps: int, plans: EpochPlans, place: PlanState, data_fingerprint: str) -> None:
    """Refuse to resume if a step count would mean other samples than those that were trained.

    Other settings are fine where the same samples were trained by then: as many packed rows a step on more or fewer
    ranks, say. The rest of the epoch is then trained under the new settings.

    Args:
        folder: the monitor's output folder.
        steps: MindFormers' step count, as in the name of its checkpoint.
        plans: in use.
        place: in these plans, after `steps` steps.
        data_fingerprint: of the token store in use.
    Raises:
        CheckpointError: other samples were trained, or the files of the run are not there.
    """
    plan = _read_plan(folder)
    check_data(folder / PLAN_FILE, plan, data_fingerprint, f"start from scratch {WEIGHTS_ALONE}")
    if plan["plan_fingerprint"] == plans.fingerprint:
        return
    before = PlanSettings.from_dict(plan["settings"])
    if before.per_step == plans.settings.per_step:
        old, saved = EpochPlans(plans.lengths, "", before), saved_plan_state(folder, steps)
        old_place = PlanState(saved["epoch"], saved["step"])
        if old_place == place and np.array_equal(old.trained(old_place).bits, plans.trained(place).bits):
            return
    was, now = dataclasses.asdict(before), dataclasses.asdict(plans.settings)
    changed = [f"{_key(name, before)}: was {was[name]}, is {now[name]}" for name in was if was[name] != now[name]]
    raise CheckpointError(
        f"the plan must be that of {folder / PLAN_FILE}, got another, in which step {steps} means other samples "
        f"({'; '.join(changed)}); set that back (packed rows may be dealt to more or fewer ranks, if ranks * "
        f"batch_size stays), or start from scratch {WEIGHTS_ALONE}",
        "CKPT-RECIPE",
    )


def _key(name: str, settings: PlanSettings) -> str:
    if name == "size":
        return "runner_config.batch_size" if settings.policy == "rows" else "data_loader.seq_length"
    return SETTINGS.get(name, name)


def _read_plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} must be there to go on from a step of MindFormers, got no file; give the monitor the output_dir "
            f"of the run that wrote the checkpoint, or start from scratch {WEIGHTS_ALONE}"
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
    path = folder / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    for line in lines:
        if line.endswith("\n"):  # a kill leaves a part of the last one
            metrics = json.loads(line)
            if metrics["step"] == steps:
                place = metrics["place"]
    if place is None:
        raise CheckpointError(f"{path} must hold step {steps}, got no such line; give a step of the run")
    return {**place, "fingerprint": plan["plan_fingerprint"], "settings": plan["settings"], "trained_before": None}
