"""Whether a recipe may go on from a checkpoint. Imports no MindSpore.

It must be the one in `recipe.yaml` beside the checkpoint, but for `MAY_CHANGE` and for what decides the plan
(`is_planned`): then the rest of the epoch is planned anew. The data must be the same (`same_data`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ms_varlen.checkpoint.same_data import check_data
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

RECIPE_FILE = "recipe.yaml"

MAY_CHANGE = frozenset(
    {
        "train.steps",
        "train.eval_every",
        "train.max_bad_steps",
        "checkpoint.output_dir",  # says where the run lies; it is there
        "data.workers",
        "data.store_dir",  # says where the samples lie; see `_BY_CONTENT`
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.on_save_error",
        "checkpoint.resume",
        "graph.compile_cache",
        "graph.max_graphs",
        "device.max_memory",
        "device.hccl_connect_seconds",
        "device.hccl_exec_seconds",
        "device.profile_steps",
    }
)
"""Recipe keys that may differ between a run and its continuation, to no effect on what is left to do."""

_BY_CONTENT = frozenset({"data.source", "data.validation_source", "data.tokenizer"})
"""Keys that may name another place of the same content: `check_data` compares that."""

_PLANNED_SECTIONS = ("batch.", "shapes.")
_PLANNED_KEYS = frozenset({"mode", "model.variable_seq_lengths"})  # the checkpoint's manifest decides on the mode


def is_planned(key: str) -> bool:
    """Whether a recipe key may differ because the rest of the epoch is planned anew for it."""
    return key in _PLANNED_KEYS or key.startswith(_PLANNED_SECTIONS)


Shapes = Mapping[str, tuple[int, ...]]
Expected = tuple[Shapes | None, str | None]
"""Of a checkpoint: the shapes of its parameters, and the fingerprint of its data; see `open_run`."""


def load_to_go_on(path: Path, mode: str, recipe: Mapping[str, Any], expected: Expected) -> tuple[Checkpoint, list[str]]:
    """Load a checkpoint that the recipe may go on from; one that is corrupt is never passed over silently.

    Args:
        path: of the checkpoint, beside its run's recipe.
        mode: of the recipe.
        recipe: the resolved recipe.
        expected: what the checkpoint must be of.
    Returns:
        the checkpoint, and the keys for which the rest of the epoch is planned anew, each as "key: was 1, is 2".
    Raises:
        CheckpointError: another mode, recipe, model or data, or nothing tells; the message says what to do.
    """
    shapes, data_fingerprint = expected
    try:
        check_mode(path, read_manifest(path), mode)
        replanned = _check_recipe(path.parent / RECIPE_FILE, recipe)
        if recipe["train"]["steps"] < step_of(path):
            raise CheckpointError(
                f"train.steps must be >= {step_of(path)}, the step of {path}, got {recipe['train']['steps']}; "
                "raise it, or begin anew with checkpoint.resume=never",
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
    before = f"go on from the one before it with checkpoint.resume={older[-1]}, or " if older else ""
    return f"{before}begin anew with checkpoint.resume=never"


def _check_recipe(path: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The keys for which the rest of the epoch is planned anew, where the recipe may go on from the one in a file."""
    if not path.exists():
        raise CheckpointError(
            f"{path} must be beside the checkpoints, found none: nothing tells whether the recipe changed; "
            "bring the whole run folder along, or begin anew with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        saved = str(error).splitlines()[0]
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{path} must hold the run's recipe, found {saved!r}: nothing tells whether the recipe changed; bring the "
            "file back, or begin anew with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    refused, replanned = changed_keys(saved, recipe)
    if refused:
        raise CheckpointError(
            f"the recipe must be that of {path} to go on, but {'; '.join(refused)}; "
            "set back what changed, or begin anew with checkpoint.resume=never",
            "CKPT-RECIPE",
        )
    return replanned


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Dotted keys outside `MAY_CHANGE` and `_BY_CONTENT` that differ between two recipes, each as "key: was 1, is 2".

    Returns:
        those that a continuation must not change, and those for which the rest of the epoch is planned anew.
    """
    before, after = dict(dotted(old)), dict(dotted(new))

    def say(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not set"

    refused: list[str] = []
    replanned: list[str] = []
    for key in sorted((before.keys() | after.keys()) - MAY_CHANGE - _BY_CONTENT):
        if key not in before or key not in after or before[key] != after[key]:
            (replanned if is_planned(key) else refused).append(f"{key}: was {say(before, key)}, is {say(after, key)}")
    return refused, replanned


def dotted(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values one by one, each under its dotted path."""
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield from dotted(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry
