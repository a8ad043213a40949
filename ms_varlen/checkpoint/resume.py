"""The rules for resuming: whether a recipe may continue from a checkpoint.

The recipe must equal the `recipe.yaml` next to the checkpoint, except for keys that decide nothing or only the plan
(see `ms_varlen.key_roles`). If a key of the plan changed, the rest of the epoch is planned again.

The data must be the same. A plan numbers samples by their lengths alone, so other texts, another loss mask or another
tokenizer of equal lengths would train without an error. The fingerprint of the token store tells them apart: it hashes
everything that decides the content, and no folder or path.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ms_varlen.checkpoint.store import (
    Checkpoint,
    CorruptCheckpointError,
    check_mode,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    step_of,
)
from ms_varlen.errors import CheckpointError
from ms_varlen.key_roles import dotted, key_role

RECIPE_FILE = "recipe.yaml"

DATA_FINGERPRINT = "data_fingerprint"
"""The manifest's key for the fingerprint of the token store."""

SHOWN = 12
"""Characters of a fingerprint that a message shows."""

Shapes = Mapping[str, tuple[int, ...]]
Expected = tuple[Shapes | None, str | None]
"""Of a checkpoint: the shapes of its parameters, and the fingerprint of its data; see `open_run`."""


def load_to_go_on(path: Path, mode: str, recipe: Mapping[str, Any], expected: Expected) -> tuple[Checkpoint, list[str]]:
    """Load a checkpoint that the recipe may resume from; a corrupt one is never skipped silently.

    Args:
        path: of the checkpoint, next to its run's recipe.
        mode: of the recipe.
        recipe: the resolved recipe.
        expected: shapes and data fingerprint that the checkpoint must have.
    Returns:
        the checkpoint, and the keys for which the rest of the epoch is planned again, each as "key: was 1, is 2".
    Raises:
        CheckpointError: mode, recipe, model or data differ or are unknown; the message gives the next step.
    """
    shapes, data_fingerprint = expected
    try:
        check_mode(path, read_manifest(path), mode)
        replanned = _check_recipe(path.parent / RECIPE_FILE, recipe)
        if recipe["train"]["steps"] < step_of(path):
            raise CheckpointError(
                f"train.steps must be >= {step_of(path)}, the step of {path}, got {recipe['train']['steps']}; "
                "raise it, or start from scratch with checkpoint.resume=never",
                "CKPT-RECIPE",
            )
        checkpoint = load_checkpoint(path, mode, shapes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {_way_out(path)}") from error
    if data_fingerprint is not None:
        check_data(path, checkpoint.manifest, data_fingerprint)
    return checkpoint, replanned


def _way_out(path: Path) -> str:
    older = [other for other in list_checkpoints(path.parent) if step_of(other) < step_of(path)]
    before = f"resume from the one before it with checkpoint.resume={older[-1]}, or " if older else ""
    return f"{before}start from scratch with checkpoint.resume=never"


def _check_recipe(path: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Return the changed keys of the plan; raise if the recipe may not resume from the one in the file."""
    if not path.exists():
        raise CheckpointError(
            f"{path} must be next to the checkpoints, found none, so changes of the recipe cannot be seen; "
            "copy the whole run folder, or start from scratch with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        saved = str(error).splitlines()[0]
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{path} must hold the run's recipe, found {saved!r}, so changes of the recipe cannot be seen; "
            "restore the file, or start from scratch with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    refused, replanned = changed_keys(saved, recipe)
    if refused:
        raise CheckpointError(
            f"the recipe must be that of {path} to resume, but {'; '.join(refused)}; "
            "set back what changed, or start from scratch with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    return replanned


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the dotted keys that differ between two recipes and matter, each as "key: was 1, is 2".

    Returns:
        keys that must not change, and keys for which the rest of the epoch is planned again.
    """
    before, after = dict(dotted(old)), dict(dotted(new))

    def shown(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not set"

    refused: list[str] = []
    replanned: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        role = key_role(key)
        if role.may_change or role.by_content:
            continue
        if key not in before or key not in after or before[key] != after[key]:
            changed = f"{key}: was {shown(before, key)}, is {shown(after, key)}"
            (replanned if role.replans else refused).append(changed)
    return refused, replanned


def check_data(path: Path, written: Mapping[str, Any], fingerprint: str, advice: str | None = None) -> None:
    """Raise if the data differ from the data trained on so far.

    Args:
        path: of the checkpoint, or of the file that names its data.
        written: the content of its manifest or of that file.
        fingerprint: of the token store in use.
        advice: what to do instead of restoring the data; by default for one of our checkpoints.
    Raises:
        CheckpointError: the token store differs, or the old one is unknown.
    """
    found = written.get(DATA_FINGERPRINT)
    if found == fingerprint:
        return
    was = f"token store {found[:SHOWN]}" if isinstance(found, str) else "a token store that it does not name"
    advice = advice or f"start from scratch from its weights with checkpoint.resume=never and model.init_from={path}"
    raise CheckpointError(
        f"data.source and data.tokenizer must give the samples of {path} ({was}), got token store "
        f"{fingerprint[:SHOWN]}: texts, loss masks or the tokenizer changed, so its place in the epoch means other "
        f"samples; restore the data, or {advice}",
        "CKPT-RECIPE",
    )
