"""The tensors of a MindFormers or MindSpore checkpoint, wherever its files are, cut over ranks or not.

Tensors that were cut with a strategy file are merged by MindSpore's own functions, into a temporary folder (below
$TMPDIR) that goes when the process ends. The new layout's `metadata.json` says where each chunk lies; those are put
together here, one tensor at a time. A `.ckpt` file is loaded whole, which is all that MindSpore offers.
"""

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.tensors import NUMPY_TYPES, StoredTensor, computed, from_array, read_safetensors
from ms_varlen.errors import CheckpointError

Tensors = dict[str, StoredTensor]

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"

_RANK = re.compile(r"rank_(\d+)")
_STEP = re.compile(r"-(\d+)_(\d+)\.(?:safetensors|ckpt)$")


def merged_tensors(path: Path, strategy: Path | None) -> tuple[Tensors, str]:
    """All tensors of a checkpoint, whole, and the place that they were found in.

    Args:
        path: a file, a rank's folder, a folder of ranks, an iteration's folder, a folder with one, or what MindFormers
            calls `output_dir`.
        strategy: the strategy file of the training that cut them, or the folder with one for each stage; by default
            those in `output_dir`.
    Raises:
        CheckpointError: no checkpoint there, ranks that differ without a strategy, or what MindSpore cannot merge.
    """
    if path.is_file():
        return read_file(path), str(path)
    if (path / "checkpoint").is_dir():
        strategy = strategy or (path / "strategy" if any(path.glob("strategy/*")) else None)
        path = path / "checkpoint"
    if (path / TRACKER).exists():
        iteration = (path / TRACKER).read_text(encoding="utf-8").strip()
        return _iteration(path / f"iteration_{int(iteration):08d}"), str(path)
    if path.resolve().name.startswith("iteration_"):  # also through a link, or as "."
        return _iteration(path), str(path)
    ranks = sorted(_rank_folders(path).items())
    if not ranks:
        file = _newest_file(path)
        return read_file(file), str(file)
    files = [_newest_file(folder) for _, folder in ranks]
    if len(files) == 1:
        return read_file(files[0]), str(files[0])
    if strategy is None:
        return _equal_ranks(files), str(path)
    return _merged_by_mindspore(files, strategy), str(path)


def _rank_folders(path: Path) -> dict[int, Path]:
    found = [(_RANK.fullmatch(child.name), child) for child in path.iterdir()] if path.is_dir() else []
    return {int(match[1]): child for match, child in found if match and child.is_dir()}


def _newest_file(folder: Path) -> Path:
    """The file that `meta.json` names, or the one with the highest epoch and step in its name."""
    meta = folder / "meta.json"
    if meta.exists():
        try:
            return folder / json.loads(meta.read_bytes())["last_ckpt_file"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{meta} must name last_ckpt_file ({error!r}); name the file itself") from error
    files = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".ckpt") and "strategy" not in p.name]
    if not files:
        raise CheckpointError(f"{folder} must hold a checkpoint of MindFormers, found no .safetensors or .ckpt file")

    def place(file: Path) -> tuple[int, ...]:
        match = _STEP.search(file.name)
        return (int(match[1]), int(match[2])) if match else (-1, -1)

    return max(sorted(files), key=place)


