"""How a micro-batch's samples lie on the token axis, and the check that the result still matches them.

Columns of a micro-batch, all int32 (host)::

    samples [5 6 7] [8 9], 8 tokens, pad id 0
    input_ids        5 6 7 8 9 0 0 0
    labels           6 7 . 9 . . . .       . = -100, no loss; shifted once, inside a sample
    position_ids     0 1 2 0 1 0 1 2
    seq_lens         3 2                   real samples only
    actual_seq_qlen  3 5 8                 running ends, the tail is a segment of its own

Where only 7 and 8 9 are supervised, labels are . 7 . 9 . . . . since nothing comes before the first token of a sample.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ms_varlen.errors import DataError, LengthsError
from ms_varlen.lengths import SeqLens, check_ends, check_lengths
from ms_varlen.modes import Mode
from ms_varlen.planning.cost import tail_squares

IGNORE_INDEX = -100
"""Label of a token without loss."""

COLUMNS = ("input_ids", "labels", "position_ids", "seq_lens", "actual_seq_qlen")
"""Columns that every layout produces, in their order."""


class DeclaredSizes(Protocol):
    """What a layout asks of the declared shapes."""

    def size_for(self, tokens: int) -> int:
        """The size of T that holds `tokens`."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places samples on the token axis in one of the modes.

    Attributes:
        mode: a `Mode` or its name. Samples lie one after another ("varlen", "packed"), or each has a row, padded at its
            end ("padded", "bucketed"). A padded row is one segment; a bucketed row is two, its sample and its tail.
        shapes: the declared sizes of T.
        seq_length: the longest segment allowed, in tokens.
        rows: rows per micro-batch ("padded" only; "bucketed" has one for each sample).
        row_lengths: lengths that rows may have, in tokens, increasing; a micro-batch takes the first that holds its
            longest sample.
    """

    mode: Mode
    shapes: DeclaredSizes
    seq_length: int
    rows: int = 0
    row_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", Mode(self.mode))

    def needed_tokens(self, seq_lens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """What each micro-batch of a plan needs of T, before it is rounded up to a declared size.

        Args:
            seq_lens: [n] ints, tokens per sample in the plan's order.
            offsets: [k+1] ints, where each micro-batch starts.
        Returns:
            [k] int64.
        """
        if not self.row_lengths:
            return np.add.reduceat(seq_lens, offsets[:-1], dtype=np.int64)
        longest = np.maximum.reduceat(seq_lens, offsets[:-1])
        row_lengths = np.array(self.row_lengths)[np.searchsorted(self.row_lengths, longest)]
        return row_lengths * (self.rows or np.diff(offsets))

    def computed_tokens(self, seq_lens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """T of each micro-batch of a plan, without laying it out: [k] int64; arguments as in `needed_tokens`."""
        needed, place = np.unique(self.needed_tokens(seq_lens, offsets), return_inverse=True)
        return np.array([self.shapes.size_for(int(tokens)) for tokens in needed], np.int64)[place]

    def squared_tokens(self, seq_lens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Squares of the attention segments of each micro-batch of a plan, padding included, summed: what causal
        attention's work grows with. [k] int64; arguments as in `needed_tokens`.
        """
        needed, computed = self.needed_tokens(seq_lens, offsets), self.computed_tokens(seq_lens, offsets)
        counts, squares = np.diff(offsets), np.square(seq_lens.astype(np.int64))
        if not self.mode.follows_lengths:
            segments = needed * (needed // self.rows)
        elif self.mode.in_rows:
            row_lengths = np.repeat(needed // counts, counts)
            segments = np.add.reduceat(squares + np.square(row_lengths - seq_lens), offsets[:-1])
        else:
            segments = np.add.reduceat(squares, offsets[:-1])
        return segments + tail_squares(computed - needed, self.seq_length)

    def made_up(self, tokens: int) -> SeqLens:
        """Lengths of a micro-batch of T = `tokens` that holds one token, for compiling a graph."""
        if not self.mode.follows_lengths:
            row_length = tokens // self.rows
            return SeqLens.in_rows([1], self.seq_length, row_length, self.rows, split_tails=False)
        return SeqLens.packed([1], self.seq_length, tokens)

    def place(self, seq_lens: np.ndarray) -> SeqLens:
        """Lengths and places of samples of [B] tokens each.

        Raises:
            LengthsError: a sample longer than `seq_length`.
            ShapesError: more tokens than the declared shapes allow.
        """
        seq_lens = check_lengths(seq_lens, self.seq_length)
        tokens = int(self.computed_tokens(seq_lens, np.array([0, seq_lens.size]))[0])
        if not self.row_lengths:
            return SeqLens.packed(seq_lens, self.seq_length, tokens)
        rows = self.rows or seq_lens.size
        row_length = int(self.needed_tokens(seq_lens, np.array([0, seq_lens.size]))[0]) // rows
        return SeqLens.in_rows(seq_lens, self.seq_length, row_length, rows, self.mode.splits_rows, tokens)


def lay_out(
    lens: SeqLens, tokens: np.ndarray, pad_id: int, supervised: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The columns of a micro-batch.

    Args:
        lens: lengths and places of the samples.
        tokens: [real_tokens] ints, the samples' ids one after another.
        pad_id: id that fills the rest; it gets no label, whatever id it is.
        supervised: [real_tokens] bool, which tokens are targets; None means all.
    Returns:
        the columns `COLUMNS`, each int32 (host): the first three [T], then [B], then [G].
    """
    ends = np.cumsum(lens.seq_lens, dtype=np.int64)
    next_tokens = np.empty(tokens.size, np.int32)
    next_tokens[:-1] = tokens[1:] if supervised is None else np.where(supervised[1:], tokens[1:], IGNORE_INDEX)
    next_tokens[ends - 1] = IGNORE_INDEX
    input_ids = np.full(lens.tokens, pad_id, np.int32)
    labels = np.full(lens.tokens, IGNORE_INDEX, np.int32)
    input_ids[lens.token_slots] = tokens
    labels[lens.token_slots] = next_tokens
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": lens.position_ids,
        "seq_lens": lens.seq_lens,
        "actual_seq_qlen": lens.actual_seq_qlen,
    }


def require_columns(columns: Mapping[str, np.ndarray], names: tuple[str, ...] = COLUMNS) -> None:
    """Refuse a micro-batch that lost a column on its way.

    Raises:
        DataError: the message names what is missing.
    """
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"a micro-batch must carry {', '.join(missing)}, got only {', '.join(columns)}; keep the lengths' columns "
            "when projecting or mapping the data set: nothing recovers them from ids",
            "LEN-LOST",
        )


def check_micro_batch(
    columns: Mapping[str, np.ndarray],
    starts: np.ndarray,
    lengths: np.ndarray,
    edges: np.ndarray,
    seq_length: int,
    whole_rows: bool = False,
) -> None:
    """Compare a micro-batch with the samples that it claims to hold. Costs O(B), and two looks at the labels.

    Args:
        columns: the columns `COLUMNS`.
        starts: [B] ints, where on T the layout put each sample.
        lengths: [B] ints, the samples' lengths by id, in the order of the plan.
        edges: [2, B] ints, the samples' first and last token ids.
        seq_length: the longest segment allowed, in tokens.
        whole_rows: a sample's segment goes on to the end of its padded row; else it ends with the sample.
    Raises:
        DataError: a column is missing.
        LengthsError: dtype, sum, order, ends, size or labels disagree; the message gives the place.
    """
    require_columns(columns)
    for name in COLUMNS:
        if columns[name].dtype != np.int32:
            raise LengthsError(
                f"{name} must be int32, got {columns[name].dtype}; convert where it is made", "LEN-DTYPE"
            )
    tokens = columns["input_ids"].size
    for name in COLUMNS[1:3]:
        if columns[name].shape != (tokens,):
            raise LengthsError(
                f"{name} must be as long as input_ids ({tokens}), got shape {columns[name].shape}; make both from the "
                "same lengths",
                "LEN-SHAPE",
            )
    check_ends(columns["actual_seq_qlen"], tokens, seq_length)
    seq_lens = columns["seq_lens"]
    if seq_lens.shape != lengths.shape:
        raise LengthsError(
            f"seq_lens must have one entry per sample ({lengths.size}), got shape {seq_lens.shape}; carry one length "
            "per sample",
            "LEN-SHAPE",
        )
    moved = np.array_equal(np.sort(seq_lens), np.sort(lengths))
    code = "LEN-ZERO" if (seq_lens < 1).any() else "LEN-ORDER" if moved else "LEN-WRONG"
    _refuse_first("seq_lens", seq_lens, lengths, "the sample's length in the store", code)
    _check_samples(columns, starts, edges, whole_rows)


def _check_samples(columns: Mapping[str, np.ndarray], starts: np.ndarray, edges: np.ndarray, whole_rows: bool) -> None:
    """Each sample starts a segment; its first and last id, last label and last position are where its length says."""
    ids, seq_lens, ends = columns["input_ids"], columns["seq_lens"], columns["actual_seq_qlen"]
    segment_starts = np.concatenate([[0], ends[:-1]])
    segments = np.minimum(np.searchsorted(segment_starts, starts), segment_starts.size - 1)
    found = segment_starts[segments]
    _refuse_first("start of sample", found, starts, "where a segment of actual_seq_qlen starts", "LEN-TAIL")
    if not whole_rows:
        _refuse_first("end of sample", ends[segments], starts + seq_lens, "the end of its segment", "LEN-TAIL")
    lasts = starts + seq_lens - 1
    if lasts.max() >= ids.size:
        raise LengthsError(
            f"seq_lens must end within {ids.size} tokens, got an end at {int(lasts.max()) + 1}; count lengths "
            "after cutting",
            "LEN-WRONG",
        )
    in_store = "the sample's id at this place in the store; are the lengths in the order of the samples?"
    _refuse_first("first id of sample", ids[starts], edges[0], in_store, "LEN-ORDER")
    _refuse_first("last id of sample", ids[lasts], edges[1], in_store, "LEN-ORDER")
    _check_labels(columns, starts)
    _refuse_first(
        "last label of sample",
        columns["labels"][lasts],
        np.full(lasts.size, IGNORE_INDEX),
        "no target",
        "LABEL-BOUNDARY",
    )
    _refuse_first(
        "last position of sample", columns["position_ids"][lasts], seq_lens - 1, "its length - 1", "POS-RESET"
    )


def _check_labels(columns: Mapping[str, np.ndarray], starts: np.ndarray) -> None:
    """No target lies outside the samples, and each is the token after it."""
    ids, labels = columns["input_ids"], columns["labels"]
    supervised = labels != IGNORE_INDEX
    wrong = np.flatnonzero(supervised[:-1] & (labels[:-1] != ids[1:]))
    before = np.concatenate([[0], np.cumsum(supervised, dtype=np.int64)])
    inside = before[starts + columns["seq_lens"]] - before[starts]
    outside = int(before[-1] - inside.sum())
    shifted = bool(wrong.size) and (_are(labels, ids, supervised, 0) or _are(labels, ids, supervised, 2))
    if outside and not shifted:
        raise LengthsError(
            f"labels must be {IGNORE_INDEX} in padding, got {outside} targets outside the samples; padding is no "
            "target",
            "LABEL-PAD",
        )
    if wrong.size:
        i = int(wrong[0])
        raise LengthsError(
            f"labels[{i}] must be the token after it ({int(ids[i + 1])}), got {int(labels[i])}; {wrong.size} differ; "
            "shift labels once, inside a sample",
            "LABEL-SHIFT" if shifted else "LABEL-WRONG",
        )


def _are(labels: np.ndarray, ids: np.ndarray, supervised: np.ndarray, shift: int) -> bool:
    """Whether each target is the token `shift` places on."""
    end = ids.size - shift
    return bool((labels[:end] == ids[shift:])[supervised[:end]].all())


def _refuse_first(name: str, found: np.ndarray, expected: np.ndarray, rule: str, code: str) -> None:
    wrong = found != expected
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LengthsError(
            f"{name}[{i}] must be {int(expected[i])} ({rule}), got {int(found[i])}; "
            f"{int(wrong.sum())} of {wrong.size} differ; take tokens, labels and lengths by sample id, in one order",
            code,
        )
