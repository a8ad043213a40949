"""Checkpoints of ms_varlen, read and written piece by piece; `ms_varlen.checkpoint.store` defines what they are."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ckpt_tools.parameters import check_parameters, moment_shapes
from ms_varlen.checkpoint.resume import RECIPE_FILE
from ms_varlen.checkpoint.store import (
    APPLIED_STEPS,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    CorruptCheckpointError,
    list_checkpoints,
    read_manifest,
    sealed_manifest,
    step_name,
)
from ms_varlen.checkpoint.tensors import (
    NUMPY_TYPES,
    StoredTensor,
    cast,
    from_array,
    read_safetensors,
    write_safetensors,
)
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig

IMPORTED = "imported"
"""The mode of a checkpoint that came from elsewhere: weights, perhaps moments, and no place in a plan."""

CARRIED_FOLDER = "hugging_face"
"""In a checkpoint that came from a Hugging Face folder: its tokenizer and generation files, for the way back."""


@dataclasses.dataclass(frozen=True)
class StepFolder:
    """One of our checkpoints, its tensors unread.

    Attributes:
        path: the folder ``step_00000100``.
        manifest: verified.
        state: as in `state.json`; `state_bytes` is the file.
        model: fp32 masters by name; reading one to its end checks its checksum.
        optimizer: moments and the step counter by name, likewise; empty in a checkpoint of weights only.
        sums: SHA-256 of each tensor's bytes by name, as the manifest has them.
    """

    path: Path
    manifest: dict[str, Any]
    state: dict[str, Any]
    state_bytes: bytes
    model: dict[str, StoredTensor]
    optimizer: dict[str, StoredTensor]
    sums: dict[str, str]

    @property
    def config(self) -> DecoderConfig:
        """The decoder.

        Raises:
            CheckpointError: the manifest's is none of this version.
        """
        try:
            return DecoderConfig.model_validate(self.manifest.get("model_config"))
        except ValidationError as error:
            first = error.errors()[0]
            place, rule = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise CheckpointError(
                f"{self.path / MANIFEST_FILE}: model_config.{place}: {rule}, got {first['input']!r}; use the "
                "version of ms_varlen that wrote it"
            ) from error

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.optimizer.values()))


def newest_step(path: Path) -> Path:
    """The step folder that a path means: itself, or the newest in a run folder.

    Raises:
        CheckpointError: neither.
    """
    if not path.name.startswith("step_"):
        path = path.resolve()  # a link to a step folder, or "."
    if (path / MANIFEST_FILE).exists() or path.name.startswith("step_"):
        return path
    steps = list_checkpoints(path)
    if not steps:
        raise CheckpointError(
            f"{path} must be a folder step_NNNNNNNN or a run folder with one, found none; `ckpt-tools inspect {path}` "
            "says what it is"
        )
    return steps[-1]


def tree_of(step: StepFolder, named: Path) -> Path:
    """The folder that nothing is written into: the step's, or its run's when that was named or has a recipe."""
    run_folder = step.path.parent
    return run_folder if (run_folder / RECIPE_FILE).exists() or named.resolve() == run_folder.resolve() else step.path


def verified_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a step folder.

    Raises:
        CheckpointError, CorruptCheckpointError: as `read_manifest`, with what to do.
    """
    try:
        return read_manifest(path)
    except CorruptCheckpointError as error:
        older = [step for step in list_checkpoints(path.parent) if step.name < path.name]
        way_out = f", or use the one before it, {older[-1]}" if older else ""
        raise CorruptCheckpointError(f"{error}; take another copy of the checkpoint{way_out}") from error


