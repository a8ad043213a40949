"""Weights in a folder of safetensors files, read one at a time as fp32. Imports no MindSpore.

The files are mapped, so reading needs no more memory than the tensor that is read. bfloat16, which NumPy does not have,
is widened by its bits: it is the upper half of a float32.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ms_varlen.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Of float32, bfloat16 as its bits, and float16.
_DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}


class TensorFolder:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Args:
        folder: where the files are.
    Attributes:
        shapes: name -> shape of each tensor.
        files: name -> the file that holds it.
    Raises:
        CheckpointError: no such files, or one is missing, cut short, altered or of another dtype.
    """

    def __init__(self, folder: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, Path] = {}
        self._views: dict[str, np.ndarray] = {}
        for file, names in weight_files(folder).items():
            views = _views(file)
            for name in views if names is None else names:
                if name not in views:
                    raise CheckpointError(
                        f"{file} must hold parameter {name}, as {INDEX_FILE} says, found no such parameter; "
                        "bring the whole folder again",
                        "CKPT-CORRUPT",
                    )
                self._views[name], self.files[name] = views[name], file
                self.shapes[name] = views[name].shape

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, fp32 (host)."""
        view = self._views[name]
        if view.dtype == np.dtype("<u2"):
            return (view.astype("<u4") << 16).view("<f4")
        return np.array(view, np.float32)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal bit by bit."""
        return np.array_equal(self._views[name], self._views[other])


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Each safetensors file of a model's folder and the names it must hold; None for all that it holds.

    Raises:
        CheckpointError: no such files, or an index that is not understood.
    """
    if (folder / INDEX_FILE).is_file():
        try:
            entries = json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{folder / INDEX_FILE} must hold a JSON object with a weight_map, got {error!r}; bring it again",
                "CKPT-CORRUPT",
            ) from error
        names: dict[Path, list[str] | None] = {}
        for name, file in entries:
            if not isinstance(file, str):
                raise CheckpointError(
                    f"{folder / INDEX_FILE} must name a file for parameter {name}, got {json.dumps(file)}; "
                    "bring it again",
                    "CKPT-CORRUPT",
                )
            held = names.setdefault(folder / file, [])
            assert held is not None
            held.append(name)
        return names
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) if folder.is_dir() else "no folder"
    raise CheckpointError(
        f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}, found {found or 'nothing'}; name the folder that holds the "
        "weights, saved as safetensors"
    )


def _views(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, mapped."""
    try:
        with safe_open(file, "np"):  # checks the header against the file, offsets and length
            pass
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing, as {INDEX_FILE} names it; bring the whole folder again", "CKPT-CORRUPT"
        ) from error
    except OSError as error:  # a folder of that name, or no permission to read it
        raise CheckpointError(f"{file} must be a file that can be read, got {error}; bring it again") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is cut short or altered: {error}; bring it again", "CKPT-CORRUPT") from error
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(file, np.uint8, mode="r", offset=8 + size) if header else np.zeros(0, np.uint8)
    views = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{file}: parameter {name} must be one of {', '.join(_DTYPES)}, the file holds {entry['dtype']}; "
                "save the weights in one of these"
            )
        begin, end = entry["data_offsets"]
        views[name] = np.asarray(data[begin:end]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return views
