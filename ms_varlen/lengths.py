"""`SeqLens`, the one owner of a batch's lengths.

Axis letters: `T` tokens of a micro-batch on one axis, `B` real sequences, `G` attention segments on T (the sequences,
and the segments that padding forms). Two layouts of lengths [3, 2]::

    on 8 tokens, one after another         in 2 rows of 4, tails split off
    a a a b b . . .                        a a a . | b b . .
    segment_lens  3 2 3                    segment_lens  3 1 2 2
    ends          3 5 8                    ends          3 4 6 8
    position_ids  0 1 2 0 1 0 1 2          position_ids  0 1 2 0 0 1 0 1

Everything here is NumPy on the host. Building one costs O(T) at most, about 20 us for 4,096 tokens.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import numpy as np

from ms_varlen.errors import LengthsError

logger = logging.getLogger("ms_varlen")


@functools.lru_cache(maxsize=1)
def _say_converted(name: str, dtype: str) -> None:
    logger.warning("%s came as %s and is converted to int32 (said once)", name, dtype)


def check_lengths(seq_lens: Sequence[int] | np.ndarray, maximum: int, name: str = "seq_lens") -> np.ndarray:
    """Plain lengths as a validated array.

    Args:
        seq_lens: [B] ints, tokens per sequence, each from 1 to `maximum`.
        maximum: the longest sequence allowed, in tokens.
        name: what to call them in an error.
    Returns:
        [B] int32 (host), read-only.
    Raises:
        LengthsError: not one axis, not integers, or a length out of range; the message gives its index.
    """
    lengths = np.asarray(seq_lens)
    if lengths.ndim != 1 or lengths.size == 0:
        raise LengthsError(
            f"{name} must have one axis and at least one entry, got shape {lengths.shape}; give one length "
            "per sequence",
            "LEN-SHAPE",
        )
    if lengths.dtype.kind not in "iu":
        raise LengthsError(
            f"{name} must be integers (int32), got {lengths.dtype}; convert where the lengths are made", "LEN-DTYPE"
        )
    if isinstance(seq_lens, np.ndarray) and lengths.dtype != np.int32:
        _say_converted(name, str(lengths.dtype))
    bad = np.flatnonzero((lengths < 1) | (lengths > maximum))
    if bad.size:
        i, value = int(bad[0]), int(lengths[bad[0]])
        if value < 1:
            raise LengthsError(
                f"{name}[{i}] must be >= 1, got {value} ({bad.size} of {lengths.size} out of range); "
                "remove empty sequences before batching (data.min_tokens does)",
                "LEN-ZERO",
            )
        raise LengthsError(
            f"{name}[{i}] must be <= {maximum} (seq_length), got {value} ({bad.size} of {lengths.size} out of range); "
            "raise model.seq_length or choose a data.overlong policy",
            "LEN-LONG",
        )
    lengths = lengths.astype(np.int32)
    lengths.flags.writeable = False
    return lengths


def check_ends(ends: np.ndarray, tokens: int, longest: int | None = None) -> None:
    """Refuse running segment ends that do not cover T.

    Args:
        ends: [G] ints (host), running ends of the attention segments, those of padding included.
        tokens: T.
        longest: the longest segment allowed, in tokens; by default any.
    Raises:
        LengthsError: not integers on one axis, not increasing from above 0, a segment too long, or a last end other
            than T.
    """
    ends = np.asarray(ends)
    if ends.ndim != 1 or ends.size == 0 or ends.dtype.kind not in "iu":
        raise LengthsError(
            f"actual_seq_qlen must be integers on one axis, got {ends.dtype} of shape {ends.shape}; "
            "give the running ends as int32",
            "LEN-DTYPE",
        )
    segments = np.diff(ends.astype(np.int64), prepend=0)
    bad = np.flatnonzero((segments < 1) | (segments > (tokens if longest is None else longest)))
    if bad.size:
        i = int(bad[0])
        before = int(ends[i - 1]) if i else 0
        if segments[i] < 1:
            raise LengthsError(
                f"actual_seq_qlen[{i}] must be above the end before it ({before}), got {int(ends[i])}; "
                "it takes running ends without a leading 0, not plain lengths",
                "LEN-PLAIN",
            )
        raise LengthsError(
            f"actual_seq_qlen[{i}] must end a segment of at most {longest or tokens} tokens, got {int(segments[i])}; "
            "split the segment, a padded tail too",
            "LEN-LONG",
        )
    if ends[-1] != tokens:
        raise LengthsError(
            f"actual_seq_qlen[-1] must equal the number of tokens ({tokens}), got {int(ends[-1])}; "
            "give a padded tail a segment of its own",
            "LEN-TAIL",
        )


def _tail(tokens: int, longest: int) -> np.ndarray:
    """[G] int32, lengths of the segments that `tokens` of padding form, none above `longest`."""
    whole, rest = divmod(tokens, longest)
    return np.array([longest] * whole + ([rest] if rest else []), np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class SeqLens:
    """The lengths of B sequences and where each lies on the token axis.

    Build one with `packed`, `in_rows` or `from_position_ids`. The arrays are read-only.

    Attributes:
        seq_lens: [B] int32, real tokens per sequence, in their order on T.
        starts: [B] int32, where each sequence begins on T.
        segment_lens: [G] int32, every attention segment in order; they cover T without a gap.
        seq_length: the longest segment allowed, in tokens.
    """

    seq_lens: np.ndarray
    starts: np.ndarray
    segment_lens: np.ndarray
    seq_length: int

    def __post_init__(self):
        check_lengths(self.segment_lens, self.seq_length, "segment_lens")
        for name in ("seq_lens", "starts", "segment_lens"):
            array = np.array(getattr(self, name), np.int32)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def packed(cls, seq_lens, seq_length: int, tokens: int | None = None) -> "SeqLens":
        """Sequences one after another, and a padded tail up to `tokens`.

        Args:
            seq_lens: [B] ints, each from 1 to `seq_length`.
            seq_length: the longest segment allowed, in tokens.
            tokens: size of T; by default the sum of the lengths.
        Raises:
            LengthsError: a bad length, or fewer `tokens` than the lengths need.
        """
        lengths = check_lengths(seq_lens, seq_length)
        real = int(lengths.sum(dtype=np.int64))
        total = real if tokens is None else int(tokens)
        if total < real:
            raise LengthsError(f"tokens must be >= the sum of seq_lens ({real}), got {total}; raise it", "LEN-WRONG")
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        return cls(lengths, starts, np.concatenate([lengths, _tail(total - real, seq_length)]), seq_length)

    @classmethod
    def in_rows(
        cls, seq_lens, seq_length: int, row_length: int, rows: int, split_tails: bool, tokens: int | None = None
    ) -> "SeqLens":
        """One sequence a row, pads at the right; rows beyond the sequences are pads only.

        Args:
            seq_lens: [B] ints, each from 1 to `row_length`.
            seq_length: the longest segment allowed, in tokens.
            row_length: tokens per row, at most `seq_length`.
            rows: number of rows, at least B.
            split_tails: True makes a row's real part and its tail two segments; False keeps whole rows, where causal
                attention keeps real tokens from the pads at their right.
            tokens: size of T; what the rows leave is a padded tail. By default the rows fill it.
        """
        lengths = check_lengths(seq_lens, row_length)
        if lengths.size > rows:
            raise LengthsError(
                f"rows must be >= the number of sequences ({lengths.size}), got {rows}; raise it", "LEN-SHAPE"
            )
        total = rows * row_length if tokens is None else int(tokens)
        if total < rows * row_length:
            raise LengthsError(
                f"tokens must be >= rows x row_length ({rows * row_length}), got {total}; raise it", "LEN-SHAPE"
            )
        segments = np.full(rows, row_length, np.int32)
        if split_tails:
            parts = np.zeros((rows, 2), np.int32)
            parts[: lengths.size, 0] = lengths
            parts[:, 1] = row_length - parts[:, 0]
            segments = parts[parts > 0]
        tail = _tail(total - rows * row_length, seq_length)
        return cls(lengths, np.arange(lengths.size) * row_length, np.concatenate([segments, tail]), seq_length)

    @classmethod
    def from_position_ids(cls, position_ids, seq_length: int) -> "SeqLens":
        """Lengths read from positions [T] that restart at 0 with every sequence (no padding)."""
        positions = np.asarray(position_ids)
        starts = np.flatnonzero(positions == 0)
        if starts.size == 0 or starts[0] != 0:
            raise LengthsError(
                "position_ids[0] must be 0, where the first sequence starts; restart them with each sequence",
                "POS-RESET",
            )
        result = cls.packed(np.diff(np.append(starts, positions.size)).astype(np.int32), seq_length)
        wrong = np.flatnonzero(result.position_ids != positions)
        if wrong.size:
            i = int(wrong[0])
            raise LengthsError(
                f"position_ids[{i}] must go on from the one before or restart at 0, got {positions[i]}; "
                "restart them with each sequence",
                "POS-RESET",
            )
        return result

    @property
    def segments(self) -> int:
        """B, the number of real sequences."""
        return self.seq_lens.size

    @property
    def tokens(self) -> int:
        """T, the number of tokens computed, pads included."""
        return int(self.actual_seq_qlen[-1])

    @property
    def real_tokens(self) -> int:
        """The number of tokens that are not padding."""
        return int(self.seq_lens.sum(dtype=np.int64))

    @property
    def max_seqlen(self) -> int:
        """The longest attention segment, in tokens."""
        return int(self.segment_lens.max())

    @functools.cached_property
    def actual_seq_qlen(self) -> np.ndarray:
        """[G] int32 running ends, increasing, last == T, no leading 0: what TND attention takes."""
        return np.cumsum(self.segment_lens, dtype=np.int32)

    @functools.cached_property
    def cu_seqlens(self) -> np.ndarray:
        """[G+1] int32: 0, then the running ends."""
        return np.concatenate([np.zeros(1, np.int32), self.actual_seq_qlen])

    @functools.cached_property
    def segment_starts(self) -> np.ndarray:
        """[T] int32, for each token the first token of its attention segment."""
        return np.repeat(self.cu_seqlens[:-1], self.segment_lens)

    @functools.cached_property
    def position_ids(self) -> np.ndarray:
        """[T] int32, restarting at 0 in every attention segment."""
        return np.arange(self.tokens, dtype=np.int32) - self.segment_starts

    @functools.cached_property
    def segment_ids(self) -> np.ndarray:
        """[T] int32, the number of each token's attention segment."""
        return np.repeat(np.arange(self.segment_lens.size, dtype=np.int32), self.segment_lens)

    @functools.cached_property
    def token_slots(self) -> np.ndarray:
        """[real_tokens] int64: where the sequences' tokens, one after another, lie on T."""
        shift = self.starts - (np.cumsum(self.seq_lens, dtype=np.int64) - self.seq_lens)
        return np.arange(self.real_tokens) + np.repeat(shift, self.seq_lens)

    @functools.cached_property
    def real_mask(self) -> np.ndarray:
        """[T] bool, True for a real token, False for padding."""
        mask = np.zeros(self.tokens, bool)
        mask[self.token_slots] = True
        return mask
