"""The token store: a corpus tokenised, cleaned and cut once, then memory-mapped by every run that needs the same.

A store lies at ``<store_dir>/<fingerprint>/``; the fingerprint hashes the source's whole content, the tokenizer, the
settings that decide samples, `seq_length` and the format version, so any other setting is another store and a store is
never changed. What files hold is remembered in ``<store_dir>/file_memory.json`` while their sizes and times stay as
they were: a source or a store of 1 GB costs seconds once, milliseconds from then on. How a store is written, and what a
kill leaves, is explained in `ms_varlen.data.store.build`. Opening takes 1 ms and no memory per sample.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.config import DataConfig, store_root
from ms_varlen.data.sources.file_memory import FileMemory, file_hash, state_of
from ms_varlen.data.sources.source import Source, open_source, source_fingerprint
from ms_varlen.data.store.build import Building, Progress, build, remove_leftovers, store_lock
from ms_varlen.data.store.files import (
    DOCUMENT_LENGTHS,
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    SUPERVISED,
    TABLES,
    TOKENS,
    canonical_hash,
)
from ms_varlen.data.tokens.cleaning import Ledger, Rules
from ms_varlen.data.tokens.tokenizers import tokenizer_fingerprint
from ms_varlen.errors import DataError
from ms_varlen.key_roles import Decides, key_role

MEMORY = "file_memory.json"


class SampleTable:
    """The samples of one split, numbered from 0 in the order of the source.

    Attributes:
        lengths: [n] int32, memory-mapped, tokens per sample.
        offsets: [n] int64, memory-mapped, where each sample starts among the split's tokens.
        document_ids: [n] int64, memory-mapped, the place of each sample's document in the source, from 0.
        document_lengths: [d] int32, memory-mapped, tokens per document before it was cut, in the order of the source;
            of those that were kept or removed for being overlong.
        lengths_fingerprint: hash of `lengths`; what a plan is bound to.
        total_tokens: sum of the lengths.
        total_targets: tokens that have a loss: supervised ones, but never the first of a sample.
        longest: largest length, 0 when there is no sample.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], tokens_dtype: str):
        self.lengths, self.offsets, self.document_ids = (_mapped(folder / name, kind) for name, kind in TABLES.items())
        self.document_lengths = _mapped(folder / DOCUMENT_LENGTHS, "<i4")
        self._tokens = _mapped(folder / TOKENS, tokens_dtype)
        self._supervised = _mapped(folder / SUPERVISED, "u1") if SUPERVISED in entry["files"] else None
        self.lengths_fingerprint: str = entry["files"]["lengths.bin"]["checksum"]
        self.total_tokens: int = entry["tokens"]
        self.total_targets: int = entry["targets"]
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
        parts = [self._tokens[start:end] for start, end in self._spans(ids)]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def gather_supervised(self, ids: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Which tokens of several samples are to be learnt, one sample after another.

        Args:
            ids: [k] ints, sample numbers.
        Returns:
            [sum of their lengths] bool (host); None where all tokens of the split are.
        Raises:
            DataError: a number that is not a sample of this table.
        """
        if self._supervised is None:
            return None
        parts = [np.zeros(0, bool)]
        for start, end in self._spans(ids):
            first = start // 8
            bits = np.unpackbits(self._supervised[first : -(-end // 8)], bitorder="little")
            parts.append(bits[start - 8 * first : end - 8 * first].view(bool))
        return np.concatenate(parts)

    def _spans(self, ids: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Where samples start and end among the tokens."""
        ids = np.asarray(ids, np.int64)
        bad = np.flatnonzero((ids < 0) | (ids >= len(self)))
        if bad.size:
            raise DataError(
                f"ids[{bad[0]}] must be a sample from 0 to {len(self) - 1}, got {ids[bad[0]]}; "
                "use a plan that was made for this token store"
            )
        starts = self.offsets[ids]
        return list(zip(starts.tolist(), (starts + self.lengths[ids]).tolist(), strict=True))

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
        f"token store file {path} {rule}, got {found}; delete the folder of the store and run again",
        "DATA-STORE",
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
        progress: called about once per MB while building.
    Raises:
        DataError: the source, the tokenizer, a document or the store cannot be used.
    """
    rules = _rules(config, seq_length)
    sources = {"train": open_source(config.source)}
    if config.validation_source is not None:
        sources["eval"] = open_source(config.validation_source, "data.validation_source")
    states = {split: source.state() for split, source in sources.items()}
    memory = FileMemory(store_root(config) / MEMORY)
    identity = _identity(config, seq_length, sources, memory)
    folder = store_root(config) / canonical_hash(identity)
    if folder.exists():
        store = TokenStore.open(folder)
        _verify_changed(store, memory)
        return store
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with store_lock(folder):
            if not folder.exists():
                remove_leftovers(folder)
                build(Building(folder, identity, sources, states, config, rules, progress))
                store = TokenStore.open(folder)
                memory.remember(_state(store), store.fingerprint)  # just written, with these checksums
    except OSError as error:
        raise DataError(
            f"data.store_dir must be writable and have room, got {error}, in {folder.parent}; "
            "free space or set data.store_dir"
        ) from error
    return TokenStore.open(folder)


def _rules(config: DataConfig, seq_length: int) -> Rules:
    return Rules(
        config.min_tokens, config.overlong, seq_length, config.keep, config.deduplicate, config.control_characters
    )


def _identity(config: DataConfig, seq_length: int, sources: dict[str, Source], memory: FileMemory) -> dict[str, Any]:
    """All that decides the content of a store, as JSON values."""
    settings = {key: value for key, value in config.model_dump(mode="json").items() if _decides_samples(key)}
    if config.validation_source is not None:
        settings["eval_fraction"] = 0.0
    return {
        "format_version": FORMAT_VERSION,
        "seq_length": seq_length,
        **settings,
        "tokenizer": tokenizer_fingerprint(config.tokenizer),
        "sources": {split: source_fingerprint(source, memory) for split, source in sources.items()},
    }


def _decides_samples(key: str) -> bool:
    """Whether a key of the `data` section decides samples by its value, not by the content that it names."""
    role = key_role(f"data.{key}")
    return Decides.DATA in role.decides and not role.by_content


def _state(store: TokenStore) -> str:
    return f"store {state_of(path for path, _ in _listed_files(store.folder, store.manifest))}"


def _verify_changed(store: TokenStore, memory: FileMemory) -> None:
    """Compare the checksums of a store, unless its files are those that were compared before: a changed token would
    train unnoticed."""
    state = _state(store)
    if memory.recall(state) != store.fingerprint:
        store.verify()
        memory.remember(state, store.fingerprint)
