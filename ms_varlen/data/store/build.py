"""Building a token store: read, tokenise, clean and write, a batch at a time.

A store is written next to its place (``<fingerprint>.building``), brought to disk and renamed: after a kill there is a
whole store or none. One process builds at a time (a lock on ``<fingerprint>.lock``, an empty file that stays), the
others wait and use the result; what killed builds left is removed by the next build. Memory does not grow with the
corpus, but for 8 to 16 bytes a document where duplicates are removed.
"""

import contextlib
import dataclasses
import itertools
import logging
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from ms_varlen.data.config import DataConfig
from ms_varlen.data.sources.record_batches import Batch
from ms_varlen.data.sources.source import Source, changed_source
from ms_varlen.data.store.files import SPLITS, SplitWriter, token_dtype, write_manifest
from ms_varlen.data.tokens.cleaning import REMOVED, Cleaned, Cleaner, Ledger, Rules, held_out
from ms_varlen.data.tokens.encoding import EncodedBatch, default_workers, encode_batches
from ms_varlen.data.tokens.ready_tokens import masks_of
from ms_varlen.data.tokens.records import RecordEncoder, find_kind, kind_sentence
from ms_varlen.data.tokens.tokenizers import Tokenizer, describe, open_tokenizer
from ms_varlen.errors import DataError
from ms_varlen.files import locked, publish

logger = logging.getLogger("ms_varlen")

# Called with the share of the source that is done (0 to 1) and the number of documents read.
Progress = Callable[[float, int], None]

WHOLE_LENGTH = (None, "cut", "overlong")
"""What cleaning says of documents whose length before cutting is kept."""


@dataclasses.dataclass(frozen=True)
class Building:
    """What a store is built from.

    Attributes:
        folder: where it will lie.
        identity: all that decides its content.
        sources: by split; without "eval" a share of "train" is held out.
        states: of the sources, from before their fingerprints were taken.
        config: the `data` section.
        rules: of cleaning.
        progress: told after each batch.
    """

    folder: Path
    identity: dict[str, Any]
    sources: dict[str, Source]
    states: dict[str, str]
    config: DataConfig
    rules: Rules
    progress: Progress | None