def read_file(path: Path) -> Tensors:
    """The tensors of a `.safetensors` file, unread, or of a MindSpore `.ckpt`, which is loaded whole.

    Raises:
        CheckpointError: it is damaged, or neither.
    """
    if path.suffix != ".ckpt":
        return read_safetensors(path)[0]
    import mindspore as ms

    try:
        parameters = ms.load_checkpoint(str(path))
    except (ValueError, OSError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole MindSpore checkpoint: {str(error).splitlines()[0]}") from error
    found = {}
    for name, parameter in parameters.items():
        value = parameter.value()
        value = value.astype(ms.float32) if value.dtype == ms.bfloat16 else value
        found[name] = from_array(name, value.asnumpy(), str(path))
    return found


def _equal_ranks(files: list[Path]) -> Tensors:
    """The first rank's tensors, when all ranks hold the same: data parallel training."""
    first = read_file(files[0])
    for file in files[1:]:
        other = read_file(file)
        for name, tensor in first.items():
            if name not in other or tensor.shape != other[name].shape or tensor.sha256() != other[name].sha256():
                raise CheckpointError(
                    f"{file}: parameter {name} is not that of {files[0]}, so tensors were cut over ranks; give the "
                    "training's strategy file (output/strategy/ckpt_strategy_rank_0.ckpt) with --strategy"
                )
    return first


def _merged_by_mindspore(files: list[Path], strategy: Path) -> Tensors:
    import mindspore as ms

    work = Path(tempfile.mkdtemp(prefix="ckpt-tools-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    for rank, file in enumerate(files):
        (work / "ranks" / f"rank_{rank}").mkdir(parents=True)
        (work / "ranks" / f"rank_{rank}" / f"part{file.suffix}").symlink_to(file.resolve())
    try:
        if strategy.is_dir():
            ms.merge_pipeline_strategys(str(strategy), str(work / "strategy.ckpt"))
            strategy = work / "strategy.ckpt"
        if files[0].suffix == ".safetensors":
            ms.parallel.unified_safetensors(str(work / "ranks"), str(strategy), str(work / "whole"))
        else:
            (work / "whole").mkdir()
            ms.transform_checkpoints(str(work / "ranks"), str(work / "whole"), "part", str(strategy), None)
    except (ValueError, RuntimeError, TypeError, KeyError, OSError, NotADirectoryError) as error:
        raise CheckpointError(
            f"MindSpore could not merge {len(files)} ranks with {strategy}: {str(error).splitlines()[0]}; give the "
            "strategy of the training that wrote them"
        ) from error
    whole = sorted(p for p in (work / "whole").rglob("*") if p.suffix in (".safetensors", ".ckpt"))
    return {name: tensor for file in whole for name, tensor in read_file(file).items()}


def _iteration(folder: Path) -> Tensors:
    """The tensors of a folder of the new layout."""
    metadata = folder / METADATA
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} must hold .safetensors files, found none; name another iteration's folder")
    if metadata.exists():
        return _chunked(folder, json.loads(metadata.read_bytes()))
    found: Tensors = {}
    for file in files:
        for name, tensor in read_safetensors(file)[0].items():
            if name in found:
                raise CheckpointError(
                    f"{file}: parameter {name} is in {found[name].where} too, and no {METADATA} says how they belong "
                    "together; bring that file along"
                )
            found[name] = tensor
    return found


def _chunked(folder: Path, metadata: dict[str, Any]) -> Tensors:
    files: dict[str, Tensors] = {}
    found = {}
    for name, entry in metadata["state_dict_metadata"].items():
        shape, chunks = tuple(entry["global_shape"]), []
        for chunk in entry["chunk"]:
            offset = tuple(chunk["global_offset"])
            file = metadata["storage_data"][str((name, offset))][0]["file_name"]
            if file not in files:
                files[file] = read_safetensors(folder / file)[0]
            if name not in files[file]:
                raise CheckpointError(f"{folder / file}: parameter {name} is missing, {METADATA} has it there")
            chunks.append((offset, files[file][name]))
        found[name] = chunks[0][1] if len(chunks) == 1 else _joined(name, shape, chunks)
    return found


def _joined(name: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], StoredTensor]]) -> StoredTensor:
    first = chunks[0][1]
    covered = sum(int(np.prod(tensor.shape)) for _, tensor in chunks)
    if covered != int(np.prod(shape)):
        raise CheckpointError(
            f"{first.where}: parameter {name} must have {int(np.prod(shape))} values, its {len(chunks)} chunks have "
            f"{covered}; bring all ranks' files along"
        )

    def values() -> np.ndarray:
        whole = np.empty(shape, NUMPY_TYPES[first.dtype])
        for offset, tensor in chunks:
            whole[tuple(_slices(offset, tensor.shape))] = tensor.read()
        return whole

    return computed(name, first, shape, values)


def _slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[slice]:
    for first, size in zip(offset, shape, strict=True):
        yield slice(first, first + size)
