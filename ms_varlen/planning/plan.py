"""The plan of one epoch: [step][rank][micro-batch] -> sample ids, and a place in it.

A plan is a pure function of (lengths, seed, epoch, batch settings, world size), so a place in it is three values:
epoch, step, and the fingerprint of what the plan was made from. Resuming is a look-up. When the settings change in the
middle of an epoch, the samples that were trained are remembered, and the rest of the epoch is planned again.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ms_varlen.errors import CheckpointError, DataError, LengthsError
from ms_varlen.modes import Policy
from ms_varlen.planning.balance import (
    StepGrid,
    balance_micro_batches,
    balance_plan,
    micro_batch_costs,
    steps_of_like_costs,
)
from ms_varlen.planning.batches import Batches, row_offsets, token_budget_offsets
from ms_varlen.planning.buckets import bucket_of
from ms_varlen.planning.cost import CostModel, tail_squares
from ms_varlen.planning.packing import pack_shuffled
from ms_varlen.planning.remainder import TrainedSet, original_ids
from ms_varlen.planning.rows import bucket_rows, bucketed_batches, windowed_batches

ADDED = {"divisor": 1, "token_sizes": (), "seq_length": 1}
"""Fields added after format 1, with the old behaviour as default. At that value they stay out of the fingerprint, so
old checkpoints still resume."""

SharePlan = Callable[[str, Callable[[], Batches]], Batches]
"""share(key, make): return the plan stored under `key`; call `make` only if no process on this node has made it yet."""


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """Everything that a plan depends on, except the lengths.

    Attributes:
        policy: "token_budget" cuts a shuffled order at the budget, "packed" fits samples until it is full, "bucketed"
            puts rows of the same bucket together, "rows" counts samples.
        size: the token budget (for "bucketed" of padded rows), or the rows, per micro-batch and rank.
        max_segments: most samples of a micro-batch.
        micro_batches: per step and rank.
        seed: seed of the shuffle.
        world_size: number of ranks.
        row_lengths: lengths that rows may have, in tokens, increasing ("bucketed", and "rows" with a window).
        window: samples that are sorted by length together ("rows" only); None sorts nothing.
        quadratic_cost: work of a sequence of s tokens is ``s + quadratic_cost * s * s``; ranks are balanced by it.
        divisor: T of a micro-batch is its tokens rounded up to a multiple of it; the padding is part of its work
            ("token_budget" with several ranks only, and so the next two).
        token_sizes: what T may be instead, in tokens, increasing.
        seq_length: longest segment of a padded tail, in tokens.
    """

    policy: Policy
    size: int
    max_segments: int
    micro_batches: int
    seed: int
    world_size: int = 1
    row_lengths: tuple[int, ...] = ()
    window: int | None = None
    quadratic_cost: float = 0.0
    divisor: int = 1
    token_sizes: tuple[int, ...] = ()
    seq_length: int = 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PlanSettings":
        """Settings that were written as JSON."""
        tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **tuples})

    def fingerprint(self, lengths_fingerprint: str) -> str:
        """A hash of the settings and of the lengths that a plan is made from."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in ADDED or v != ADDED[k]}
        text = json.dumps([values, lengths_fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def per_step(self) -> int:
        """Micro-batches of a step over all ranks."""
        return self.world_size * self.micro_batches

    def computed_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """T of micro-batches that hold so many tokens, as far as the plan knows: [...] ints of [...] ints."""
        if self.token_sizes:
            return np.array(self.token_sizes)[np.searchsorted(self.token_sizes, tokens)]
        return -(-tokens // self.divisor) * self.divisor


@dataclasses.dataclass(frozen=True)
class PlanState:
    """A place in the endless sequence of epochs: `step` steps of `epoch`, or of what remained of it, are done."""

    epoch: int
    step: int


class EpochPlan:
    """The micro-batches of one epoch.

    Args:
        lengths: [n] ints, tokens per sample.
        settings: see `PlanSettings`.
        epoch: number of the epoch; each has its own order. None (evaluation) keeps the samples in their order and
            leaves none over.
        remaining: [m] sample ids, ascending, of an epoch that was begun under other settings; by default all.
        share: called with the function that makes the micro-batches; returns its result. By default calls it.
    Attributes:
        batches: all micro-batches in the order of training, those left over included.
        num_steps: steps of this epoch.
        left_over: [m] sample ids of the epoch's end that do not fill a step; they are not trained in this epoch.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        settings: PlanSettings,
        epoch: int | None,
        remaining: np.ndarray | None = None,
        share: Callable[[Callable[[], Batches]], Batches] | None = None,
    ):
        self.settings = settings
        planned = lengths if remaining is None else lengths[remaining]
        if planned.size and int(planned.min()) < 1:
            sample = int(np.argmin(planned))
            raise LengthsError(
                f"lengths[{sample}] must be >= 1, got {int(planned[sample])}; give each sample's tokens, and remove "
                "empty ones (data.min_tokens does)"
            )

        def make() -> Batches:
            batches = _micro_batches(planned, settings, epoch)
            if settings.per_step > 1 and epoch is not None and len(batches):
                batches = _balanced(planned, settings, epoch, batches)
            if remaining is None:
                return batches
            return dataclasses.replace(batches, order=original_ids(batches.order, remaining))

        self.batches = make() if share is None else share(make)
        self.num_steps = len(self.batches) // settings.per_step
        self.left_over = self.batches.ids(self.num_steps * settings.per_step, len(self.batches))
        if self.num_steps == 0 and remaining is None:
            raise DataError(
                f"an epoch must fill at least one step ({settings.per_step} micro-batches), got "
                f"{len(self.batches)} micro-batches from {lengths.size} samples; lower batch.micro_batches or "
                "batch.token_budget, use fewer ranks, or bring more data"
            )

    def micro_batch(self, step: int, micro_batch: int, rank: int = 0) -> np.ndarray:
        """[B] sample ids of one micro-batch, in their order on the token axis."""
        index = (step * self.settings.world_size + rank) * self.settings.micro_batches + micro_batch
        return self.batches.ids(index, index + 1)

    def step_ids(self, step: int) -> np.ndarray:
        """All sample ids of a step, over all ranks and micro-batches."""
        per_step = self.settings.per_step
        return self.batches.ids(step * per_step, (step + 1) * per_step)

    def trained_ids(self, steps: int) -> np.ndarray:
        """All sample ids of the first `steps` steps."""
        return self.batches.ids(0, steps * self.settings.per_step)

    def step_offsets(self, step: int) -> np.ndarray:
        """[per_step + 1] int64, where each micro-batch of a step starts in `step_ids`."""
        per_step = self.settings.per_step
        offsets = self.batches.offsets[step * per_step : (step + 1) * per_step + 1]
        return offsets - offsets[0]


def _micro_batches(lengths: np.ndarray, settings: PlanSettings, epoch: int | None) -> Batches:
    """An epoch's micro-batches; without an epoch, close to the samples' own order."""
    rng = None if epoch is None else np.random.default_rng([settings.seed, epoch])
    if settings.policy == "packed" and rng is not None:
        return pack_shuffled(lengths, settings.size, settings.max_segments, rng)
    order = np.arange(lengths.size) if rng is None else rng.permutation(lengths.size)
    row_lengths = np.array(settings.row_lengths)
    if settings.policy == "bucketed":
        rows = bucket_rows(row_lengths, settings.size, settings.max_segments)
        return bucketed_batches(lengths, order, row_lengths, rows, rng)
    if settings.policy == "rows":
        if settings.window is None or rng is None:
            return Batches(order, row_offsets(lengths.size, settings.size))
        return windowed_batches(lengths, order, settings.window, settings.size, row_lengths, rng)
    return Batches(order, token_budget_offsets(lengths[order], settings.size, settings.max_segments))


def _balanced(lengths: np.ndarray, settings: PlanSettings, epoch: int, batches: Batches) -> Batches:
    """The plan, dealt over ranks so that each has about the same work in a step.

    The samples of a step depend on the number of its micro-batches alone, not on the number of ranks. "bucketed" is the
    exception: one rank wants its buckets mixed, several ranks want to finish together.
    """
    cost = CostModel(1.0, settings.quadratic_cost)

    def costs_of(ids: np.ndarray) -> np.ndarray:
        return cost.cost(lengths[ids])

    if settings.policy == "token_budget":
        tokens = np.arange(settings.size + 1)
        padding = settings.computed_tokens(tokens) - tokens
        work = padding + settings.quadratic_cost * tail_squares(padding, settings.seq_length)
        grid = StepGrid(settings.world_size, settings.micro_batches, settings.size, settings.max_segments, work)
        return balance_plan(lengths, costs_of, batches, grid)
    # Rows of one length and samples that fill a pack stay together, so deal whole micro-batches.
    costs = micro_batch_costs(costs_of, batches)
    if settings.policy != "packed":
        in_order = lengths[batches.order]
        longest, rows = batches.maxima(in_order), batches.sizes
        if settings.policy == "bucketed":  # padding is no part of a sample's attention
            row_lengths = np.array(settings.row_lengths)[bucket_of(longest, np.array(settings.row_lengths))]
            costs += row_lengths * rows - batches.sums(in_order)
        else:
            costs = cost.cost(longest) * rows
    chosen = np.arange(costs.size)
    if settings.world_size > 1 or settings.policy != "bucketed":
        rng = np.random.default_rng([settings.seed, epoch, 1])
        chosen = steps_of_like_costs(costs, settings.per_step, rng)
    dealt = balance_micro_batches(costs[chosen], settings.world_size, settings.micro_batches)
    return batches.reordered(chosen[dealt])


class EpochPlans:
    """The endless sequence of epoch plans over one set of lengths; the newest two are kept in memory.

    Args:
        lengths: [n] ints, tokens per sample.
        lengths_fingerprint: a hash of them.
        settings: see `PlanSettings`.
        share: shares plans between processes; by default each process makes its own.
    Attributes:
        lengths: as given.
        fingerprint: of the lengths and the settings.
    """

    def __init__(
        self, lengths: np.ndarray, lengths_fingerprint: str, settings: PlanSettings, share: SharePlan | None = None
    ):
        self.settings = settings
        self._share = share
        self.fingerprint = settings.fingerprint(lengths_fingerprint)
        self.lengths, self._lengths_fingerprint = lengths, lengths_fingerprint
        self._plans: dict[int, EpochPlan] = {}
        self._remainder: tuple[int, TrainedSet] | None = None

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, or of its rest if the settings changed within it."""
        plan = self._plans.get(epoch)
        if plan is None:
            remaining = None
            if self._remainder is not None and self._remainder[0] == epoch:
                remaining = self._remainder[1].remaining_ids()
            plan = EpochPlan(self.lengths, self.settings, epoch, remaining, self._shared(epoch))
            kept = {e: p for e, p in self._plans.items() if e == epoch - 1}
            self._plans = {**kept, epoch: plan}
        return plan

    def _shared(self, epoch: int) -> Callable[[Callable[[], Batches]], Batches] | None:
        if self._share is None:
            return None
        name = f"{self.fingerprint}-{epoch}-{self.trained_before(epoch).fingerprint}"
        return functools.partial(self._share, name)

    def trained(self, state: PlanState) -> TrainedSet:
        """The trained samples of the epoch in progress, under these settings and earlier ones."""
        before = self.trained_before(state.epoch)
        return before.with_ids(self.epoch(state.epoch).trained_ids(state.step))

    def trained_before(self, epoch: int) -> TrainedSet:
        """The samples of an epoch that were trained under earlier settings; its plan holds the others."""
        if self._remainder is not None and self._remainder[0] == epoch:
            return self._remainder[1]
        return TrainedSet.none(self.lengths.size, self._lengths_fingerprint)

    def is_new(self, state: PlanState) -> bool:
        """Whether no sample of the epoch in progress was trained yet, under any settings."""
        return state.step == 0 and not self.trained_before(state.epoch).count

    def start(self) -> PlanState:
        """The place before the first step."""
        return PlanState(0, 0)

    def after(self, state: PlanState) -> PlanState:
        """The place after the next step; an epoch's end is the beginning of the next."""
        return self._whole(PlanState(state.epoch, state.step + 1))

    def _whole(self, state: PlanState) -> PlanState:
        """The same place; the end of an epoch becomes the beginning of the next."""
        if state.step < self.epoch(state.epoch).num_steps:
            return state
        return PlanState(state.epoch + 1, 0)

    def steps_from(self, state: PlanState) -> Iterator[tuple[PlanState, EpochPlan]]:
        """Yield all following steps without end: the place of each and its plan."""
        while True:
            yield state, self.epoch(state.epoch)
            state = self.after(state)

    def to_dict(self, state: PlanState) -> dict[str, Any]:
        """A place as JSON values, complete enough to resume under other settings."""
        before = self.trained_before(state.epoch)
        return {
            "epoch": state.epoch,
            "step": state.step,
            "fingerprint": self.fingerprint,
            "settings": dataclasses.asdict(self.settings),
            "trained_before": before.to_dict() if before.count else None,
        }

    def resume(self, values: dict[str, Any]) -> PlanState:
        """The saved place, under the settings that it was saved with.

        Raises:
            CheckpointError: it belongs to a plan of other lengths or settings.
        """
        if values["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"plan.fingerprint must be {self.fingerprint} (this corpus and these batch settings), the checkpoint "
                f"has {values['fingerprint']}; resume with the corpus and batch settings it was "
                "written with, or begin again with checkpoint.resume=never",
                "CKPT-RECIPE",
            )
        if values["trained_before"] is not None:
            self._begin_remainder(
                values["epoch"], TrainedSet.from_dict(values["trained_before"], self._lengths_fingerprint)
            )
        return PlanState(values["epoch"], values["step"])

    def resume_changed(self, values: dict[str, Any]) -> PlanState:
        """The place to resume at after mode, budget or world size changed: no sample is lost or repeated.

        Raises:
            CheckpointError: it belongs to another corpus.
        """
        old = EpochPlans(self.lengths, self._lengths_fingerprint, PlanSettings.from_dict(values["settings"]))
        trained = old.trained(old.resume(values))
        if not trained.count:
            return PlanState(values["epoch"], 0)
        self._begin_remainder(values["epoch"], trained)
        return self._whole(PlanState(values["epoch"], 0))

    def _begin_remainder(self, epoch: int, trained: TrainedSet) -> None:
        self._remainder = (epoch, trained)
        self._plans.clear()
