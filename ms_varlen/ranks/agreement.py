"""Agreement: before each step ranks exchange the lengths of their micro-batches and compare them with the plan.

A report is a head and a row of words for each micro-batch; one exchange brings them together::

    head    flag | step | epoch | step of the plan | mode | plan's fingerprint (4)
    row     samples B | T | real tokens | supervised tokens | lengths (up to the cap) or their SHA-256 (8)

The same exchange counts the step's tokens over all ranks and carries requests to stop. Ranks send the lengths
themselves if the reports of all ranks hold at most `MOST_LENGTHS`, and hashes of them otherwise.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.batches.micro_batch import MicroBatch
from ms_varlen.errors import RanksError, VarlenError
from ms_varlen.modes import MODES
from ms_varlen.planning.plan import EpochPlan, PlanState
from ms_varlen.ranks.exchange import Exchange

MOST_LENGTHS = 1 << 16
"""Most lengths of a step over all ranks, unused room included, that are sent without hashing: 256 KiB."""

HEAD = ("flag", "step", "epoch", "step of the plan", "mode", "plan")
COUNTS = ("samples", "T", "real tokens", "supervised tokens")
SUPERVISED = COUNTS.index("supervised tokens")
HEAD_WORDS, HASH_WORDS = len(HEAD) - 1 + 4, 8
GO, STOP, FAILED = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class StepLengths:
    """The lengths of micro-batches, one after another.

    Attributes:
        lengths: [n] ints, tokens per sample.
        offsets: [k+1] ints, where each micro-batch starts.
        tokens: [k] ints, T of each.
        supervised: [k] ints, tokens with a loss in each.
    """

    lengths: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    supervised: np.ndarray

    @classmethod
    def of_plan(cls, lengths: np.ndarray, plan: EpochPlan, step: int, layout: Layout) -> "StepLengths":
        """Return the planned lengths of a step, rank after rank; a plan does not know labels, so `supervised` is 0.

        Args:
            lengths: [n] ints, of the corpus.
            step: of the plan.
            layout: where samples lie on T.
        """
        offsets, chosen = plan.step_offsets(step), np.asarray(lengths[plan.step_ids(step)])
        return cls(chosen, offsets, layout.computed_tokens(chosen, offsets), np.zeros(offsets.size - 1, np.int64))

    @classmethod
    def of_micro_batches(cls, batches: Sequence[MicroBatch]) -> "StepLengths":
        """Return the lengths of micro-batches."""
        seq_lens = [batch.seq_lens for batch in batches]
        return cls(
            np.concatenate(seq_lens),
            np.append(0, np.cumsum([lengths.size for lengths in seq_lens])),
            np.array([batch.tokens for batch in batches]),
            np.array([batch.supervised for batch in batches]),
        )

    def words(self, most: int, hashed: bool) -> np.ndarray:
        """Return the rows of a report.

        Args:
            most: largest number of samples in a row.
            hashed: send a hash in place of the lengths.
        Returns:
            [k, 4 + most] or [k, 12] int32.
        """
        counts = np.diff(self.offsets)
        rows = np.zeros((counts.size, len(COUNTS) + (HASH_WORDS if hashed else most)), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 3] = counts, self.tokens, self.supervised
        rows[:, 2] = np.add.reduceat(self.lengths, self.offsets[:-1], dtype=np.int64)
        if hashed:
            for row, start, end in zip(rows, self.offsets, self.offsets[1:], strict=False):
                digest = hashlib.sha256(self.lengths[start:end].astype("<i4").tobytes()).digest()
                row[len(COUNTS) :] = np.frombuffer(digest, "<i4")
            return rows
        batch = np.repeat(np.arange(counts.size), counts)
        place = np.arange(self.lengths.size) - self.offsets[batch]
        fits = place < most
        rows[batch[fits], len(COUNTS) + place[fits]] = self.lengths[fits]
        return rows


@dataclasses.dataclass(frozen=True)
class StepPlace:
    """A rank's place: optimizer steps done, the place in the plan, the mode and the plan's fingerprint (hex)."""

    step: int
    state: PlanState
    mode: str
    plan: str

    def words(self, flag: int) -> np.ndarray:
        """Return the head of a report, [HEAD_WORDS] int32."""
        head = [flag, self.step, self.state.epoch, self.state.step, MODES.index(self.mode)]
        plan = np.frombuffer(bytes.fromhex(self.plan), "<i4")
        return np.concatenate([np.array(head, np.int32), plan])


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """A step's counts over all ranks and micro-batches.

    Attributes:
        real, computed, supervised: tokens of samples, tokens with padding, tokens with a loss.
        segments: samples.
        stop: whether a rank was asked to stop before this step.
    """

    real: int
    computed: int
    supervised: int
    segments: int
    stop: bool

    def metrics(self) -> dict[str, Any]:
        """Return the counts under their names in metrics.jsonl."""
        return {
            "tokens_real": self.real,
            "tokens_computed": self.computed,
            "tokens_supervised": self.supervised,
            "segments": self.segments,
            "pad_ratio": 1 - self.real / self.computed,
        }


class StepReports:
    """Exchanges reports and compares them with the plan.

    Args:
        exchange: between the ranks of this run.
        micro_batches: per step and rank.
        most: samples of a micro-batch.
    """

    def __init__(self, exchange: Exchange, micro_batches: int, most: int):
        self._exchange, self._most = exchange, most
        self._hashed = exchange.ranks.size * micro_batches * most > MOST_LENGTHS

    def check(
        self, place: StepPlace, found: StepLengths | VarlenError, planned: StepLengths, stop: bool = False
    ) -> StepCounts:
        """Exchange reports, and compare the lengths of every rank with the plan.

        Args:
            place: where this rank is.
            found: the lengths of its micro-batches, or the error that prevented them.
            planned: the lengths of all ranks.
            stop: whether this rank was asked to stop.
        Raises:
            VarlenError: `found`.
            RanksError: a rank is at another place, has other lengths than planned, or failed; raised on all ranks.
        """
        expected = planned.words(self._most, self._hashed)
        failure = found if isinstance(found, VarlenError) else None
        mine = np.zeros_like(expected[:1]) if isinstance(found, VarlenError) else found.words(self._most, self._hashed)
        rows = np.resize(mine, (expected.shape[0] // self._exchange.ranks.size, expected.shape[1]))
        flag = FAILED if failure else STOP if stop else GO
        reports = self._exchange.gather_words(np.concatenate([place.words(flag), rows.ravel()]))
        _check_heads(reports[:, :HEAD_WORDS])
        if (reports[:, 0] == FAILED).any():
            self._exchange.together(lambda: _raise(failure))
        reported = reports[:, HEAD_WORDS:].reshape(expected.shape)
        self._check_rows(place.step + 1, reported, expected)
        segments, computed, real, supervised = reported[:, : len(COUNTS)].sum(axis=0, dtype=np.int64).tolist()
        return StepCounts(real, computed, supervised, segments, bool((reports[:, 0] == STOP).any()))

    def _check_rows(self, step: int, reported: np.ndarray, expected: np.ndarray) -> None:
        wrong = reported != expected
        wrong[:, SUPERVISED] = False
        if not wrong.any():
            return
        row = int(np.argmax(wrong.any(axis=1)))
        rank, micro_batch = divmod(row, reported.shape[0] // self._exchange.ranks.size)
        column = int(np.argmax(wrong[row]))
        found, right = int(reported[row, column]), int(expected[row, column])
        if column < len(COUNTS):
            difference = f"{COUNTS[column]} must be {right} as planned, got {found}"
        elif self._hashed:
            difference = "the lengths must be those of the plan, got others (their hashes differ)"
        else:
            difference = f"seq_lens[{column - len(COUNTS)}] must be {right} as planned, got {found}"
        raise RanksError(
            f"step {step}: rank {rank} has other data than the plan gives it: {difference}, in its micro-batch "
            f"{micro_batch}; all ranks stop; give every rank the same token store, and change nothing on the way to "
            "the graph"
        )


def _check_heads(heads: np.ndarray) -> None:
    """Raise RanksError if a rank is at another place than rank 0."""
    wrong = heads[:, 1:] != heads[:1, 1:]
    if not wrong.any():
        return
    rank = int(np.argmax(wrong.any(axis=1)))
    word = 1 + int(np.argmax(wrong[rank]))
    name = HEAD[min(word, len(HEAD) - 1)]
    first, other = (_shown(name, heads[number], word) for number in (0, rank))
    raise RanksError(
        f"step {heads[0, 1] + 1}: all ranks must be at one place, but {name} is {other} on rank {rank} and {first} on "
        "rank 0; all ranks stop; start every rank with the same recipe and from the same checkpoint"
    )


def _shown(name: str, head: np.ndarray, word: int) -> str:
    if name == "plan":
        return head[-4:].astype("<i4").tobytes().hex()
    if name == "mode":
        return MODES[head[word]].value if 0 <= head[word] < len(MODES) else str(head[word])
    return str(head[word])


def _raise(failure: VarlenError | None) -> None:
    if failure is not None:
        raise failure
