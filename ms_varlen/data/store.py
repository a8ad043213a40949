"""The token store: a corpus tokenised, cleaned and cut once, then memory-mapped by every run that needs the same.

A store lies at ``<store_dir>/<fingerprint>/``; the fingerprint hashes the source's whole content, the tokenizer,
`min_tokens`, `overlong`, `seq_length`, `eval_fraction` and the format version, so any other setting is another store
and a store is never changed. It is written beside (``<fingerprint>.building``), brought to disk and renamed: after a
kill there is a whole store or none. One process builds at a time (a lock on ``<fingerprint>.lock``, an empty file that
stays), the others wait and use the result; what killed builds left is removed by the next build.

Building `pydoc` takes about 4 s, nearly all of it parsing; 54 MB of JSON lines (200,000 documents) take 4 s and 3 MB of
memory with the byte tokenizer. Opening takes 1 ms and no memory per sample. (Two cores of a shared machine.)
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.cleaning import Ledger, Rules, clean, held_out
from ms_varlen.data.config import DataConfig, store_root
from ms_varlen.data.sources import Document, Source, open_source
from ms_varlen.data.store_files import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TABLES,
    TOKENS,
    SplitWriter,
    canonical_hash,
    file_hash,
    sync_folder,
    token_dtype,
    write_manifest,
)
from ms_varlen.data.tokenizers import Tokenizer, open_tokenizer
from ms_varlen.errors import DataError

logger = logging.getLogger("ms_varlen")

# Called with the share of the source that is done (0 to 1) and the number of documents read.
Progress = Callable[[float, int], None]

# A batch for the tokenizer ends at whichever comes first; together they bound the memory of a build.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 20


class SampleTable:
    """The samples of one split, numbered from 0 in the order of the source.

    Attributes:
        lengths: [n] int32, memory-mapped, tokens per sample.
        offsets: [n] int64, memory-mapped, where each sample starts among the split's tokens.
        document_ids: [n] int64, memory-mapped, the place of each sample's document in the source, from 0.
        lengths_fingerprint: hash of `lengths`; what a plan is bound to.
        total_tokens: sum of the lengths.
        longest: largest length, 0 when there is no sample.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], tokens_dtype: str):
        self.lengths, self.offsets, self.document_ids = (_mapped(folder / name, kind) for name, kind in TABLES.items())
        self._tokens = _mapped(folder / TOKENS, tokens_dtype)
        self.lengths_fingerprint: str = entry["files"]["lengths.bin"]["checksum"]
        self.total_tokens: int = entry["tokens"]
        self.longest: int = entry["longest"]

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The tokens of several samples, one sample after another.

        Args:
            ids: [k] ints, sample numbers.
        Returns:
            [sum of their lengths] int32 (host).
        Raises:
            DataError: a number that is not a sample of this table.
        """
        ids = np.asarray(ids, np.int64)
        bad = np.flatnonzero((ids < 0) | (ids >= len(self)))
        if bad.size:
            raise DataError(
                f"ids[{bad[0]}] must be a sample from 0 to {len(self) - 1}, got {ids[bad[0]]}; "
                "use a plan that was made for this token store"
            )
        spans = zip(self.offsets[ids].tolist(), self.lengths[ids].tolist(), strict=True)
        parts = [self._tokens[start : start + length] for start, length in spans]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def tokens(self, sample_id: int) -> np.ndarray:
        """[length] int32 (host), the tokens of one sample."""
        return self.gather([sample_id])


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """A file as a read-only array that takes no memory; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


class TokenStore:
    """An opened store.

    Attributes:
        folder: where it lies.
        manifest: everything that was written down about it.
        train: samples to train on.
        eval: held-out samples; none when `eval_fraction` is 0 or the corpus is tiny.
        ledgers: `train` and `eval`, where their documents and tokens went.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.ledgers = {split: Ledger(**manifest["splits"][split]["ledger"]) for split in SPLITS}
        self.train, self.eval = (
            SampleTable(folder / split, manifest["splits"][split], manifest["token_dtype"]) for split in SPLITS
        )

    @classmethod
    def open(cls, folder: str | Path) -> "TokenStore":
        """The store in `folder`, after checking the manifest's checksum and the size of every file.

        Raises:
            DataError: a file is missing, of another size, or the manifest is damaged or of another format.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        for path, entry in _listed_files(folder, manifest):
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                found = "no file" if size is None else f"{size} bytes"
                raise _damaged(path, f"must have {entry['bytes']} bytes", found)
        return cls(folder, manifest)

    def verify(self) -> None:
        """Read every file and compare its checksum; about 2 s per GB.

        Raises:
            DataError: a file differs from what was written.
        """
        for path, entry in _listed_files(self.folder, self.manifest):
            found = file_hash(path)
            if found != entry["checksum"]:
                raise _damaged(path, f"must have checksum {entry['checksum']}", found)

    @property
    def fingerprint(self) -> str:
        """The name of the store: a hash of all that decided its content."""
        return self.manifest["fingerprint"]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def eos_id(self) -> int | None:
        """The end-of-text id, None when the tokenizer has none."""
        return self.manifest["tokenizer"]["eos_id"]

    @property
    def pad_id(self) -> int:
        """The id for padded places; it may equal any other."""
        return self.manifest["tokenizer"]["pad_id"]

    @property
    def seq_length(self) -> int:
        """The longest sample that cleaning let pass, in tokens."""
        return self.manifest["seq_length"]


