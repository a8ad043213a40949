"""The reader and writer of safetensors files; tensors pass piece by piece, so a file may be larger than the memory.

A `StoredTensor` knows where its values lie and yields them in pieces of at most `PIECE_BYTES`. A tensor derived from
others (a slice of a fused weight, another dtype) is one too; it computes its values when they are read. dtypes have
their safetensors names; NumPy lacks bfloat16, so its bits are held as uint16.
"""

import dataclasses
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

PIECE_BYTES = 32 << 20
"""Largest piece of a tensor in memory, in bytes; what is computed from whole tensors has larger ones."""

NUMPY_TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
"""safetensors dtype -> NumPy type of its bits."""

FLOATS = ("F64", "F32", "F16", "BF16")
WEIGHT_TYPES = ("F32", "BF16", "F16")
"""dtypes of the weights that a model may begin with."""

LONGEST_HEADER = 100_000_000
"""The safetensors library's own limit, in bytes."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose files are missing, cut short or altered: an older one may still be good."""

    default_code = "CKPT-CORRUPT"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor whose values are read on request.

    Attributes:
        name: as in its file.
        dtype: the safetensors name of its dtype.
        shape: sizes of its axes.
        where: the file, for messages.
        pieces: gives its values in C order as flat arrays of `NUMPY_TYPES[dtype]`, one after another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: str
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * np.dtype(NUMPY_TYPES[self.dtype]).itemsize

    def read(self) -> np.ndarray:
        """All values, in the tensor's shape; bfloat16 as uint16."""
        flat = np.empty(math.prod(self.shape), NUMPY_TYPES[self.dtype])
        place = 0
        for piece in self.pieces():
            flat[place : place + piece.size] = piece
            place += piece.size
        if place != flat.size:
            raise CheckpointError(
                f"{self.where}: parameter {self.name} must have {flat.size} values, found {place}; the file changed "
                "while it was read"
            )
        return flat.reshape(self.shape)

    def read_float(self) -> np.ndarray:
        """All values as fp32 (fp64 stays), in the tensor's shape."""
        return self.read() if self.dtype == "F64" else cast(self, "F32").read()

    def sha256(self) -> str:
        """SHA-256 of the values' bytes, as our manifests hold it."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.data)
        return digest.hexdigest()

    def renamed(self, name: str) -> "StoredTensor":
        """The same values under another name."""
        return dataclasses.replace(self, name=name)

    def describe(self) -> str:
        """dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)}"


def from_array(name: str, value: np.ndarray, where: str = "memory") -> StoredTensor:
    """A tensor of values in memory.

    Args:
        value: of a type in `NUMPY_TYPES`; uint16 is taken as such, not as bfloat16.
    """
    flat = np.ascontiguousarray(value).reshape(-1)
    dtype = next(name for name, kind in NUMPY_TYPES.items() if name != "BF16" and np.dtype(kind) == flat.dtype)
    return StoredTensor(name, dtype, value.shape, where, lambda: iter([flat]))


def computed(name: str, like: StoredTensor, shape: tuple[int, ...], values: Callable[[], np.ndarray]) -> StoredTensor:
    """A tensor that is computed from whole ones when it is asked for; dtype and place are those of `like`."""
    return StoredTensor(name, like.dtype, shape, like.where, lambda: iter([np.ascontiguousarray(values()).reshape(-1)]))


def cast(tensor: StoredTensor, dtype: str) -> StoredTensor:
    """The tensor in another floating-point dtype, rounded to nearest even; the same tensor where it is its own."""
    if tensor.dtype == dtype:
        return tensor
    source = tensor.dtype

    def pieces() -> Iterator[np.ndarray]:
        for piece in tensor.pieces():
            wide = _bf16_to_fp32(piece) if source == "BF16" else piece
            # Values beyond fp16 become infinities, as in every other library.
            with np.errstate(over="ignore"):
                yield _fp32_to_bf16(wide.astype(np.float32)) if dtype == "BF16" else wide.astype(NUMPY_TYPES[dtype])

    return dataclasses.replace(tensor, dtype=dtype, pieces=pieces)


