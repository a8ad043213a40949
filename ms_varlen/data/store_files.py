"""The files of a token store: their layout, checksums, and how they are written in constant memory.

    <fingerprint>/manifest.json           what it is, checksums, counts, ledgers
    <fingerprint>/train/tokens.bin        uint16 or uint32, the samples' tokens one after another
    <fingerprint>/train/lengths.bin       [n] int32, tokens per sample
    <fingerprint>/train/offsets.bin       [n] int64, where each sample starts in tokens.bin
    <fingerprint>/train/documents.bin     [n] int64, which document of the source each sample comes from
    <fingerprint>/eval/...                the same four

All numbers are little-endian. A sample costs 20 bytes beside its tokens, all of them memory-mapped when read.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.cleaning import Ledger

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "eval")
TABLES = {"lengths.bin": "<i4", "offsets.bin": "<i8", "documents.bin": "<i8"}
TOKENS = "tokens.bin"


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def canonical_hash(value: Mapping[str, Any]) -> str:
    """A hash of a JSON mapping that does not depend on the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_hash(path: Path) -> str:
    """The checksum that the manifest holds for a file; reads about 1 GB/s."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (new files, a rename) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TableWriter:
    """One binary file with its size and checksum, written front to back."""

    def __init__(self, path: Path, dtype: str):
        self.dtype = dtype
        self.bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._file = path.open("wb")

    def write(self, array: np.ndarray) -> None:
        """Append `array` [n], converted to the file's dtype."""
        data = array.astype(self.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)

    def close(self) -> dict[str, Any]:
        """Bring the file to disk; its size in bytes and its checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "checksum": self._digest.hexdigest()}


class SplitWriter:
    """The four files of one split. Holds at most what was added since the last `flush`."""

    def __init__(self, folder: Path, dtype: str):
        folder.mkdir()
        self._folder = folder
        self._files = {name: TableWriter(folder / name, kind) for name, kind in {**TABLES, TOKENS: dtype}.items()}
        self._tokens: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._documents: list[int] = []
        self._written = 0
        self._longest = 0
        self.ledger = Ledger()

    def add(self, document_id: int, ids: np.ndarray, lengths: list[int]) -> None:
        """Samples of the given `lengths` from the beginning of a document's `ids` on."""
        self._tokens.append(ids[: sum(lengths)])
        self._lengths += lengths
        self._documents += [document_id] * len(lengths)

    def flush(self) -> None:
        """Write what was added."""
        if not self._lengths:
            return
        lengths = np.array(self._lengths, np.int64)
        self._files["lengths.bin"].write(lengths)
        self._files["offsets.bin"].write(self._written + np.cumsum(lengths) - lengths)
        self._files["documents.bin"].write(np.array(self._documents, np.int64))
        self._files[TOKENS].write(np.concatenate(self._tokens))
        self._written += int(lengths.sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._tokens, self._lengths, self._documents = [], [], []

    def close(self) -> dict[str, Any]:
        """Bring the split to disk; its entry of the manifest."""
        self.flush()
        files = {name: writer.close() for name, writer in self._files.items()}
        sync_folder(self._folder)
        return {
            "samples": self.ledger.samples_kept,
            "tokens": self._written,
            "longest": self._longest,
            "ledger": dict(vars(self.ledger)),
            "files": files,
        }


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """The last file of a store, sealed with a checksum of its own entries."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**entries, "checksum": canonical_hash(entries)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
