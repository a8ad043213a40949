"""Checkpoints on disk: save, list, load, prune. NumPy in, NumPy out.

A run folder holds::

    step_00000100/
        model.safetensors       fp32 masters under their Hugging Face names
        optimizer.safetensors   adam_m.<name>, adam_v.<name> (fp32) and applied_steps (int64 scalar)
        state.json              what else the run needs to resume, as the caller gave it, and the step
        manifest.json           what the caller says about the run, a table of all parameters, checksums
    .tmp-*                      leftovers of a kill; removed at the next start or save

Guarantee: a folder `step_*` is complete. It is written under a hidden name, every file and folder is fsynced,
then it is renamed and the parent is fsynced; old ones are renamed away before they are deleted. So a kill at any moment
leaves the last good one. Nothing is loaded unchecked: every parameter, the state and the manifest have a SHA-256.

Cost: saving needs no second copy of the parameters, loading one copy. One process writes a run folder at a time
(`run_dir.open_run` holds the lock).
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ms_varlen.checkpoint.tensors import CorruptCheckpointError, read_safetensors
from ms_varlen.errors import CheckpointError
from ms_varlen.files import HIDDEN, fsync, hidden, publish

FORMAT_VERSION = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
APPLIED_STEPS = "applied_steps"

_STEP_NAME = re.compile(r"step_(\d{8,})")

Spec = dict[str, tuple[tuple[int, ...], str]]
"""Parameter name -> (shape, NumPy dtype name)."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded and verified checkpoint; all arrays are on the host."""

    path: Path
    step: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    state: dict[str, Any]
    manifest: dict[str, Any]


