"""The tensors of a MindFormers or MindSpore checkpoint, wherever its files are, cut over ranks or not.

Tensors that were cut with a strategy file are merged by MindSpore's own functions, into a temporary folder (below
$TMPDIR) that goes when the process ends. The new layout's `metadata.json` says where each chunk lies; those are put
together here, one tensor at a time. A `.ckpt` file is loaded whole, which is all that MindSpore offers.
"""

import atexit
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ms_varlen.checkpoint.tensors import NUMPY_TYPES, StoredTensor, computed, from_array, read_safetensors
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
        return _iteration(path / _newest_iteration(path / TRACKER)), str(path)
    if path.resolve().name.startswith("iteration_"):  # also through a link, or as "."
        return _iteration(path), str(path)
    ranks = {rank: _newest_file(folder) for rank, folder in sorted(_rank_folders(path).items())}
    if not ranks:
        file = _newest_file(path)
        return read_file(file), str(file)
    files = list(ranks.values())
    if len(files) == 1:
        return read_file(files[0]), str(files[0])
    _check_steps(files)
    if strategy is None:
        return _equal_ranks(files), str(path)
    if list(ranks) != list(range(len(ranks))):
        missing = min(set(range(max(ranks))) - set(ranks))
        raise CheckpointError(f"{path} must hold the folders of all ranks, found no rank_{missing}; bring them along")
    return _merged_by_mindspore(files, strategy), str(path)


def _rank_folders(path: Path) -> dict[int, Path]:
    found = [(_RANK.fullmatch(child.name), child) for child in path.iterdir()] if path.is_dir() else []
    return {int(match[1]): child for match, child in found if match and child.is_dir()}


def _newest_iteration(tracker: Path) -> str:
    content = tracker.read_bytes().strip()
    if not content.isdigit():
        raise CheckpointError(
            f"{tracker} must hold the number of an iteration, found {content[:40]!r}; name the iteration's folder"
        )
    return f"iteration_{int(content):08d}"


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

    return max(sorted(files), key=_place)


def _place(file: Path) -> tuple[int, int]:
    """Epoch and step that a file's name says."""
    match = _STEP.search(file.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _check_steps(files: list[Path]) -> None:
    """The newest files of all ranks must be of one step: a kill while they were saved leaves some older."""
    older, newer = min(files, key=_place), max(files, key=_place)
    if _place(older) != _place(newer):
        raise CheckpointError(
            f"{older} and {newer} must be of one step to belong together; remove the newer ones, which not all ranks "
            "have, from a copy of the folder, or name one file"
        )


def read_file(path: Path) -> Tensors:
    """The tensors of a `.safetensors` file, unread, or of a MindSpore `.ckpt`, which is loaded whole.

    Raises:
        CheckpointError: it is damaged, or neither.
    """
    if path.suffix != ".ckpt":
        return read_safetensors(path)
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
        return _chunked(folder, _chunk_table(metadata))
    found: Tensors = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in found:
                raise CheckpointError(
                    f"{file}: parameter {name} is in {found[name].where} too, and no {METADATA} says how they belong "
                    "together; bring that file along"
                )
            found[name] = tensor
    return found


def _chunk_table(metadata: Path) -> dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], str]]]]:
    """Parameter -> its whole shape, and the offset and file of each chunk, as a `metadata.json` says."""
    table = {}
    try:
        values = json.loads(metadata.read_bytes())
        for name, entry in values["state_dict_metadata"].items():
            offsets = [tuple(map(int, chunk["global_offset"])) for chunk in entry["chunk"]]
            chunks = [(offset, str(values["storage_data"][str((name, offset))][0]["file_name"])) for offset in offsets]
            if not chunks:
                raise KeyError(f"a chunk of {name}")
            table[name] = (tuple(map(int, entry["global_shape"])), chunks)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{metadata} must say where each parameter's chunks lie, as MindFormers 1.9 writes it, found {error!r}; "
            "take another copy"
        ) from error
    return table


def _chunked(folder: Path, table: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], str]]]]) -> Tensors:
    files: dict[str, Tensors] = {}
    found = {}
    for name, (shape, places) in table.items():
        chunks = []
        for offset, file in places:
            if file not in files:
                files[file] = read_safetensors(folder / file)
            if name not in files[file]:
                raise CheckpointError(f"{folder / file}: parameter {name} is missing, {METADATA} has it there")
            chunks.append((offset, files[file][name]))
        found[name] = _joined(name, shape, chunks)
    return found


def _joined(name: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], StoredTensor]]) -> StoredTensor:
    first = chunks[0][1]
    if len(chunks) == 1 and first.shape == shape:
        return first
    covered = sum(math.prod(tensor.shape) for _, tensor in chunks)
    inside = all(
        len(offset) == len(tensor.shape) == len(shape)
        and all(begin >= 0 and begin + n <= most for begin, n, most in zip(offset, tensor.shape, shape, strict=True))
        for offset, tensor in chunks
    )
    if covered != math.prod(shape) or not inside:
        raise CheckpointError(
            f"{first.where}: parameter {name} must have shape {list(shape)} as {METADATA} says, its {len(chunks)} "
            f"chunks have {covered} values{'' if inside else ', some beyond it'}; bring all ranks' files along"
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