def build(plan: Building) -> None:
    """Write the store next to its folder, then rename it; the caller holds its lock.

    Raises:
        DataError: a record cannot be used, nothing is left to train on, or the source changes meanwhile.
    """
    folder, building = plan.folder, plan.folder.with_suffix(".building")
    try:
        building.mkdir()
        tokenizer = open_tokenizer(plan.config.tokenizer)
        entries = _fill(building, plan, tokenizer)
        for split, source in plan.sources.items():
            if source.state() != plan.states[split]:
                raise DataError(changed_source(source))
        manifest = {**plan.identity, "fingerprint": folder.name, "tokenizer": describe(tokenizer), **entries}
        write_manifest(building, manifest)
        publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fill(building: Path, plan: Building, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the files of both splits; what the manifest says about them."""
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {split: SplitWriter(building / split, dtype) for split in SPLITS}
    cleaner = Cleaner(plan.rules)
    kinds = {}
    sizes = {split: source.size for split, source in plan.sources.items()}
    before, documents = 0, 0
    # What is to be evaluated comes first, so that a training document equal to one of it is the duplicate.
    for split in sorted(plan.sources):
        source = plan.sources[split]
        kinds[split], encoded = _encoded(source, plan, tokenizer)
        with contextlib.closing(encoded):
            numbers = itertools.count()
            for batch in encoded:
                fraction = None if len(plan.sources) > 1 else plan.config.eval_fraction
                _add(batch, split, fraction, cleaner, writers, numbers)
                documents += len(batch.encoded)
                source.skipped.update(batch.skipped)
                if plan.progress:
                    plan.progress((before + batch.done * sizes[split]) / sum(sizes.values()), documents)
        before += sizes[split]
    _require_samples(plan, cleaner)
    return {
        "token_dtype": dtype,
        "kind": kinds,
        "sources": {
            split: {"name": source.name, "fingerprint": fingerprint, "skipped": dict(source.skipped)}
            for (split, source), fingerprint in zip(
                plan.sources.items(), plan.identity["sources"].values(), strict=True
            )
        },
        "examples": cleaner.examples,
        "splits": {
            split: {**writer.close(), "ledger": dict(vars(cleaner.ledgers[split]))} for split, writer in writers.items()
        },
    }


def _encoded(source: Source, plan: Building, tokenizer: Tokenizer) -> tuple[str, Generator[EncodedBatch]]:
    """The kind of a source's records, found by looking at the first, and all of them as tokens."""
    batches = source.batches()
    looked_at: list[Batch] = []
    for batch in batches:
        looked_at.append(batch)
        first = next(batch.records(), None)
        if first is not None:
            break
    else:
        names = ", ".join(map(str, source.files[:3]))
        raise DataError(f"{source.field} must hold a record, got none, in {names}; fill it or correct the path")
    kind = find_kind(first)
    logger.info("%s: %s", source.name, kind_sentence(kind, first, tokenizer))
    config = plan.config
    encoder = RecordEncoder(tokenizer, kind, config.control_characters, config.labels_shifted, masks_of(first.fields))
    workers = config.workers or default_workers()
    return kind, encode_batches(itertools.chain(looked_at, batches), encoder, workers)


def _add(
    batch: EncodedBatch,
    split: str,
    eval_fraction: float | None,
    cleaner: Cleaner,
    writers: dict[str, SplitWriter],
    numbers: Iterator[int],
) -> None:
    """Clean and write one batch. Without a fraction all of it belongs to `split`."""
    if eval_fraction is None:
        splits = [split] * len(batch.encoded)
    else:
        splits = ["eval" if held_out(encoded.key, eval_fraction) else "train" for encoded in batch.encoded]
    results: list[Cleaned] = cleaner.clean(batch.encoded, splits)
    for chosen, encoded, cleaned in zip(splits, batch.encoded, results, strict=True):
        length = encoded.ids.size if cleaned.reason in WHOLE_LENGTH else None
        writers[chosen].add(next(numbers), length, cleaned.pieces)
    for writer in writers.values():
        writer.flush()


def _require_samples(plan: Building, cleaner: Cleaner) -> None:
    for split in plan.sources:
        if not cleaner.ledgers[split].samples_kept:
            ledgers = [cleaner.ledgers[split]] if len(plan.sources) > 1 else list(cleaner.ledgers.values())
            total = sum(ledgers, Ledger())
            source, purpose = plan.sources[split], "train" if split == "train" else "evaluate"
            gone = {f"{reason} ({about})": getattr(total, f"documents_{reason}") for reason, about in REMOVED.items()}
            gone["held out (data.eval_fraction)"] = total.documents_kept
            found = ", ".join(f"{count} {reason}" for reason, count in gone.items() if count)
            raise DataError(
                f"{source.field} must leave a sample to {purpose} on, got none of {total.documents_in} documents: "
                f"{found}; in {source.name}; add records, or change the rule of data that removed them"
            )


def lock_file(folder: Path) -> Path:
    """Return the lock file of a store, which stays next to its folder."""
    return folder.with_suffix(".lock")


@contextlib.contextmanager
def store_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a store's fingerprint; wait while another process builds it."""
    with locked(lock_file(folder), wait=False) as free:
        if free:
            yield
            return
    logger.info("another process builds token store %s; waiting for it", folder.name)
    with locked(lock_file(folder)):
        yield


def remove_leftovers(folder: Path) -> None:
    """Delete what killed builds left: of this store (its lock is held here) and of others that nobody holds."""
    for leftover in folder.parent.glob("*.building"):
        if leftover.stem == folder.name:
            shutil.rmtree(leftover)
            continue
        with locked(lock_file(leftover), wait=False) as free:
            if free:
                shutil.rmtree(leftover, ignore_errors=True)
