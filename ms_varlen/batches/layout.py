"""The layout: how the samples of a micro-batch lie on the token axis.

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
from typing import Protocol

import numpy as np

from ms_varlen.batches.micro_batch import Columns
from ms_varlen.lengths import SeqLens, check_lengths
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.modes import Mode
from ms_varlen.planning.cost import tail_squares


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


def lay_out(lens: SeqLens, tokens: np.ndarray, pad_id: int, supervised: np.ndarray | None = None) -> Columns:
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
