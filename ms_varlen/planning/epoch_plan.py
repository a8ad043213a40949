"""The plan of one epoch: [step][rank][micro-batch] -> sample ids, and a place in it.

A plan is a pure function of (lengths, seed, epoch, batch settings, world size), so a place in it is three values:
epoch, step, and the fingerprint of what the plan was made from. Resuming is a look-up.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ms_varlen.errors import CheckpointError, DataError
from ms_varlen.planning.batching import row_offsets, token_budget_offsets


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """What a plan depends on besides the lengths.

    Attributes:
        policy: "token_budget" fills micro-batches with tokens, "rows" with a number of samples.
        size: the token budget, or the rows, per micro-batch and rank.
        max_segments: most samples of a micro-batch ("token_budget" only).
        micro_batches: per step and rank.
        world_size: number of ranks.
        seed: of the shuffle.
    """

    policy: Literal["token_budget", "rows"]
    size: int
    max_segments: int
    micro_batches: int
    seed: int
    world_size: int = 1

    def fingerprint(self, lengths_fingerprint: str) -> str:
        """A hash of the settings and of the lengths that a plan is made from."""
        text = json.dumps([dataclasses.asdict(self), lengths_fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class PlanState:
    """A place in the endless sequence of epochs: `step` steps of `epoch` are done."""

    epoch: int
    step: int
    fingerprint: str

    def to_dict(self) -> dict:
        """The state as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict, fingerprint: str) -> "PlanState":
        """Read a saved state.

        Raises:
            CheckpointError: it belongs to a plan of other lengths or settings.
        """
        state = cls(**values)
        if state.fingerprint != fingerprint:
            raise CheckpointError(
                f"plan.fingerprint must be {fingerprint} (this corpus and these batch settings), the checkpoint has "
                f"{state.fingerprint}; resume with the corpus and batch settings it was written with"
            )
        return state


class EpochPlan:
    """The micro-batches of one epoch.

    Args:
        lengths: [n] ints, tokens per sample.
        settings: see `PlanSettings`.
        epoch: number of the epoch; each has an order of its own. None keeps the samples in their order and leaves none
            over: the plan of an evaluation.
    Attributes:
        order: [n] int64, all sample ids in the order of training.
        offsets: [k+1] int64, where each micro-batch starts in `order`.
        num_steps: steps of this epoch.
        left_over: [m] sample ids of the epoch's end that do not fill a step; they are not trained in this epoch.
    """

    def __init__(self, lengths: np.ndarray, settings: PlanSettings, epoch: int | None):
        self.settings = settings
        if epoch is None:
            self.order = np.arange(lengths.size)
        else:
            self.order = np.random.default_rng([settings.seed, epoch]).permutation(lengths.size)
        if settings.policy == "rows":
            self.offsets = row_offsets(lengths.size, settings.size)
        else:
            self.offsets = token_budget_offsets(lengths[self.order], settings.size, settings.max_segments)
        per_step = settings.world_size * settings.micro_batches
        self.num_micro_batches = self.offsets.size - 1
        self.num_steps = self.num_micro_batches // per_step
        self.left_over = self.order[self.offsets[self.num_steps * per_step] :]
        if self.num_steps == 0:
            raise DataError(
                f"an epoch must fill at least one step ({per_step} micro-batches), got {self.num_micro_batches} "
                f"micro-batches from {lengths.size} samples; lower batch.micro_batches or batch.token_budget, or bring "
                "more data"
            )

    def micro_batch(self, step: int, micro_batch: int, rank: int = 0) -> np.ndarray:
        """[B] sample ids of one micro-batch, in their order on the token axis."""
        settings = self.settings
        index = (step * settings.world_size + rank) * settings.micro_batches + micro_batch
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def step_ids(self, step: int) -> np.ndarray:
        """All sample ids of a step, over all ranks and micro-batches."""
        per_step = self.settings.world_size * self.settings.micro_batches
        return self.order[self.offsets[step * per_step] : self.offsets[(step + 1) * per_step]]

    def trained_ids(self, steps: int) -> np.ndarray:
        """All sample ids of the first `steps` steps."""
        per_step = self.settings.world_size * self.settings.micro_batches
        return self.order[: self.offsets[steps * per_step]]


class EpochPlans:
    """The endless sequence of epoch plans over one set of lengths; the newest two are kept in memory.

    Args:
        lengths: [n] ints, tokens per sample.
        lengths_fingerprint: a hash of them.
        settings: see `PlanSettings`.
    """

    def __init__(self, lengths: np.ndarray, lengths_fingerprint: str, settings: PlanSettings):
        self.settings = settings
        self.fingerprint = settings.fingerprint(lengths_fingerprint)
        self._lengths = lengths
        self._plans: dict[int, EpochPlan] = {}

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch."""
        plan = self._plans.get(epoch)
        if plan is None:
            plan = EpochPlan(self._lengths, self.settings, epoch)
            kept = {e: p for e, p in self._plans.items() if e == epoch - 1}
            self._plans = {**kept, epoch: plan}
        return plan

    def start(self) -> PlanState:
        """The place before the first step."""
        return PlanState(0, 0, self.fingerprint)

    def after(self, state: PlanState) -> PlanState:
        """The place one step further on; an epoch's end is the next one's beginning."""
        if state.step + 1 < self.epoch(state.epoch).num_steps:
            return dataclasses.replace(state, step=state.step + 1)
        return PlanState(state.epoch + 1, 0, self.fingerprint)

    def steps_from(self, state: PlanState) -> Iterator[tuple[PlanState, EpochPlan]]:
        """The steps from a place on, without end: the place of each and the plan that holds it."""
        while True:
            yield state, self.epoch(state.epoch)
            state = self.after(state)
