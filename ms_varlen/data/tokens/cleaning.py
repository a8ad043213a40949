"""Which documents are held out, removed or cut, and the ledger that accounts for every token.

With a limit of 8 tokens and `min_tokens` 2, a document of 20 tokens becomes

    truncate   8             12 cut
    split      8 8 4          0 cut
    drop       -             20 dropped
    error      DataError

and of 17 tokens under split 8 8, with 1 cut: a piece of n tokens has n - 1 targets, so a piece of one teaches nothing.
What truncate keeps is `keep`: the beginning (head), the end (tail), or half of each (both), joined without a loss where
they meet. A piece without a target is cut; a document without a piece that has one is removed.

A document is removed for the first of these reasons that holds: empty, control (characters), duplicate, short,
overlong, unsupervised. About 2 us a document, 7 with a loss mask. Looking for duplicates costs 1 us more and 8 bytes a
document, 16 while its table grows: 1.6 GB for 100 million.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ms_varlen.data.tokens.records import Encoded
from ms_varlen.errors import DataError

SPLITS = ("train", "eval")
EXAMPLES = 5
"""Documents kept as examples of each reason."""

Piece = tuple[np.ndarray, np.ndarray | None]
"""[n] int32 ids and [n] bool, which are targets; None when all are. The first has no loss either way."""


@dataclasses.dataclass
class Ledger:
    """Where documents and their tokens (end-of-text included) went.

    ``tokens_in == tokens_kept + tokens_cut`` + the tokens of all removed documents, and likewise for documents, where
    `documents_cut` counts documents that are also among the kept ones.

    Attributes:
        documents_in: documents read.
        documents_empty: removed, no text or no completion, or white space only.
        documents_control: removed, with control characters, by control_characters=drop.
        documents_duplicate: removed, the same as one before.
        documents_short: removed, fewer than `min_tokens` tokens.
        documents_unsupervised: removed, no token with a loss in what would be kept.
        documents_overlong: removed by overlong=drop.
        documents_cut: kept, but with tokens cut off.
        documents_kept: at least one sample came from them.
        samples_kept: pieces after `overlong` was applied.
        targets_kept: tokens of samples with a loss: supervised and not the first.
        documents_with_control: documents with control or replacement characters, whatever became of them.
    """

    documents_in: int = 0
    tokens_in: int = 0
    documents_empty: int = 0
    tokens_empty: int = 0
    documents_control: int = 0
    tokens_control: int = 0
    documents_duplicate: int = 0
    tokens_duplicate: int = 0
    documents_short: int = 0
    tokens_short: int = 0
    documents_unsupervised: int = 0
    tokens_unsupervised: int = 0
    documents_overlong: int = 0
    tokens_overlong: int = 0
    documents_cut: int = 0
    tokens_cut: int = 0
    documents_kept: int = 0
    samples_kept: int = 0
    tokens_kept: int = 0
    targets_kept: int = 0
    documents_with_control: int = 0

    def __add__(self, other: "Ledger") -> "Ledger":
        names = [field.name for field in dataclasses.fields(self)]
        return Ledger(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def tokens_dropped(self) -> int:
        """Tokens of whole documents that were removed."""
        return sum(getattr(self, f"tokens_{reason}") for reason in REMOVED)

    @property
    def documents_dropped(self) -> int:
        """Documents that were removed."""
        return sum(getattr(self, f"documents_{reason}") for reason in REMOVED)

    @property
    def balanced(self) -> bool:
        """True when every document and every token is accounted for."""
        return (
            self.tokens_in == self.tokens_kept + self.tokens_cut + self.tokens_dropped
            and self.documents_in == self.documents_kept + self.documents_dropped
        )

    def count(self, kind: str, tokens: int, documents: int = 1) -> None:
        """Book documents and their tokens under `kind`: in, cut, kept, or a reason of `REMOVED`."""
        for unit, amount in ((f"documents_{kind}", documents), (f"tokens_{kind}", tokens)):
            setattr(self, unit, getattr(self, unit) + amount)


CUT = "cut"
REMOVED = {
    "empty": "no text or no completion, or white space only",
    "control": "control or replacement characters",
    "duplicate": "the same as a document before",
    "short": "fewer than data.min_tokens tokens",
    "unsupervised": "no token with a loss in what would be kept",
    "overlong": "more than model.seq_length tokens",
}
"""Why documents are removed."""
WITH_CONTROL = "with_control"
"""Examples of documents that stayed although they have such characters, or lost them."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a sample may be.

    Attributes:
        min_tokens: fewest tokens of a sample.
        overlong: truncate, split, drop or error.
        limit: most tokens of a sample (`model.seq_length`).
        keep: head, tail or both: what truncate keeps.
        deduplicate: whether a document that was there before is removed.
        control_characters: drop removes documents with one; anything else is done before.
    """

    min_tokens: int
    overlong: str
    limit: int
    keep: str = "head"
    deduplicate: bool = False
    control_characters: str = "keep"

    def __post_init__(self):
        if not 1 <= self.min_tokens <= self.limit:
            raise DataError(
                f"data.min_tokens must be from 1 to model.seq_length ({self.limit}), got {self.min_tokens}; lower it"
            )


class Cleaned(NamedTuple):
    """What became of a document.

    Attributes:
        pieces: its samples, in order.
        reason: None when it was kept whole, `CUT` when in part, else a key of `REMOVED`.
    """

    pieces: list[Piece]
    reason: str | None


class Cleaner:
    """Makes samples of documents, in their order, and keeps the books.

    Args:
        rules: what a sample may be.
    Attributes:
        ledgers: of `SPLITS`.
        examples: the first `EXAMPLES` documents of each reason, `CUT` and `WITH_CONTROL`: `where`, `text` (its
            beginning, on one line) and `tokens`.
    """

    def __init__(self, rules: Rules):
        self.rules = rules
        self.ledgers = {split: Ledger() for split in SPLITS}
        self.examples: dict[str, list[dict[str, str | int]]] = collections.defaultdict(list)
        self._seen = SeenKeys()

    def clean(self, batch: Sequence[Encoded], splits: Sequence[str]) -> list[Cleaned]:
        """What becomes of each document.

        Args:
            batch: documents; thousands at once are cheapest.
            splits: where each belongs, of `SPLITS`.
        Raises:
            DataError: a document is overlong and `overlong` is error.
        """
        fresh = np.ones(len(batch), bool)
        if self.rules.deduplicate:
            # Empty ones are all alike, and have a reason of their own.
            telling = [number for number, document in enumerate(batch) if not document.empty]
            keys = np.frombuffer(b"".join(batch[number].key for number in telling), np.uint64)
            fresh[telling] = self._seen.add(keys)
        return [
            self._clean(document, self.ledgers[split], is_fresh)
            for document, split, is_fresh in zip(batch, splits, fresh.tolist(), strict=True)
        ]

    def _clean(self, document: Encoded, ledger: Ledger, is_fresh: bool) -> Cleaned:
        tokens = document.ids.size
        ledger.documents_in += 1
        ledger.tokens_in += tokens
        ledger.documents_with_control += document.control > 0
        reason, found = self._fault(document, is_fresh), []
        if reason is None and document.supervised is None and tokens <= self.rules.limit and not document.control:
            # What nearly every document of plain text is: one whole sample. The rest takes three times as long.
            ledger.documents_kept += 1
            ledger.samples_kept += 1
            ledger.tokens_kept += tokens
            ledger.targets_kept += tokens - 1
            return Cleaned([(document.ids, None)], None)
        if document.control and reason != "control":
            self._show(WITH_CONTROL, document)
        if reason is None:
            found = pieces(document, self.rules)
            if not found:
                dropped = tokens > self.rules.limit and self.rules.overlong == "drop"
                reason = "overlong" if dropped else "unsupervised"
        if reason is not None:
            ledger.count(reason, tokens)
            self._show(reason, document)
            return Cleaned([], reason)
        kept = sum(ids.size for ids, _ in found)
        ledger.documents_kept += 1
        ledger.tokens_kept += kept
        ledger.samples_kept += len(found)
        ledger.targets_kept += sum(targets(piece) for piece in found)
        if kept == tokens:
            return Cleaned(found, None)
        ledger.count(CUT, tokens - kept)
        self._show(CUT, document)
        return Cleaned(found, CUT)

    def _fault(self, document: Encoded, is_fresh: bool) -> str | None:
        """Why a document is removed before it comes to its length."""
        if document.empty:
            return "empty"
        if document.control and self.rules.control_characters == "drop":
            return "control"
        if not is_fresh:
            return "duplicate"
        return "short" if document.ids.size < self.rules.min_tokens else None

    def _show(self, reason: str, document: Encoded) -> None:
        examples = self.examples[reason]
        if len(examples) < EXAMPLES:
            text = shown_text(document.excerpt)
            examples.append({"where": document.where, "text": text, "tokens": int(document.ids.size)})


def shown_text(text: str) -> str:
    """A text on one line: what cannot be printed, line ends too, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def pieces(document: Encoded, rules: Rules) -> list[Piece]:
    """The samples of a document of at least `min_tokens` tokens.

    Returns:
        At most ceil(tokens / limit) pieces of `min_tokens` to `limit` tokens, each with a target; none when the
        document is dropped or has no target in what would be kept.
    Raises:
        DataError: the document is overlong and `overlong` is error.
    """
    ids, supervised, limit = document.ids, document.supervised, rules.limit
    tokens = ids.size
    if tokens <= limit:
        parts = [(ids, supervised)]
    elif rules.overlong == "error":
        raise DataError(
            f"a document must be <= {limit} tokens (model.seq_length) under data.overlong=error, got {tokens}, "
            f"in {document.where}; raise model.seq_length or set data.overlong to split, truncate or drop"
        )
    elif rules.overlong == "drop":
        parts = []
    elif rules.overlong == "split":
        parts = [_part(document, slice(start, start + limit)) for start in range(0, tokens, limit)]
    elif rules.keep == "both" and limit > 1:
        parts = [_joined(document, limit)]
    else:
        parts = [_part(document, slice(limit) if rules.keep == "head" else slice(tokens - limit, tokens))]
    return [part for part in parts if part[0].size >= rules.min_tokens and (part[1] is None or targets(part))]


