"""A decoder as a Hugging Face folder: safetensors in shards, `config.json`, and the tokenizer's files carried along."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tools.imports import carried_files
from ckpt_tools.new_folder import new_folder
from ckpt_tools.weights import Weights
from ms_varlen.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, StoredTensor, cast, running_total, write_safetensors
from ms_varlen.errors import CheckpointError
from ms_varlen.models.hugging_face import CONFIG_FILE, hugging_face_config

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as 5GB, 200MB or 50KB.

    Raises:
        CheckpointError: it is none.
    """
    match = re.fullmatch(r"([1-9]\d*)(KB|MB|GB)", text.strip().upper())
    if match is None:
        raise CheckpointError(f"--max-shard-size must be a number and KB, MB or GB, got {text}; write 5GB")
    return int(match[1]) * _UNITS[match[2]]


def export_hugging_face(
    weights: Weights,
    destination: Path,
    dtype: str,
    max_shard_size: int,
    tokenizer: Path | None,
    max_position_embeddings: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write a folder that transformers loads.

    Args:
        weights: what to write.
        destination: the folder to make.
        dtype: of the files: a safetensors name.
        max_shard_size: most bytes of a file; a larger tensor has one of its own.
        tokenizer: a folder with the tokenizer's files, or its `tokenizer.json`; by default what the weights carry.
        max_position_embeddings: for `config.json`, where the model brought no limit of its own.
        progress: called with bytes written and bytes in all.
    Returns:
        what was written, for people and `--json`.
    """
    tensors = {name: cast(tensor, dtype) for name, tensor in weights.model.items()}
    shards = _shards(tensors, max_shard_size)
    total = sum(tensor.nbytes for tensor in tensors.values())
    tell = running_total(progress, total)
    carried = _files_to_carry(tokenizer or weights.carried)
    with new_folder(destination, weights.tree or weights.path, total) as folder:
        for file in carried:
            shutil.copyfile(file, folder / file.name)
        # What the model came with stays where we have nothing to say about it: its special tokens, for example.
        before = json.loads((folder / CONFIG_FILE).read_bytes()) if (folder / CONFIG_FILE).exists() else {}
        for name in ("dtype", "rope_parameters"):
            before.pop(name, None)
        config = hugging_face_config(weights.config, max_position_embeddings)
        values = {**before, **config, "torch_dtype": TORCH_NAMES[dtype]}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for shard, names in shards.items():
            write_safetensors(folder / shard, [tensors[name] for name in names], tell)
        if len(shards) > 1:
            places = {name: shard for shard, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return {
        "source": str(weights.path),
        "destination": str(destination),
        "architecture": weights.config.architecture,
        "dtype": TORCH_NAMES[dtype],
        "files": len(shards),
        "parameters": len(tensors),
        "tied": weights.config.tie_word_embeddings,
        "carried": [file.name for file in carried],
        "bytes": total,
    }


def _shards(tensors: dict[str, StoredTensor], most: int) -> dict[str, list[str]]:
    """File -> names of its tensors, in the model's order."""
    groups: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= tensor.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _files_to_carry(place: Path | None) -> list[Path]:
    if place is None:
        return []
    if place.is_dir():
        return carried_files(place)
    if not place.exists():
        raise CheckpointError(f"--tokenizer must be a folder or a file, found none at {place}; correct the path")
    return [place]
