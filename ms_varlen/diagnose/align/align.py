"""Alignment: the recipe's mode against dense padded attention, on the same samples, weights and seed.

The padded side shares nothing with `varlen_attention`: rows of one sample, a causal and length mask, plain operators.
It lays out the very steps of the recipe's plan, in as many micro-batches as they need. A wrong length, mask, position
or label shows as a difference of the loss. In fp32 the bound is far below the 1e-3 that users ask for, since only a
tight bound finds a wrong length. Before anything is compiled, the full mask is compared with the compressed one.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ms_varlen.checkpoint.resume import check_data
from ms_varlen.checkpoint.store import load_checkpoint, read_manifest
from ms_varlen.data.store.store import Progress
from ms_varlen.diagnose.align.alignment import Alignment, Bisection, Verdict, compare, gradient_difference
from ms_varlen.diagnose.align.bisection import bisect
from ms_varlen.diagnose.align.sides import Side, dense_side, other_side, parts_of_other
from ms_varlen.errors import RecipeError
from ms_varlen.modes import Mode
from ms_varlen.ops.compressed_mask import check_compressed_mask
from ms_varlen.planning.plan import PlanState
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.train.device import ASCEND, set_up_device
from ms_varlen.train.graphs import compile_graphs
from ms_varlen.train.loop import ids_hash, resumed_state
from ms_varlen.train.schedule import learning_rate
from ms_varlen.workload.workload import Workload, prepare

LOSS_TOLERANCE = {"CPU": 2e-5, ASCEND: 1e-3}
"""Largest difference of the loss by device (fp32 on a CPU, bf16 products on an NPU), unless the noise is larger."""

LOOSEST = 1e-3
NOISE_STEPS, NOISE_MULTIPLE = 3, 40
"""The noise floor is the effect of rounding alone: the change of the other side's loss at equal weights when its rows
come in another order. Over 100 steps two healthy trainings drift apart by about ten times the floor."""

GRADIENT_TOLERANCE = {"CPU": 1e-5, ASCEND: 2e-2}
"""Largest relative difference of the first step's gradients, by device."""

LATER_GRADIENT_TOLERANCE = {"CPU": 1e-3, ASCEND: 1e-1}
"""The same for later steps. Two trainings drift apart by rounding, and a rare step is so sensitive that their gradients
differ by 1e-2. A gradient beyond the limit is therefore computed again at equal weights, and only that result counts.
One segment end a token off moves the loss of its step by as little as 1e-5, but some gradient by more than 1e-2."""


def align(
    recipe: Recipe,
    steps: int,
    on_step: Callable[[int, float, float], None],
    tolerance: float | None = None,
    progress: Progress | None = None,
    start_from: Path | None = None,
    against: Mode = Mode.PADDED,
) -> Alignment:
    """Train both sides for `steps` optimizer steps and compare them.

    Args:
        recipe: a valid recipe; its mode is compared with another.
        steps: optimizer steps to run.
        on_step: called with the step and both losses.
        tolerance: largest difference of the loss; by default `NOISE_MULTIPLE` times the noise floor, at least
            `LOSS_TOLERANCE` and at most `LOOSEST`.
        progress: called with the progress of the token store, if one is built.
        start_from: a checkpoint of any mode, whose weights, moments and place in the epoch both sides begin with.
        against: the other side: "padded" (dense scores under a full mask, which shares nothing with
            `varlen_attention`), or another layout through `varlen_attention`.
    Raises:
        RecipeError: a tolerance that is not positive.
        VarlenError: the compressed mask does not mean the full one.
    """
    begin = time.perf_counter()
    if tolerance is not None and not tolerance > 0:
        raise RecipeError([f"--tolerance: must be > 0, got {tolerance}; leave it out to measure the noise"], "align")
    workload = prepare(recipe, progress)
    check_compressed_mask(workload.store.train.longest)
    target = set_up_device(recipe.device, recipe.graph)
    ours, other = Side(workload, target, None), Side(*other_side(workload, target, against))
    compile_graphs(recipe.graph, ours.graphs, other.graphs)
    place, done = _begin(workload, start_from, ours, other)
    comparison = Comparison(ours, other, against, tolerance)
    hashes = []
    for step, (state, plan) in enumerate(workload.plan_steps(place, steps), start=1):
        parts = [plan.micro_batch(state.step, m) for m in range(recipe.batch.micro_batches)]
        comparison.step(parts, learning_rate(recipe.train, done + step))
        hashes.append(ids_hash(plan.step_ids(state.step)))
        on_step(step, *comparison.losses[-1])
    return Alignment(
        recipe=recipe.checkpoint.output_dir.name,
        mode=recipe.mode,
        steps=steps,
        first_step=done,
        verdict=comparison.verdict(),
        against=against,
        noise_floor=comparison.noise,
        bisect=comparison.found,
        sample_ids_sha256=hashes,
        versions=ours.graphs.versions,
        seconds=round(time.perf_counter() - begin, 1),
    )