def _part(document: Encoded, where: slice) -> Piece:
    return document.ids[where], None if document.supervised is None else document.supervised[where]


def _joined(document: Encoded, limit: int) -> Piece:
    """The beginning and the end of a document; the end's first token does not follow what stands before it now."""
    head, tail = limit - limit // 2, document.ids.size - limit // 2
    places = np.r_[0:head, tail : document.ids.size]
    supervised = np.ones(limit, bool) if document.supervised is None else document.supervised[places]
    supervised[head] = False
    return document.ids[places], supervised


def targets(piece: Piece) -> int:
    """Tokens of a sample with a loss: supervised, and with a token before them."""
    ids, supervised = piece
    return max(ids.size - 1, 0) if supervised is None else int(np.count_nonzero(supervised[1:]))


def held_out(key: bytes, fraction: float) -> bool:
    """True for the share `fraction` of all documents that evaluate.

    Depends on the document's `key` alone: not on its place, the tokenizer or any limit. Equal ones are on one side.
    """
    return int.from_bytes(key, "little") < fraction * 2.0**64


class SeenKeys:
    """A set of 64-bit keys, 8 bytes each: a few sorted arrays, the sizes of which at least halve."""

    def __init__(self):
        self._arrays: list[np.ndarray] = []

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add keys.

        Args:
            keys: [n] uint64.
        Returns:
            [n] bool, which were there neither before nor earlier among `keys`.
        """
        distinct, first = np.unique(keys, return_index=True)
        new = np.ones(distinct.size, bool)
        for array in self._arrays:
            place = np.minimum(np.searchsorted(array, distinct), array.size - 1)
            new &= array[place] != distinct
        fresh = np.zeros(keys.size, bool)
        fresh[first[new]] = True
        merged = distinct[new]
        while self._arrays and self._arrays[-1].size < 2 * merged.size:
            merged = np.sort(np.concatenate([self._arrays.pop(), merged]), kind="stable")
        if merged.size:
            self._arrays.append(merged)
        return fresh