def step_name(step: int) -> str:
    """Name of the folder of a step's checkpoint: ``step_00000100``."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder name says, or the name of what a link to one means.

    Raises:
        CheckpointError: the name is not of the form ``step_00000100``.
    """
    match = _STEP_NAME.fullmatch(path.name) or _STEP_NAME.fullmatch(path.resolve().name)
    if match is None:
        newest = [str(step) for step in list_checkpoints(path)[-1:]] or ["the folder of a step"]
        raise CheckpointError(f"{path} must be a checkpoint's folder, named like step_00000100; name {newest[0]}")
    return int(match[1])


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Folders of the complete checkpoints of a run, oldest first; empty when there are none."""
    if not run_folder.is_dir():
        return []
    return sorted((path for path in run_folder.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def remove_leftovers(run_folder: Path) -> None:
    """Remove what a kill left behind: half-written and half-deleted files and folders, all under hidden names."""
    for path in run_folder.glob(f"{HIDDEN}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def model_spec(shapes: Mapping[str, tuple[int, ...]]) -> Spec:
    """What the model file holds for parameters of these shapes: fp32 masters."""
    return {name: (tuple(shape), "float32") for name, shape in shapes.items()}


def optimizer_spec(shapes: Mapping[str, tuple[int, ...]]) -> Spec:
    """What the optimizer file holds for parameters of these shapes: two fp32 moments each, and the counter."""
    moments = {
        f"{prefix}.{name}": (tuple(shape), "float32")
        for prefix in ("adam_m", "adam_v")
        for name, shape in shapes.items()
    }
    return {**moments, APPLIED_STEPS: ((), "int64")}


def save_checkpoint(
    run_folder: Path,
    step: int,
    model: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    manifest: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, then prune old ones.

    Args:
        run_folder: the run's folder, which this process holds the lock of.
        step: optimizer steps done.
        model: fp32 masters by Hugging Face name (host).
        optimizer: `adam_m.<name>` and `adam_v.<name>` (fp32) of each of them, and `applied_steps` (int64 scalar).
        state: JSON values; comes back as `Checkpoint.state`.
        manifest: JSON values that describe the run; `mode` is required.
        keep: number of newest checkpoints to keep, this one counted, >= 1.
    Returns:
        The checkpoint's folder.
    Raises:
        CheckpointError: the parameters are not as above, the step is saved already, or the disk refuses (the message
            says how much was needed and free); the checkpoints before it stay.
    """
    final, temporary = run_folder / step_name(step), hidden(run_folder / step_name(step))
    if final.exists():
        raise CheckpointError(
            f"{final} exists already; a step is saved once, start from scratch with checkpoint.resume=never"
        )
    tensors = {
        MODEL_FILE: {name: np.asarray(value, order="C") for name, value in model.items()},
        OPTIMIZER_FILE: {name: np.asarray(value, order="C") for name, value in optimizer.items()},
    }
    shapes = {name: value.shape for name, value in tensors[MODEL_FILE].items()}
    for file, spec in ((MODEL_FILE, model_spec(shapes)), (OPTIMIZER_FILE, optimizer_spec(shapes))):
        _compare(_spec(tensors[file]), spec, f"{final}/{file}", "the caller gave", "give what the file is to hold")
    state_bytes = _json_bytes({**state, "step": step})
    manifest_bytes = _manifest_bytes(manifest, step, tensors, state_bytes)

    run_folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run_folder)
    try:
        try:
            _write_folder(temporary, tensors, {STATE_FILE: state_bytes, MANIFEST_FILE: manifest_bytes})
            publish(temporary, final)
        finally:
            # Already gone if it was renamed; otherwise free its space before the message reports free space.
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise _not_written(final, tensors, error) from error
    _prune(run_folder, keep)
    return final


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest, verified.

    Raises:
        CheckpointError: no checkpoint there, or of a newer format.
        CorruptCheckpointError: the manifest is missing or altered.
    """
    step_of(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} must be a checkpoint's folder, found none; `ls {path.parent}` shows what is there"
        )
    manifest = _read_json(path / MANIFEST_FILE)
    found = manifest.pop("manifest_sha256", None)
    if found != _sha256(_json_bytes(manifest)):
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} is altered: its checksum does not fit its content")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / MANIFEST_FILE}: format_version must be {FORMAT_VERSION} for this ms_varlen, "
            f"found {manifest['format_version']}; use the version of ms_varlen that wrote it"
        )
    return manifest


def load_checkpoint(
    path: Path, expected_mode: str, expected_shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        path: the folder ``step_00000100``.
        expected_mode: the mode that the recipe trains.
        expected_shapes: the model's parameters, name -> shape; None takes the file's.
    Raises:
        CheckpointError: of another mode, or parameters that are not the model's; names the first that differs.
        CorruptCheckpointError: a file is missing, cut short or altered; names the file.
    """
    manifest = read_manifest(path)
    check_mode(path, manifest, expected_mode)
    tables = manifest["parameters"]
    if expected_shapes is not None:
        for name, spec in (
            (MODEL_FILE, model_spec(expected_shapes)),
            (OPTIMIZER_FILE, optimizer_spec(expected_shapes)),
        ):
            advice = "use the model.config that the checkpoint was made with"
            _compare(_table_spec(tables[name]), spec, f"{path}/{name}", "the file holds", advice)
    state = _read_json(path / STATE_FILE, manifest["state_sha256"])
    model = _read_tensors(path / MODEL_FILE, tables[MODEL_FILE])
    optimizer = _read_tensors(path / OPTIMIZER_FILE, tables[OPTIMIZER_FILE])
    return Checkpoint(path, manifest["step"], model, optimizer, state, manifest)


def check_mode(path: Path, manifest: Mapping[str, Any], expected_mode: str) -> None:
    """Refuse a checkpoint of another mode.

    Raises:
        CheckpointError: the modes differ.
    """
    if manifest["mode"] != expected_mode:
        raise CheckpointError(
            f"{path} must be of mode {expected_mode}, which this recipe trains, got {manifest['mode']}; convert it "
            f"with `ckpt-tools convert --to {expected_mode} {shlex.quote(str(path))} NEW_FOLDER`, or "
            "resume it with a recipe of its own mode",
            "CKPT-MODE",
        )


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()


def _sha256(value: bytes | np.ndarray) -> str:
    # hashlib takes one axis only; the view costs no copy.
    data = value.reshape(-1).view(np.uint8).data if isinstance(value, np.ndarray) else value
    return hashlib.sha256(data).hexdigest()


def _spec(tensors: Mapping[str, np.ndarray]) -> Spec:
    return {name: (value.shape, value.dtype.name) for name, value in tensors.items()}


def _table_spec(table: list[dict[str, Any]]) -> Spec:
    return {row["name"]: (tuple(row["shape"]), row["dtype"]) for row in table}