def _damaged(path: Path, rule: str, found: str) -> DataError:
    return DataError(
        f"token store file {path} {rule}, got {found}; delete the folder of the store and run again, it is built anew"
    )


def _listed_files(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for split in SPLITS:
        for name, entry in manifest["splits"][split]["files"].items():
            yield folder / split / name, entry


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise _damaged(path, "must be there", "no file")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, "must be JSON", str(error)) from error
    checksum = manifest.pop("checksum", None) if isinstance(manifest, dict) else None
    if checksum is None or checksum != canonical_hash(manifest):
        raise _damaged(path, "must have the checksum that it states", "another content")
    if manifest["format_version"] != FORMAT_VERSION:
        raise _damaged(path, f"must have format_version {FORMAT_VERSION}", str(manifest["format_version"]))
    return manifest


def prepare_store(config: DataConfig, seq_length: int, progress: Progress | None = None) -> TokenStore:
    """The token store of a recipe: opened when it is there, built first when it is not.

    Args:
        config: the `data` section.
        seq_length: the longest sample allowed, in tokens.
        progress: called about once per thousand documents while building.
    Raises:
        DataError: the source, the tokenizer, a document or the store cannot be used.
    """
    rules = Rules(config.min_tokens, config.overlong, seq_length)
    source, tokenizer = open_source(config.source), open_tokenizer(config.tokenizer)
    identity = {
        "format_version": FORMAT_VERSION,
        "source": source.fingerprint(),
        "tokenizer": tokenizer.fingerprint,
        "min_tokens": rules.min_tokens,
        "overlong": rules.overlong,
        "seq_length": seq_length,
        "eval_fraction": config.eval_fraction,
    }
    folder = store_root(config) / canonical_hash(identity)
    if folder.exists():
        store = TokenStore.open(folder)
        store.verify()  # as long as the fingerprint of the source takes; a changed token would train unnoticed
        return store
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, wait=True):
            if not folder.exists():
                _remove_leftovers(folder)
                _build(folder, identity, source, tokenizer, rules, progress)
    except OSError as error:
        raise DataError(
            f"data.store_dir must be writable and have room, got {error}, in {folder.parent}; "
            "free space or set data.store_dir"
        ) from error
    return TokenStore.open(folder)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a store's fingerprint; False when another process has it and `wait` is False.

    The system frees the lock when its process ends, however that happens. The file stays: removing it would let two
    processes lock two files of the same name.
    """
    with folder.with_suffix(".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            logger.info("another process builds token store %s; waiting for it", folder.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed builds left: of this store (its lock is held here) and of others that nobody holds."""
    for leftover in folder.parent.glob("*.building"):
        if leftover.stem == folder.name:
            shutil.rmtree(leftover)
            continue
        with _locked(leftover.with_suffix(""), wait=False) as free:
            if free:
                shutil.rmtree(leftover, ignore_errors=True)


def _build(
    folder: Path,
    identity: dict[str, Any],
    source: Source,
    tokenizer: Tokenizer,
    rules: Rules,
    progress: Progress | None,
) -> None:
    """Write the store beside and rename it to `folder`; the caller holds its lock."""
    building = folder.with_suffix(".building")
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        building.mkdir()
        splits = {split: SplitWriter(building / split, dtype) for split in SPLITS}
        _fill(splits, source, tokenizer, rules, identity["eval_fraction"], progress)
        if source.fingerprint() != identity["source"]:
            raise DataError(
                f"data.source must not change while it is read, got another content of {source.name}; run again"
            )
        if not splits["train"].ledger.samples_kept:
            total = splits["train"].ledger + splits["eval"].ledger
            raise DataError(
                f"data.source must leave a sample to train on, got none of {total.documents_in} documents "
                f"({total.documents_dropped} removed, {splits['eval'].ledger.documents_kept} held out), "
                f"in {source.name}; add text or lower data.min_tokens or data.eval_fraction"
            )
        entries = {split: writer.close() for split, writer in splits.items()}
        described = {
            name: getattr(tokenizer, name) for name in ("name", "vocab_size", "eos_id", "pad_id", "fingerprint")
        }
        manifest = {
            **identity,
            "fingerprint": folder.name,
            "token_dtype": dtype,
            "tokenizer": described,
            "source": {"name": source.name, "fingerprint": identity["source"], "skipped": dict(source.skipped)},
            "splits": entries,
        }
        write_manifest(building, manifest)
        os.rename(building, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fill(
    splits: dict[str, SplitWriter],
    source: Source,
    tokenizer: Tokenizer,
    rules: Rules,
    eval_fraction: float,
    progress: Progress | None,
) -> None:
    """Read, tokenise, clean and write every document, a batch at a time."""
    document_id = 0
    for batch in _batches(source):
        for document, ids in zip(batch, tokenizer.encode_documents([d.text for d in batch]), strict=True):
            writer = splits["eval" if held_out(document.text, eval_fraction) else "train"]
            writer.add(document_id, ids, clean(document.text, len(ids), rules, writer.ledger, document.where))
            document_id += 1
        for writer in splits.values():
            writer.flush()
        if progress:
            progress(batch[-1].done, document_id)


def _batches(source: Source) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in source:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
