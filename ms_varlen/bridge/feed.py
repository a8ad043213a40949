"""The rows that a rank of MindFormers' Trainer is fed with: planned by us, looked up by MindFormers' step.

MindFormers counts steps and forgets where samples came from, so everything here is a function of its step count: row
`i` of a rank belongs to step ``i // batch_size``, and step `n` has a place in our endless sequence of epoch plans. Two
packed rows of 8 tokens with 4 entries, samples [3, 2] and [4, 4]::

    input_ids       a a a b b . . .     c c c c d d d d
    labels          a a . b . . . .     c c c . d d d .      . = -100, shifted once, inside a sample
    loss_mask       1 1 0 1 0 0 0 0     1 1 1 0 1 1 1 0
    position_ids    0 1 2 0 1 0 1 2     0 1 2 3 0 1 2 3
    actual_seq_len  3 5 8 8             4 8 8 8              running ends, filled with T

MindFormers adds the offset of each row of a micro-batch to `actual_seq_len` when it batches, so a row starts at 0 here.
"""

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.micro_batch import Columns, MicroBatch
from ms_varlen.bridge.config import LoaderConfig, check_columns, dynamic_length, read_loader_config
from ms_varlen.errors import LengthsError
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.planning.balance import imbalance
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.plan import EpochPlan, PlanState
from ms_varlen.workload.summary import micro_batch_flops
from ms_varlen.workload.workload import Workload, prepare, prepare_on


def packed_row(columns: MicroBatch, entries: int) -> Columns:
    """A micro-batch of ours as one row of MindFormers' TND route.

    Args:
        columns: `input_ids`, `labels`, `position_ids` [T] and `actual_seq_qlen` [G], int32.
        entries: size of `actual_seq_len`.
    Returns:
        `input_ids`, `labels`, `loss_mask`, `position_ids` [T] and `actual_seq_len` [entries], int32 (host).
    Raises:
        LengthsError: more segments than entries.
    """
    ends, tokens = columns["actual_seq_qlen"], columns["input_ids"].size
    if ends.size > entries:
        raise LengthsError(
            f"actual_seq_len must have at most {entries} entries (compressed_eod_mask_length), got {ends.size} "
            f"segments; set train_dataset.data_loader.compressed_eod_mask_length to {ends.size} or more"
        )
    filled = np.full(entries, tokens, np.int32)
    filled[: ends.size] = ends
    return {**_token_columns(columns), "actual_seq_len": filled}


def padded_row(columns: MicroBatch, row: int, rows: int, cut: bool) -> Columns:
    """One row of a padded micro-batch of ours.

    Args:
        columns: `input_ids`, `labels`, `position_ids` [rows * S] and `seq_lens` [B], int32; B <= rows.
        row: its number; a row beyond the samples holds pads only.
        rows: rows of the micro-batch.
        cut: leave out the pads at its end (one stays in a row of pads), for MindFormers to pad.
    Returns:
        `input_ids`, `labels`, `loss_mask`, `position_ids` [S], or as long as the sample, int32 (host).
    """
    lengths = columns["seq_lens"]
    length = columns["input_ids"].size // rows
    end = length if not cut else int(lengths[row]) if row < lengths.size else 1
    part = slice(row * length, row * length + end)
    return {name: values[part] for name, values in _token_columns(columns).items()}


def _token_columns(columns: MicroBatch) -> Columns:
    labels = columns["labels"]
    return {
        "input_ids": columns["input_ids"],
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).astype(np.int32),
        "position_ids": columns["position_ids"],
    }