def _compare(found: Spec, expected: Spec, where: str, who: str, advice: str) -> None:
    def say(entry: tuple[tuple[int, ...], str] | None) -> str:
        return "no such parameter" if entry is None else f"{entry[1]} {list(entry[0])}"

    wrong = [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{where}: parameter {name} must be {say(expected.get(name))} for this model, {who} {say(found.get(name))} "
            f"({_differing(wrong, found, expected)}); {advice}",
            "CKPT-RECIPE",
        )


def _differing(wrong: list[str], found: Spec, expected: Spec) -> str:
    """How many parameters of both sides differ, and the first of them by name."""
    named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    return f"{len(wrong)} of {len(found.keys() | expected.keys())} parameters differ: {named}"


def _manifest_bytes(
    given: Mapping[str, Any], step: int, tensors: Mapping[str, Mapping[str, np.ndarray]], state: bytes
) -> bytes:
    if "mode" not in given:
        raise CheckpointError(f"manifest must say the mode, found only {sorted(given)}; give mode=...")
    parameters = {
        file: [
            {"name": name, "shape": value.shape, "dtype": value.dtype.name, "sha256": _sha256(value)}
            for name, value in sorted(values.items())
        ]
        for file, values in tensors.items()
    }
    return sealed_manifest(given, step, parameters, state)


def sealed_manifest(
    given: Mapping[str, Any], step: int, parameters: Mapping[str, list[dict[str, Any]]], state: bytes
) -> bytes:
    """The content of a manifest, with the checksums that `read_manifest` and `load_checkpoint` look at.

    Args:
        given: JSON values that describe the run, `mode` among them.
        step: optimizer steps done.
        parameters: file -> one row for each parameter in order of name: `name`, `shape`, `dtype` (NumPy's name) and
            `sha256`.
        state: the content of `state.json`.
    """
    manifest = {**given, "format_version": FORMAT_VERSION, "step": step, "parameters": parameters}
    # Through JSON once, so that the checksum is that of what a reader gets (tuples become lists, keys strings).
    plain = json.loads(_json_bytes({**manifest, "state_sha256": _sha256(state)}))
    return _json_bytes({**plain, "manifest_sha256": _sha256(_json_bytes(plain))})


def _write_folder(folder: Path, tensors: Mapping[str, dict[str, np.ndarray]], texts: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    for name, values in tensors.items():
        # transformers loads only files that say "pt" here.
        save_file(values, folder / name, metadata={"format": "pt"})
        # safetensors makes its files 0600; those that Python made follow the user's umask.
        shutil.copymode(folder / STATE_FILE, folder / name)
    for name in (*texts, *tensors):
        fsync(folder / name)
    fsync(folder)


def _not_written(final: Path, tensors: Mapping[str, Mapping[str, np.ndarray]], error: Exception) -> CheckpointError:
    needed = sum(value.nbytes for values in tensors.values() for value in values.values())
    free = shutil.disk_usage(final.parent).free
    older = list_checkpoints(final.parent)
    last = f"the last good one is {older[-1]}" if older else "there is no older one"
    return CheckpointError(
        f"{final} could not be written ({error}): needed {needed / 1e6:.1f} MB, free {free / 1e6:.1f} MB in "
        f"{final.parent}; {last}; make room, then start again: the run goes on from there",
        "CKPT-DISK",
    )


def _prune(run_folder: Path, keep: int) -> None:
    for old in list_checkpoints(run_folder)[:-keep]:
        removed = hidden(run_folder / f"old-{old.name}")
        # A folder that is half deleted must not look like a checkpoint.
        os.rename(old, removed)
        shutil.rmtree(removed)


def _read_json(path: Path, sha256: str | None = None) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is cut short or altered: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} is altered: it must hold an object")
    if sha256 is not None and _sha256(content) != sha256:
        raise CorruptCheckpointError(f"{path} is altered: its checksum is not the manifest's")
    return value


def _read_tensors(path: Path, table: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    tensors = {name: tensor.read() for name, tensor in read_safetensors(path).items()}
    expected, found = _table_spec(table), _spec(tensors)
    if found != expected:
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise CorruptCheckpointError(f"{path} is altered: parameter {names[0]} is not as its manifest says")
    for row in table:
        if _sha256(tensors[row["name"]]) != row["sha256"]:
            raise CorruptCheckpointError(f"{path} is altered: the checksum of parameter {row['name']} does not fit")
    return tensors
