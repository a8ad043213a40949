"""Which documents are held out, removed or cut, and the ledger that accounts for every token.

With a limit of 8 tokens and `min_tokens` 2, a document of 20 tokens becomes

    truncate   8             12 cut
    split      8 8 4          0 cut
    drop       -             20 dropped
    error      DataError

and of 17 tokens under split 8 8, with 1 cut: a piece of n tokens has n - 1 targets, so a piece of one teaches nothing.
What is kept is always the beginning of the document.
"""

import dataclasses
import hashlib

from ms_varlen.errors import DataError


@dataclasses.dataclass
class Ledger:
    """Where documents and their tokens (end-of-text included) went.

    ``tokens_in == tokens_kept + tokens_cut + tokens_empty + tokens_short + tokens_overlong``, and likewise for
    documents, where `documents_cut` counts documents that are also among the kept ones.

    Attributes:
        documents_in: documents read.
        documents_empty: removed, no text or white space only.
        documents_short: removed, fewer than `min_tokens` tokens.
        documents_overlong: removed by overlong=drop.
        documents_cut: kept, but with tokens cut off their end.
        documents_kept: at least one sample came from them.
        samples_kept: pieces after `overlong` was applied.
    """

    documents_in: int = 0
    tokens_in: int = 0
    documents_empty: int = 0
    tokens_empty: int = 0
    documents_short: int = 0
    tokens_short: int = 0
    documents_overlong: int = 0
    tokens_overlong: int = 0
    documents_cut: int = 0
    tokens_cut: int = 0
    documents_kept: int = 0
    samples_kept: int = 0
    tokens_kept: int = 0

    def __add__(self, other: "Ledger") -> "Ledger":
        names = [field.name for field in dataclasses.fields(self)]
        return Ledger(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def tokens_dropped(self) -> int:
        """Tokens of whole documents that were removed."""
        return self.tokens_empty + self.tokens_short + self.tokens_overlong

    @property
    def documents_dropped(self) -> int:
        """Documents that were removed."""
        return self.documents_empty + self.documents_short + self.documents_overlong

    @property
    def balanced(self) -> bool:
        """True when every document and every token is accounted for."""
        return (
            self.tokens_in == self.tokens_kept + self.tokens_cut + self.tokens_dropped
            and self.documents_in == self.documents_kept + self.documents_dropped
        )

    def count(self, kind: str, tokens: int) -> None:
        """Book one document and its tokens under `kind`: in, empty, short, overlong, cut or kept."""
        for unit, amount in ((f"documents_{kind}", 1), (f"tokens_{kind}", tokens)):
            setattr(self, unit, getattr(self, unit) + amount)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a sample may be.

    Attributes:
        min_tokens: fewest tokens of a sample.
        overlong: truncate, split, drop or error.
        limit: most tokens of a sample (`model.seq_length`).
    """

    min_tokens: int
    overlong: str
    limit: int

    def __post_init__(self):
        if not 1 <= self.min_tokens <= self.limit:
            raise DataError(
                f"data.min_tokens must be from 1 to model.seq_length ({self.limit}), got {self.min_tokens}; lower it"
            )


def pieces(tokens: int, rules: Rules) -> list[int]:
    """Lengths of the samples that a document of `tokens` >= `min_tokens` becomes, from its beginning on.

    Returns:
        At most ceil(tokens / limit) lengths from `min_tokens` to `limit`; none when the document is dropped.
    """
    if tokens <= rules.limit:
        return [tokens]
    if rules.overlong == "truncate":
        return [rules.limit]
    if rules.overlong == "split":
        whole, rest = divmod(tokens, rules.limit)
        return [rules.limit] * whole + ([rest] if rest >= rules.min_tokens else [])
    return []


def clean(text: str, tokens: int, rules: Rules, ledger: Ledger, where: str) -> list[int]:
    """Lengths of the samples that one document becomes; books it in `ledger`.

    Args:
        text: the document; only white space counts as empty.
        tokens: its length in tokens, end-of-text included.
        where: the document's place, for an error.
    Returns:
        Lengths from the document's beginning on; empty when it is removed.
    Raises:
        DataError: the document is overlong and `overlong` is error.
    """
    if tokens > rules.limit and rules.overlong == "error" and text.strip():
        raise DataError(
            f"a document must be <= {rules.limit} tokens (model.seq_length) under data.overlong=error, got {tokens}, "
            f"in {where}; raise model.seq_length or set data.overlong to split, truncate or drop"
        )
    ledger.count("in", tokens)
    if not text.strip():
        ledger.count("empty", tokens)
        return []
    if tokens < rules.min_tokens:
        ledger.count("short", tokens)
        return []
    lengths = pieces(tokens, rules)
    if not lengths:
        ledger.count("overlong", tokens)
        return []
    kept = sum(lengths)
    ledger.count("kept", kept)
    ledger.samples_kept += len(lengths)
    if kept < tokens:
        ledger.count("cut", tokens - kept)
    return lengths


def held_out(text: str, fraction: float) -> bool:
    """True for the share `fraction` of all texts that evaluate.

    Depends on the text alone: not on its place, the tokenizer or any limit. Equal texts fall on the same side.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"ms_varlen.eval").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
