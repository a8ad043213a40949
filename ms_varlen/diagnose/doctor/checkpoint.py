"""Checks of a run folder: the checkpoint that training would resume from, and the steps it skipped.

The rules are those of `load_to_go_on`, which training goes by, without a lock and without a change on disk.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ms_varlen.checkpoint.resume import DATA_FINGERPRINT, load_to_go_on
from ms_varlen.checkpoint.run_folder import run_folders
from ms_varlen.checkpoint.store import list_checkpoints, step_of
from ms_varlen.diagnose.doctor.findings import GREEN, RED, YELLOW, Check
from ms_varlen.errors import VarlenError
from ms_varlen.recipe.recipe import Recipe

AREA = "checkpoint"
SHOWN_STEPS = 3
"""Of the steps that were skipped, the last ones are shown."""
SHOWN_SAMPLES = 8


def checkpoint_checks(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], data_fingerprint: str) -> Iterator[Check]:
    """What lies in the recipe's output folder, whether a run would resume from it, and what its last run skipped.

    Args:
        recipe: the recipe.
        shapes: of the model's parameters, by name.
        data_fingerprint: of the token store in use.
    """
    output_dir, resume = recipe.checkpoint.output_dir, recipe.checkpoint.resume
    runs = run_folders(output_dir, recipe.mode)
    if isinstance(resume, Path):
        step = resume.resolve()  # a link may have any name
        yield _checkpoint_check(step, recipe, shapes, data_fingerprint)
        yield from bad_step_checks(step.parent, data_fingerprint)
        return
    checkpoints = list_checkpoints(runs[-1]) if runs and resume == "auto" else []
    if checkpoints:
        yield _checkpoint_check(checkpoints[-1], recipe, shapes, data_fingerprint)
    elif runs and resume == "never":
        yield Check(AREA, GREEN, f"checkpoint.resume is never; training begins at step 0 beside {runs[-1]}")
    else:
        yield Check(AREA, GREEN, f"none of mode {recipe.mode} in {output_dir}; training begins at step 0")
    if runs:
        yield from bad_step_checks(runs[-1], data_fingerprint)


def _checkpoint_check(
    path: Path, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], data_fingerprint: str
) -> Check:
    """The first reason why training would not resume from a checkpoint; green if it would."""
    try:
        _, replanned = load_to_go_on(path, recipe.mode, recipe.resolved(), (shapes, data_fingerprint))
    except VarlenError as error:
        return Check(AREA, RED, str(error), error.code or "CKPT-CORRUPT")
    then = f"training goes on from {path}"
    if recipe.train.steps == step_of(path):
        then = f"{path} has its {recipe.train.steps} steps already, raise train.steps to go on"
    elif replanned:
        then += f", the rest of the epoch planned anew for {'; '.join(replanned)}"
    return Check(AREA, GREEN, f"every checksum fits; {then}")


def bad_step_checks(folder: Path, data_fingerprint: str) -> Iterator[Check]:
    """What the `bad_step_*.json` of a run folder hold: the last steps that were skipped, and why.

    Args:
        folder: of the run.
        data_fingerprint: of the token store in use, which sample ids belong to.
    """
    paths = sorted(folder.glob("bad_step_*.json"))
    lost: dict[int, set[int]] = {}  # ranks by step
    for path in paths:
        try:
            record = json.loads(path.read_bytes())
            text = _describe(record, data_fingerprint, lost)
            lost[record["step"]] = _lost_ranks(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"the file must be what training writes, got {type(error).__name__} ({error}); delete it"
        if path in paths[-SHOWN_STEPS:]:
            yield Check("skipped", YELLOW, f"{path} (of {len(paths)}): {text}", "LOSS-NAN")


def _lost_ranks(record: Mapping[str, Any]) -> set[int]:
    """Ranks that had no finite loss at all in a skipped step."""
    batches = record["micro_batches"]
    return {batch["rank"] for batch in batches} - {
        batch["rank"] for batch in batches if not isinstance(batch["loss_sum"], str)
    }


def _describe(record: Mapping[str, Any], data_fingerprint: str, before: Mapping[int, set[int]]) -> str:
    """Which samples a skipped step had, what was not finite, and what to do.

    `before` holds the ranks that were lost in all skipped steps up to it, by step.
    """
    batches = record["micro_batches"]
    lost = [batch for batch in batches if isinstance(batch["loss_sum"], str)]
    # Older runs wrote down the losses alone.
    overflown = [batch for batch in batches if not batch.get("gradient_finite", True)]
    advice = "look at these samples, or lower train.learning_rate"
    if lost:
        found = f"a loss of {lost[0]['loss_sum']} in {len(lost)} of {len(batches)} micro-batches"
    elif overflown:
        found = f"finite losses and a gradient that is not in {len(overflown)} of {len(batches)} micro-batches"
    else:
        found = f"finite losses and a gradient norm of {record['grad_norm']} over {len(batches)} micro-batches"
        advice = "lower train.learning_rate"
    again = sorted(_lost_ranks(record) & before.get(record["step"] - 1, set()))
    if len(lost) == len(batches) and record["step"] - 1 in before:
        found += " after a step that was skipped too, so the weights are to blame, not these samples"
        advice = "go back to a checkpoint before it and lower train.learning_rate"
    elif again:
        found += (
            f", all of rank {again[0]} as in the step before: its weights or device are to blame, not these samples"
        )
        advice = f"start again from the last checkpoint, and look at the machine of rank {again[0]} if it comes back"
    rule = f"loss and gradient of step {record['step']} must be finite"
    worst = (lost or overflown or batches)[0]
    ids, lengths = (_shortened(worst[name]) for name in ("sample_ids", "seq_lens"))
    if record[DATA_FINGERPRINT] != data_fingerprint:
        advice += "; the ids are of another token store than the recipe's"
    return (
        f"{rule}, got {found} (rank {worst['rank']}, micro-batch {worst['micro_batch']}, T={worst['tokens']}, sample "
        f"ids {ids} of lengths {lengths}); {advice}"
    )


def _shortened(values: list[int]) -> str:
    more = f", ... {len(values)} in all" if len(values) > SHOWN_SAMPLES else ""
    return "[" + ", ".join(map(str, values[:SHOWN_SAMPLES])) + more + "]"