def _bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN's bits into an infinity; a quiet NaN keeps its sign and upper bits.
    quiet = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file; only the header is read.

    Raises:
        CheckpointError: no such file, or one that cannot be read.
        CorruptCheckpointError: cut short or altered; names the first parameter that is not there. The tensors must lie
            one after another and fill the file, as the safetensors library has it.
    """
    header, data_start, size = _header(path)
    rows = {name: _row(path, name, row) for name, row in header.items() if name != "__metadata__"}
    end = 0
    for name, (dtype, shape, offsets) in sorted(rows.items(), key=lambda item: item[1][2]):
        nbytes = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
        if offsets != (end, end + nbytes):
            raise CorruptCheckpointError(
                f"{path} is altered: parameter {name}, {dtype} {list(shape)}, must lie in bytes {end} to "
                f"{end + nbytes} of the data, its header says {offsets[0]} to {offsets[1]}; take another copy"
            )
        end += nbytes
        if data_start + end > size:
            raise CorruptCheckpointError(
                f"{path} is cut short: parameter {name} ends at byte {data_start + end}, the file has {size}; "
                "take another copy"
            )
    if data_start + end < size:
        raise CorruptCheckpointError(
            f"{path} is altered: its parameters end at byte {data_start + end}, the file has {size}; take another copy"
        )
    return {
        name: StoredTensor(name, dtype, shape, str(path), _reader(path, dtype, shape, data_start + begin))
        for name, (dtype, shape, (begin, _)) in rows.items()
    }


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """A file's header, where its data starts, and its size, both in bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
                raise CorruptCheckpointError(
                    f"{path} is cut short or no safetensors file: its header is not whole; take another copy"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is missing; copy all files of the checkpoint") from error
    except OSError as error:  # a folder of that name, or no permission
        raise CheckpointError(
            f"{path} must be a file that can be read, got {error.strerror}; bring it again"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path} is altered: its header is no JSON ({error}); take another copy"
        ) from error
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path} is altered: its header must be an object; take another copy")
    return header, 8 + length, size


def _row(path: Path, name: str, row: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and offsets of a tensor, as the header says them."""
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        sane = dtype in NUMPY_TYPES and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise CorruptCheckpointError(
            f"{path}: parameter {name} must have a dtype of {', '.join(NUMPY_TYPES)}, a shape and two offsets, found "
            f"{json.dumps(row)}; take another copy, or save it in one of these"
        )
    return dtype, shape, (begin, end)


def _reader(path: Path, dtype: str, shape: tuple[int, ...], start: int) -> Callable[[], Iterator[np.ndarray]]:
    """Return a function that reads a tensor piece by piece from byte `start` of a file."""
    numpy_type = np.dtype(NUMPY_TYPES[dtype])

    def pieces() -> Iterator[np.ndarray]:
        count, most = math.prod(shape), PIECE_BYTES // numpy_type.itemsize
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            for first in range(0, count, most):
                yield np.fromfile(file, numpy_type, min(most, count - first))

    return pieces


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
        self._tensors: dict[str, StoredTensor] = {}
        for file, names in weight_files(folder).items():
            tensors = read_safetensors(file)
            for name in tensors if names is None else names:
                if name not in tensors:
                    raise CheckpointError(
                        f"{file} must hold parameter {name}, as {INDEX_FILE} says, found no such parameter; "
                        "bring the whole folder again",
                        "CKPT-CORRUPT",
                    )
                tensor = tensors[name]
                if tensor.dtype not in WEIGHT_TYPES:
                    raise CheckpointError(
                        f"{file}: parameter {name} must be one of {', '.join(WEIGHT_TYPES)}, the file holds "
                        f"{tensor.dtype}; save the weights in one of these"
                    )
                self._tensors[name], self.files[name], self.shapes[name] = tensor, file, tensor.shape

    def read(self, name: str) -> np.ndarray:
        """Return a copy of one tensor, fp32 (host)."""
        return self._tensors[name].read_float()

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have one dtype, one shape and equal values."""
        a, b = self._tensors[name], self._tensors[other]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
            np.array_equal(x, y) for x, y in zip(a.pieces(), b.pieces(), strict=True)
        )


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


def running_total(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Turn `progress(bytes written, bytes in all)` into a function that takes the bytes of each piece."""
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return tell


def write_safetensors(
    path: Path, tensors: Iterable[StoredTensor], progress: Callable[[int], None], framework: str = "pt"
) -> dict[str, str]:
    """Write a safetensors file, piece by piece, and force it to the disk.

    Args:
        path: the file, which must not exist.
        tensors: in any order; the file has wide dtypes first, then names in order, as the safetensors library does.
        progress: called with the bytes of each piece that was written.
        framework: whose the file says it is; transformers loads only "pt", MindSpore writes "ms".
    Returns:
        name -> SHA-256 of the values' bytes.
    """
    ordered = sorted(tensors, key=lambda tensor: (-np.dtype(NUMPY_TYPES[tensor.dtype]).itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": framework}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            digest, written = hashlib.sha256(), 0
            for piece in tensor.pieces():
                file.write(piece.data)
                digest.update(piece.data)
                written += piece.nbytes
                progress(piece.nbytes)
            if written != tensor.nbytes:
                raise CheckpointError(
                    f"{tensor.where}: parameter {tensor.name} must have {tensor.nbytes} bytes, found {written}; "
                    "the file changed while it was read"
                )
            sums[tensor.name] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return sums