class Feed:
    """The rows of one rank, by number, and what each step holds over all ranks.

    Args:
        config: the loader's keys.
        workload: the corpus and the plan, for all ranks.
        columns: what MindFormers asks for.
        batch_size: rows of a step and rank.
        rank: this one, of `workload.plans.settings.world_size`.
    Attributes:
        steps: of the whole run.
    """

    def __init__(
        self, config: LoaderConfig, workload: Workload, columns: tuple[str, ...], batch_size: int = 1, rank: int = 0
    ):
        self.config, self.workload, self.columns = config, workload, columns
        self.batch_size, self.rank = batch_size, rank
        store = workload.store
        self._batches = MicroBatches(store.train, workload.layout, store.pad_id, lambda lens: {})
        self._epoch_starts, self._lock = [0], threading.Lock()
        self._cost = CostModel.of_decoder(workload.model_config)
        self._newest: tuple[int, MicroBatch] | None = None
        self.steps = config.steps or workload.plans.epoch(0).num_steps

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def place(self, steps: int) -> PlanState:
        """The place in our plans after `steps` steps of MindFormers."""
        starts, plans = self._epoch_starts, self.workload.plans
        with self._lock:  # MindFormers asks for rows in a thread of its own, the monitor for figures in another
            while starts[-1] <= steps:
                starts.append(starts[-1] + plans.epoch(len(starts) - 1).num_steps)
        epoch = bisect.bisect_right(starts, steps) - 1
        return PlanState(epoch, steps - starts[epoch])

    def row(self, index: int) -> Columns:
        """Row `index` of this rank: the columns of `packed_row` or `padded_row`."""
        step, row = divmod(index, self.batch_size)
        state, plan = self._plan(step)
        if self.config.packed:
            columns = self._batches.micro_batch(plan.micro_batch(state.step, row, self.rank))
            return packed_row(columns, self.config.compressed_eod_mask_length)
        if self._newest is None or self._newest[0] != step:
            self._newest = (step, self._batches.micro_batch(plan.micro_batch(state.step, 0, self.rank)))
        return padded_row(self._newest[1], row, self.batch_size, cut=self.config.pad_to == "batch")

    def _plan(self, step: int) -> tuple[PlanState, EpochPlan]:
        state = self.place(step)
        return state, self.workload.plans.epoch(state.epoch)

    def sample_ids(self, step: int) -> np.ndarray:
        """[n] int64, the samples of a step over all ranks."""
        state, plan = self._plan(step)
        return plan.step_ids(state.step)

    def figures(self, step: int) -> dict[str, Any]:
        """What a step holds over all ranks, under the names of metrics.jsonl; `imbalance` is max / mean - 1 of work."""
        state, plan = self._plan(step)
        settings = plan.settings
        ids = plan.step_ids(state.step)
        lengths, offsets = np.asarray(self.workload.store.train.lengths[ids]), plan.step_offsets(state.step)
        real = int(lengths.sum(dtype=np.int64))
        computed, flops = self._work(lengths, offsets)
        work = flops.reshape(settings.world_size, settings.micro_batches).sum(axis=1)
        return {
            "epoch": state.epoch,
            "tokens_real": real,
            "tokens_computed": int(computed.sum()),
            "tokens_supervised": self._supervised(ids, lengths),
            "segments": int(ids.size),
            "pad_ratio": 1 - real / int(computed.sum()),
            "imbalance": float(imbalance(work)),
        }

    def _work(self, lengths: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each micro-batch [k], padding included, and its FLOPs [k]."""
        layout, config = self.workload.layout, self.config
        if config.divisor is None or config.remainder is None:
            return layout.computed_tokens(lengths, offsets), micro_batch_flops(layout, self._cost, lengths, offsets)
        longest = np.maximum.reduceat(lengths, offsets[:-1])
        rows = np.array([dynamic_length(int(tokens), config.divisor, config.remainder) for tokens in longest])
        return self.batch_size * rows, self.batch_size * self._cost.cost(rows)

    def _supervised(self, ids: np.ndarray, lengths: np.ndarray) -> int:
        """Tokens with a label: the supervised ones, but for the first of each sample, which nothing predicts."""
        supervised = self.workload.store.train.gather_supervised(ids)
        if supervised is None:
            return int((lengths - 1).sum(dtype=np.int64))
        return int(supervised.sum() - supervised[np.cumsum(lengths) - lengths].sum())

    def ledger(self, steps: int) -> dict[str, dict[str, Any]]:
        """Where the tokens and the samples of the epoch in progress, or just finished, are, by unit."""
        state = self.place(steps)
        if state.step == 0 and state.epoch > 0:
            epoch = state.epoch - 1
            state = PlanState(epoch, self.workload.plans.epoch(epoch).num_steps)
        parts = self.workload.ledger(state.epoch, state.step)
        return {unit: part.to_dict() for unit, part in parts.items()}

    def plan_state(self, steps: int) -> dict[str, Any]:
        """The place after `steps` steps as `EpochPlans.resume` takes it."""
        return self.workload.plans.to_dict(self.place(steps))


def open_feed(
    keys: dict[str, Any], columns: Sequence[str] | None, batch_size: int = 1, rank: int = 0, world_size: int = 1
) -> Feed:
    """Read the loader's keys, open or build the token store, and plan.

    Args:
        keys: the section `train_dataset.data_loader` without `type` and `auto_register`.
        columns: `train_dataset.input_columns`.
        batch_size: rows of a step and rank.
        rank: of the data-parallel ranks.
        world_size: number of data-parallel ranks.
    Raises:
        VarlenError: what is wrong with the keys or the corpus.
    """
    config = read_loader_config(keys)
    names = check_columns(config, columns)
    store = config.open_store()
    longest = config.longest_sample or (config.seq_length if store is None else store.train.longest)
    recipe = config.recipe(batch_size, longest)
    workload = prepare(recipe, None, world_size) if store is None else prepare_on(recipe, store, world_size)
    return Feed(config, workload, names, batch_size, rank)


@dataclasses.dataclass
class _Opened:
    feed: Feed | None = None


_opened = _Opened()


def remember(feed: Feed) -> None:
    """Make this the feed of the process: the monitor, which MindFormers builds apart from the loader, asks for it."""
    _opened.feed = feed


def remembered_feed() -> Feed | None:
    """The feed of the loader that was built last, if any."""
    return _opened.feed
