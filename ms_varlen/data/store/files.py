"""The files of a token store: their layout, checksums, and how they are written in constant memory.

    <fingerprint>/manifest.json               what it is, checksums, counts, ledgers
    <fingerprint>/train/tokens.bin            uint16 or uint32, the samples' tokens one after another
    <fingerprint>/train/lengths.bin           [n] int32, tokens per sample
    <fingerprint>/train/offsets.bin           [n] int64, where each sample starts in tokens.bin
    <fingerprint>/train/documents.bin         [n] int64, which document of the source each sample comes from
    <fingerprint>/train/document_lengths.bin  [d] int32, tokens per document before it was cut
    <fingerprint>/train/supervised.bin        a bit per token, 1 = a target; only where some token is none
    <fingerprint>/eval/...                    the same

All numbers are little-endian, bits count from the lowest. A sample costs 20 bytes besides its tokens and a document 4,
all of them memory-mapped when read.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.tokens.cleaning import Piece
from ms_varlen.files import fsync

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
SPLITS = ("train", "eval")
TABLES = {"lengths.bin": "<i4", "offsets.bin": "<i8", "documents.bin": "<i8"}
DOCUMENT_LENGTHS = "document_lengths.bin"
SUPERVISED = "supervised.bin"
TOKENS = "tokens.bin"


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def canonical_hash(value: Mapping[str, Any]) -> str:
    """A hash of a JSON mapping that does not depend on the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


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


class MaskWriter:
    """Which tokens are targets, a bit each; the file is begun when the first token comes that is none."""

    def __init__(self, path: Path):
        self._path = path
        self._file: TableWriter | None = None
        self._rest = np.zeros(0, bool)  # the tokens after the last whole byte
        self._tokens = 0

    def write(self, tokens: int, supervised: np.ndarray | None) -> None:
        """Append [tokens] bool, or as many targets where it is None."""
        self._tokens += tokens
        if self._file is None:
            if supervised is None or supervised.all():
                return
            self._begin(self._tokens - tokens)
        self._append(np.ones(tokens, bool) if supervised is None else supervised)

    def _begin(self, targets: int) -> None:
        self._file = TableWriter(self._path, "u1")
        whole, rest = divmod(targets, 8)
        for start in range(0, whole, 1 << 20):
            self._file.write(np.full(min(whole - start, 1 << 20), 255, np.uint8))
        self._rest = np.ones(rest, bool)

    def _append(self, supervised: np.ndarray) -> None:
        assert self._file is not None
        bits = np.concatenate([self._rest, supervised])
        whole = bits.size // 8 * 8
        self._file.write(np.packbits(bits[:whole], bitorder="little"))
        self._rest = bits[whole:]

    def close(self) -> dict[str, Any] | None:
        """Bring the file to disk; its size and checksum, None where every token is a target and there is no file."""
        if self._file is None:
            return None
        self._file.write(np.packbits(self._rest, bitorder="little"))
        return self._file.close()


class SplitWriter:
    """The files of one split. Holds at most what was added since the last `flush`."""

    def __init__(self, folder: Path, dtype: str):
        folder.mkdir()
        self._folder = folder
        kinds = {**TABLES, DOCUMENT_LENGTHS: "<i4", TOKENS: dtype}
        self._files = {name: TableWriter(folder / name, kind) for name, kind in kinds.items()}
        self._mask = MaskWriter(folder / SUPERVISED)
        self._pieces: list[Piece] = []
        self._documents: list[int] = []
        self._document_lengths: list[int] = []
        self._samples = 0
        self._written = 0
        self._targets = 0
        self._longest = 0

    def add(self, document_id: int, document_length: int | None, pieces: list[Piece]) -> None:
        """The samples of one document.

        Args:
            document_length: its tokens before it was cut; None where it was removed for something else than its length.
            pieces: ids and which of them are targets, for each sample.
        """
        if document_length is not None:
            self._document_lengths.append(document_length)
        self._pieces += pieces
        self._documents += [document_id] * len(pieces)

    def flush(self) -> None:
        """Write what was added."""
        self._files[DOCUMENT_LENGTHS].write(np.array(self._document_lengths, np.int64))
        self._document_lengths = []
        if not self._pieces:
            return
        lengths = np.array([ids.size for ids, _ in self._pieces], np.int64)
        starts = np.cumsum(lengths) - lengths
        self._files["lengths.bin"].write(lengths)
        self._files["offsets.bin"].write(self._written + starts)
        self._files["documents.bin"].write(np.array(self._documents, np.int64))
        self._files[TOKENS].write(np.concatenate([ids for ids, _ in self._pieces]))
        supervised = _joined([mask for _, mask in self._pieces], lengths)
        self._mask.write(int(lengths.sum()), supervised)
        self._samples += lengths.size
        self._written += int(lengths.sum())
        # The first token of a sample is never a target: nothing comes before it.
        self._targets += int((lengths - 1).sum() if supervised is None else supervised.sum() - supervised[starts].sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._pieces, self._documents = [], []

    def close(self) -> dict[str, Any]:
        """Bring the split to disk; its entry of the manifest, but for the ledger."""
        self.flush()
        files = {name: writer.close() for name, writer in self._files.items()}
        mask = self._mask.close()
        if mask is not None:
            files[SUPERVISED] = mask
        fsync(self._folder)
        return {
            "samples": self._samples,
            "tokens": self._written,
            "targets": self._targets,
            "longest": self._longest,
            "files": files,
        }


def _joined(masks: list[np.ndarray | None], lengths: np.ndarray) -> np.ndarray | None:
    """Masks one after another; None where all of them are."""
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [np.ones(length, bool) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)]
    )


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """The last file of a store, sealed with a checksum of its own entries."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**entries, "checksum": canonical_hash(entries)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync(folder)