class Comparison:
    """Two sides, trained step by step on the same samples and compared in each.

    Args:
        ours: the recipe's side.
        other: the side to compare with.
        against: its layout.
        tolerance: largest difference of the loss; None measures the noise floor.
    Attributes:
        losses: of both sides, by step.
        noise: the noise floor; None until it is measured, 0 if the caller gave a tolerance.
        found: where the first failed step begins to differ; None if none failed.
    """

    def __init__(self, ours: Side, other: Side, against: Mode, tolerance: float | None):
        self._ours, self._other, self._against = ours, other, against
        self._limit = LOSS_TOLERANCE[ours.target] if tolerance is None else tolerance
        self.noise: float | None = 0.0 if tolerance is None else None
        self._gradients: list[tuple[float, str]] = []
        self.found: Bisection | None = None
        self.losses: list[tuple[float, float]] = []

    def step(self, parts: list[np.ndarray], rate: float) -> None:
        """Compute a step's losses and gradients on both sides, compare them, and apply them.

        Args:
            parts: sample ids of the micro-batches of the recipe's side.
            rate: learning rate.
        """
        ours, other = self._ours, self._other
        rows = parts_of_other(np.concatenate(parts), ours.workload.store.train.lengths, other.workload.layout)
        accumulated_ours = ours.accumulate(parts)
        if self.noise is not None and len(self.losses) < NOISE_STEPS:
            self.noise = max(self.noise, other.noise(rows))
            loosest = max(LOOSEST, LOSS_TOLERANCE[ours.target])
            self._limit = min(max(self._limit, NOISE_MULTIPLE * self.noise), loosest)
        accumulated_other = other.accumulate(rows)
        self._gradients.append(self._gradient_difference(rows))
        self.losses.append((accumulated_ours.loss, accumulated_other.loss))
        if self.found is None and not self._within():
            self.found = _where_it_begins(ours, parts, other, rows, self._against)
        ours.graphs.apply(rate, accumulated_ours)
        other.graphs.apply(rate, accumulated_other)

    def _gradient_difference(self, rows: list[np.ndarray]) -> tuple[float, str]:
        """Compare the accumulated gradients; at equal weights if those of a later step are beyond their limit."""
        ours, other = self._ours.graphs, self._other
        found = gradient_difference(ours.gradients(), other.graphs.gradients())
        if self.losses and not found[0] <= LATER_GRADIENT_TOLERANCE[self._ours.target]:
            found = gradient_difference(ours.gradients(), other.gradients_at(ours.model_weights(), rows))
            other.accumulate(rows)
        return found

    def _within(self) -> bool:
        """Return whether the last step is within all limits; a NaN is not."""
        limits = GRADIENT_TOLERANCE if len(self.losses) == 1 else LATER_GRADIENT_TOLERANCE
        loss, loss_other = self.losses[-1]
        return abs(loss - loss_other) <= self._limit and self._gradients[-1][0] <= limits[self._ours.target]

    def verdict(self) -> Verdict:
        """Judge all steps so far."""
        target = self._ours.target
        limits = self._limit, GRADIENT_TOLERANCE[target], LATER_GRADIENT_TOLERANCE[target]
        return compare(self.losses, self._gradients, *limits)


def _where_it_begins(
    ours: Side, parts: list[np.ndarray], other: Side, other_parts: list[np.ndarray], against: Mode
) -> Bisection:
    """Compare the recipe's side of a failed step with dense padded rows, and then the other side if ours agrees."""
    weights = ours.graphs.model_weights()
    dense = dense_side(ours.workload, ours.target)[2]
    found = bisect(ours.workload, parts, weights, ours.graphs.attention, dense)
    if against is Mode.PADDED or found.rung is not None:
        return found
    found = bisect(other.workload, other_parts, weights, other.graphs.attention, dense)
    if found.rung is None:
        words = f"the recipe's layout and --against {against} both agree with dense rows: drift"
    else:
        words = f"the recipe's layout agrees with dense rows, --against {against} does not: {found.text}"
    return dataclasses.replace(found, text=words)


def _begin(workload: Workload, start_from: Path | None, *sides: Side) -> tuple[PlanState, int]:
    """Return the first place in the plan and the steps done before; load the checkpoint into both sides."""
    if start_from is None:
        return workload.plans.start(), 0
    mode = read_manifest(start_from)["mode"]
    checkpoint = load_checkpoint(start_from, mode, sides[0].graphs.parameter_shapes())
    for side in sides:
        side.graphs.load(checkpoint.model, checkpoint.optimizer)
    # An imported checkpoint has no place in a plan.
    saved = checkpoint.state.get("plan")
    if not saved:
        return workload.plans.start(), checkpoint.step
    check_data(start_from, checkpoint.manifest, workload.store.fingerprint)
    return resumed_state(workload.plans, saved, []), checkpoint.step