def open_step(path: Path, check: bool = True) -> StepFolder:
    """Open a checkpoint; the tensors' bytes are not read.

    Args:
        path: a step folder, or a run folder: its newest.
        check: compare names, shapes and dtypes with the manifest, and the manifest's with the model.
    Raises:
        CheckpointError: no checkpoint, of another format, or with parameters that its model has not.
        CorruptCheckpointError: a file is missing, cut short or altered.
    """
    path = newest_step(path)
    manifest = verified_manifest(path)
    sums = {row["name"]: row["sha256"] for rows in manifest["parameters"].values() for row in rows}
    files = {file: _read_file(path / file, sums) for file, rows in manifest["parameters"].items() if rows}
    try:
        state_bytes = (path / STATE_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path / STATE_FILE} is missing; take another copy of the checkpoint") from error
    state = from_array(STATE_FILE, np.frombuffer(state_bytes, np.uint8))
    if state.sha256() != manifest["state_sha256"]:
        raise CorruptCheckpointError(
            f"{path / STATE_FILE} is altered: its checksum is not the manifest's; take another copy of the checkpoint"
        )
    step = StepFolder(
        path,
        manifest,
        json.loads(state_bytes),
        state_bytes,
        files.get(MODEL_FILE, {}),
        files.get(OPTIMIZER_FILE, {}),
        sums,
    )
    if check:
        for file, tensors in files.items():
            _check_table(path / file, tensors, manifest["parameters"][file])
        shapes, advice = step.config.parameter_shapes(), "take another copy of the checkpoint"
        check_parameters(step.model, shapes, str(path / MODEL_FILE), advice)
        if step.optimizer:
            moments = {name: tensor for name, tensor in step.optimizer.items() if name != APPLIED_STEPS}
            check_parameters(moments, moment_shapes(shapes), str(path / OPTIMIZER_FILE), advice)
    return step


def _read_file(path: Path, sums: Mapping[str, str]) -> dict[str, StoredTensor]:
    return {name: _self_checking(tensor, sums.get(name)) for name, tensor in read_safetensors(path).items()}


def _self_checking(tensor: StoredTensor, sha256: str | None) -> StoredTensor:
    """The tensor, which raises at its end when its bytes are not those that its manifest tells."""

    def pieces() -> Iterator[np.ndarray]:
        digest = hashlib.sha256()
        for piece in tensor.pieces():
            digest.update(piece.data)
            yield piece
        if digest.hexdigest() != sha256:
            raise CorruptCheckpointError(
                f"the source {tensor.where} is altered: the checksum of parameter {tensor.name} does not fit; "
                "take another copy of the checkpoint"
            )

    return dataclasses.replace(tensor, pieces=pieces)


def _check_table(path: Path, tensors: Mapping[str, StoredTensor], table: list[dict[str, Any]]) -> None:
    rows = {row["name"]: row for row in table}
    for name in sorted(tensors.keys() | rows.keys()):
        tensor, row = tensors.get(name), rows.get(name)
        if tensor is None:
            raise CorruptCheckpointError(f"{path}: parameter {name} is missing, its manifest has it; take another copy")
        if row is None:
            raise CorruptCheckpointError(
                f"{path}: parameter {name} ({tensor.describe()}) is one too many, its manifest has none of that name; "
                "take another copy"
            )
        if (tensor.shape, numpy_name(tensor)) != (tuple(row["shape"]), row["dtype"]):
            raise CorruptCheckpointError(
                f"{path}: parameter {name} must be {row['dtype']} {row['shape']} as its manifest says, found "
                f"{numpy_name(tensor)} {list(tensor.shape)}; take another copy"
            )


def numpy_name(tensor: StoredTensor) -> str:
    """The dtype's name in our manifests."""
    return "bfloat16" if tensor.dtype == "BF16" else np.dtype(NUMPY_TYPES[tensor.dtype]).name


def write_step(
    run_folder: Path,
    step: int,
    model: Mapping[str, StoredTensor],
    optimizer: Mapping[str, StoredTensor],
    state: bytes,
    manifest: Mapping[str, Any],
    progress: Callable[[int], None],
) -> Path:
    """Write a step folder below `run_folder`, which must be a folder that nobody sees yet (`new_folder`).

    Args:
        step: optimizer steps done.
        model: by name; cast to fp32 on the way.
        optimizer: by name, moments cast to fp32; empty writes a checkpoint of weights only.
        state: the content of `state.json`.
        manifest: what `sealed_manifest` takes.
        progress: called with the bytes of each piece.
    """
    folder = run_folder / step_name(step)
    folder.mkdir()
    parameters = {}
    for file, tensors in ((MODEL_FILE, model), (OPTIMIZER_FILE, optimizer)):
        held = {name: tensor if name == APPLIED_STEPS else cast(tensor, "F32") for name, tensor in tensors.items()}
        sums = write_safetensors(folder / file, held.values(), progress) if held else {}
        parameters[file] = [
            {"name": name, "shape": list(held[name].shape), "dtype": numpy_name(held[name]), "sha256": sums[name]}
            for name in sorted(held)
        ]
    (folder / STATE_FILE).write_bytes(state)
    (folder / MANIFEST_FILE).write_bytes(sealed_manifest(manifest, step, parameters, state))
    return folder
