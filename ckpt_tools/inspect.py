"""What a checkpoint is, what it holds, and what is wrong with it."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ckpt_tools.gguf import open_gguf, stored_types
from ckpt_tools.mindformers.checkpoints import GLOBAL_STEP, config_beside, no_names_of_mindformers, parts_of, weights_of
from ckpt_tools.mindformers.names import is_fused, model_class_of
from ckpt_tools.mindformers.shards import merged_tensors
from ckpt_tools.open_any import ReadingHints, kind_of
from ckpt_tools.step_folder import IMPORTED, StepFolder, newest_step, open_step, verified_manifest
from ckpt_tools.weights import EMBEDDING, hugging_face_tensors, open_hugging_face
from ms_varlen.checkpoint.store import MODEL_FILE, CorruptCheckpointError
from ms_varlen.checkpoint.tensors import StoredTensor
from ms_varlen.errors import VarlenError
from ms_varlen.models.hugging_face import load_config


def inspect(path: Path, hints: ReadingHints, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Look into a checkpoint; faults are reported, not raised.

    Args:
        path: anything `kind_of` knows.
        hints: see `ReadingHints`.
        progress: called with bytes checked and bytes in all; only our checkpoints have checksums.
    Returns:
        `kind`, `mode`, `step`, `model`, `parameters` (one row each), `optimizer`, `faults` and `complete` for
        `--json`.
    Raises:
        CheckpointError: the path is no checkpoint at all.
    """
    kind = kind_of(path)
    found: dict[str, Any] = {"path": str(path), "kind": kind, "mode": None, "step": None, "model": None}
    looks = {"ms_varlen": _ours, "hugging_face": _hugging_face, "gguf": _gguf}
    try:
        faults = list(looks.get(kind, _mindformers)(path, hints, found, progress))
    except VarlenError as error:
        faults = [str(error)]
    found.setdefault("parameters", [])
    found.setdefault("optimizer", None)
    return {**found, "faults": faults, "complete": not faults}


def _ours(path: Path, _: ReadingHints, found: dict[str, Any], progress: Callable[[int, int], None]) -> Iterable[str]:
    folder = newest_step(path)
    manifest = verified_manifest(folder)
    found |= {
        "path": str(folder),
        "mode": manifest["mode"],
        "step": manifest["step"],
        "model": manifest.get("model_config"),
        "format_version": manifest["format_version"],
        "data_fingerprint": manifest.get("data_fingerprint"),
        "versions": manifest.get("versions"),
        "converted_from": manifest.get("converted_from"),
        "imported_from": manifest.get("imported_from"),
        "parameters": [
            {"name": row["name"], "shape": row["shape"], "dtype": row["dtype"]}
            for row in manifest["parameters"][MODEL_FILE]
        ],
    }
    step = open_step(folder)
    found |= _table(step.model, step.optimizer)
    if step.manifest["mode"] != IMPORTED:
        found["plan"] = {key: step.state["plan"][key] for key in ("epoch", "step", "fingerprint")}
    yield from _checksums(step, progress)


def _checksums(step: StepFolder, progress: Callable[[int, int], None]) -> Iterable[str]:
    done = 0
    for tensor in (*step.model.values(), *step.optimizer.values()):
        try:
            for piece in tensor.pieces():
                done += piece.nbytes
        except CorruptCheckpointError as error:
            yield str(error)
        progress(done, step.nbytes)


def _hugging_face(
    path: Path, _: ReadingHints, found: dict[str, Any], progress: Callable[[int, int], None]
) -> Iterable[str]:
    found |= _table(hugging_face_tensors(path), {})
    found["model"] = load_config(path).model_dump(mode="json")
    found["buffers"] = open_hugging_face(path).buffers
    return ()


def _mindformers(
    path: Path, hints: ReadingHints, found: dict[str, Any], progress: Callable[[int, int], None]
) -> Iterable[str]:
    tensors, where = merged_tensors(path, hints.strategy)
    weights, moments, counters = parts_of(tensors)
    model_class = model_class_of(tensors)
    found |= _table(weights, moments)
    found |= {"path": where, "names": model_class or "hugging_face", "fused": is_fused(tensors)}
    if model_class is not None:
        found["kind"] = "mindformers_legacy" if model_class == "llama" else "mindformers_mcore"
    if GLOBAL_STEP in counters:
        found["step"] = int(counters[GLOBAL_STEP].read().reshape(-1)[0])
    config = hints.config or config_beside(path)
    if model_class is not None and config is not None:
        decoder = weights_of(tensors, path, where, config, hints.qkv, hints.mlp).config
        found["model"] = decoder.model_dump(mode="json")
    if not tensors or (EMBEDDING in tensors and found["kind"] == "mindformers"):
        yield no_names_of_mindformers(tensors, where)


def _gguf(path: Path, _: ReadingHints, found: dict[str, Any], progress: Callable[[int, int], None]) -> Iterable[str]:
    weights, types = open_gguf(path), stored_types(path)
    found |= _table(weights.model, {})
    found["model"] = weights.config.model_dump(mode="json")
    for row in found["parameters"]:  # dequantised they are F32; the file holds them as it says
        row["dtype"], row["bytes"] = types[row["name"]]
    found["bytes"] = sum(row["bytes"] for row in found["parameters"])
    return ()


def _table(model: dict[str, StoredTensor], optimizer: dict[str, StoredTensor]) -> dict[str, Any]:
    def rows(tensors: dict[str, StoredTensor]) -> list[dict[str, Any]]:
        return [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.nbytes} for t in tensors.values()]

    return {
        "parameters": rows(model),
        "parameter_count": sum(math.prod(tensor.shape) for tensor in model.values()),
        "bytes": sum(tensor.nbytes for tensor in (*model.values(), *optimizer.values())),
        "optimizer": {"tensors": len(optimizer), "bytes": sum(t.nbytes for t in optimizer.values())}
        if optimizer
        else None,
    }
