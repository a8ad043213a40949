"""What the doctor says about a run folder: the checkpoint that training would go on from, and the steps it skipped.

The rules are those of `checkpoint.run_dir.open_run`, looked at without a lock and without a change on disk.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ms_varlen.checkpoint.run_dir import RECIPE_FILE, changed_keys, run_folders
from ms_varlen.checkpoint.same_data import DATA_FINGERPRINT, check_data
from ms_varlen.checkpoint.store import (
    CorruptCheckpointError,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    step_of,
)
from ms_varlen.diagnose.findings import GREEN, RED, YELLOW, Check
from ms_varlen.errors import CheckpointError, VarlenError
from ms_varlen.train.recipe import Recipe

AREA = "checkpoint"
SHOWN_STEPS = 3
"""Of the steps that were skipped, the last ones are shown."""
SHOWN_SAMPLES = 8


def checkpoint_checks(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], data_fingerprint: str) -> Iterator[Check]:
    """What lies in the recipe's output folder, whether a run would go on from it, and what its last run skipped.

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
    """The first reason why training would not go on from a checkpoint; green where it would."""
    try:
        manifest = read_manifest(path)
        if manifest["mode"] != recipe.mode:
            raise CheckpointError(
                f"{path} must be of mode {recipe.mode}, got {manifest['mode']}; "
                f"ckpt-tools convert --to {recipe.mode} {path} DST",
                "CKPT-MODE",
            )
        replanned = _changed_plan(path, recipe)
        steps = step_of(path)
        if recipe.train.steps < steps:
            raise CheckpointError(
                f"train.steps must be >= {steps}, the step of {path}, got {recipe.train.steps}; raise it, or begin "
                "anew with checkpoint.resume=never",
                "CKPT-RECIPE",
            )
        check_data(path, manifest, data_fingerprint)
        load_checkpoint(path, recipe.mode, shapes)
    except VarlenError as error:
        return Check(AREA, RED, str(error) + _way_out(path, error), error.code or "CKPT-CORRUPT")
    then = f"training goes on from {path}"
    if recipe.train.steps == steps:
        then = f"{path} has its {steps} steps already, raise train.steps to go on"
    elif replanned:
        then += f", the rest of the epoch planned anew for {'; '.join(replanned)}"
    return Check(AREA, GREEN, f"every checksum fits; {then}")


def _changed_plan(path: Path, recipe: Recipe) -> list[str]:
    """The keys for which the rest of the epoch is planned anew.

    Raises:
        CheckpointError: the run's recipe is not there, cannot be read, or differs in what must not change.
    """
    saved = path.parent / RECIPE_FILE
    try:
        before = yaml.safe_load(saved.read_text(encoding="utf-8")) if saved.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        before = str(error).splitlines()[0]
    if not isinstance(before, dict):
        raise CheckpointError(
            f"{saved} must hold the run's recipe, got {before!r}; bring the file back, or begin anew with "
            "checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    refused, replanned = changed_keys(before, recipe.resolved())
    if refused:
        raise CheckpointError(
            f"the recipe must be that of {saved} to go on, got {'; '.join(refused)}; set back what changed, or "
            "checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    return replanned


def _way_out(path: Path, error: VarlenError) -> str:
    if not isinstance(error, CorruptCheckpointError):
        return ""
    older = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    before = f"go on from the one before it with checkpoint.resume={older[-1]}, or " if older else ""
    return f"; {before}begin anew with checkpoint.resume=never"


def bad_step_checks(folder: Path, data_fingerprint: str) -> Iterator[Check]:
    """What the `bad_step_*.json` of a run folder hold: the last steps that were skipped, and why.

    Args:
        folder: of the run.
        data_fingerprint: of the token store in use, which sample ids belong to.
    """
    paths = sorted(folder.glob("bad_step_*.json"))
    records: dict[Path, dict[str, Any]] = {}
    for path in paths:
        try:
            records[path] = json.loads(path.read_bytes())
            text = _describe(records[path], data_fingerprint, [record["step"] for record in records.values()])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"the file must be what training writes, got {type(error).__name__} ({error}); delete it"
        if path in paths[-SHOWN_STEPS:]:
            yield Check("skipped", YELLOW, f"{path} (of {len(paths)}): {text}", "LOSS-NAN")


def _describe(record: Mapping[str, Any], data_fingerprint: str, bad: list[int]) -> str:
    """Which samples a skipped step had, what was not finite, and what to do; `bad`: all such steps up to it."""
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
    if len(lost) == len(batches) and record["step"] - 1 in bad:
        found += " after a step that was skipped too, so the weights are to blame, not these samples"
        advice = "go back to a checkpoint before it and lower train.learning_rate"
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
