"""Alignment: the recipe's mode against dense padded attention, on the same samples, weights and seed.

The padded side shares nothing with `varlen_attention`: rows of one sample, a causal and length mask, plain operators.
It lays out the very steps of the recipe's plan, in as many micro-batches of `DENSE_ROWS` rows as they need. A wrong
length, mask, position or label shows as a difference of the loss. In fp32 the bound is far below the 1e-3 that users
ask for, since a tight bound is what finds a wrong length.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ms_varlen.checkpoint.same_data import check_data
from ms_varlen.checkpoint.store import load_checkpoint, read_manifest
from ms_varlen.data.dataset import MicroBatches
from ms_varlen.data.layouts import IGNORE_INDEX, Layout
from ms_varlen.data.store import Progress
from ms_varlen.diagnose.bisection import bisect
from ms_varlen.errors import RecipeError
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.lengths import SeqLens
from ms_varlen.ops.dense_attention import declared_dense_columns, dense_attention, dense_columns
from ms_varlen.planning.epoch_plan import PlanState
from ms_varlen.planning.windows import divisor_boundaries
from ms_varlen.train.device import ASCEND, set_up_device
from ms_varlen.train.graphs import AttentionPath, TrainingGraphs, compile_graphs
from ms_varlen.train.loop import ids_hash, resumed_state
from ms_varlen.train.recipe import Recipe
from ms_varlen.train.schedule import learning_rate
from ms_varlen.train.workload import Workload, prepare

DENSE_ROWS = 4
"""Rows of a micro-batch on the padded side."""

MOST_SEGMENTS = 128
"""Of a micro-batch on another side than the padded one."""

LOSS_TOLERANCE = {"CPU": 2e-5, ASCEND: 1e-3}
"""Largest difference of the loss by device (fp32 on a CPU, bf16 products on an NPU), where the noise is below it."""

Mode = Literal["padded", "bucketed", "packed", "varlen"]

LOOSEST = 1e-3
NOISE_STEPS, NOISE_MULTIPLE = 3, 40
"""The noise floor is what rounding alone does: the other side's loss with its rows in another order, at equal weights.
Over 100 steps two healthy trainings drift apart by some ten times of it."""

AGAINST: tuple[Mode, ...] = ("padded", "bucketed", "packed", "varlen")

GRADIENT_TOLERANCE = {"CPU": 1e-5, ASCEND: 2e-2}
"""Largest relative difference of the first step's gradients, by device."""

LATER_GRADIENT_TOLERANCE = {"CPU": 1e-3, ASCEND: 1e-1}
"""The same for later steps. Two trainings drift apart by rounding, and now and then a step is so sensitive that their
gradients differ by a hundredth: one beyond the limit is computed again at equal weights, and that one counts. One
segment end a token off moves the loss of its step by as little as 1e-5, but some gradient by more than 1e-2."""


def align(
    recipe: Recipe,
    steps: int,
    on_step: Callable[[int, float, float], None],
    tolerance: float | None = None,
    progress: Progress | None = None,
    start_from: Path | None = None,
    against: str = "padded",
) -> dict[str, Any]:
    """Train both sides for `steps` optimizer steps and compare them.

    Args:
        recipe: a valid recipe; its mode is compared with another.
        steps: optimizer steps to run.
        on_step: told the step and both losses.
        tolerance: largest difference of the loss; by default `NOISE_MULTIPLE` times the noise floor, at least
            `LOSS_TOLERANCE` and at most `LOOSEST`.
        progress: told how far the token store is, where one is built.
        start_from: a checkpoint of any mode, whose weights, moments and place in the epoch both sides begin with.
        against: the other side: "padded" (dense scores under a full mask, which shares nothing with
            `varlen_attention`), or another layout through `varlen_attention`.
    Returns:
        losses and relative differences of the gradients by step, `max_abs_diff`, `gradient_max_rel_diff` (first step),
        `gradient_max_rel_diff_later`, `first_failed_step`, `passed`, the tolerances, `first_step`, the steps that
        were done before, and `bisect`, where the first failed step begins to differ; None where none failed.
    Raises:
        RecipeError: a tolerance that is not positive, or no such layout.
    """
    begin = time.perf_counter()
    if tolerance is not None and not tolerance > 0:
        raise RecipeError([f"--tolerance: must be > 0, got {tolerance}; leave it out to measure the noise"], "align")
    workload = prepare(recipe, progress)
    target = set_up_device(recipe.device, recipe.graph)
    ours, padded = Side(workload, target, None), Side(*other_side(workload, target, against))
    compile_graphs(recipe.graph, ours.graphs, padded.graphs)
    place, done = _begin(workload, start_from, ours, padded)
    limit = LOSS_TOLERANCE[target] if tolerance is None else tolerance

    noise, found = 0.0, None
    losses: list[tuple[float, float]] = []
    gradients: list[tuple[float, str]] = []
    hashes = []
    for step, (state, plan) in enumerate(workload.plan_steps(place, steps), start=1):
        parts = [plan.micro_batch(state.step, m) for m in range(recipe.batch.micro_batches)]
        ids = plan.step_ids(state.step)
        rows = _parts_of_other(ids, workload.store.train.lengths, padded.workload.layout)
        supervised_ours = ours.accumulate(parts)
        if tolerance is None and step <= NOISE_STEPS:
            noise = max(noise, padded.noise(rows))
            limit = min(max(limit, NOISE_MULTIPLE * noise), max(LOOSEST, LOSS_TOLERANCE[target]))
        supervised = supervised_ours, padded.accumulate(rows)
        gradients.append(gradient_difference(ours.graphs.gradients(), padded.graphs.gradients()))
        if step > 1 and not gradients[-1][0] <= LATER_GRADIENT_TOLERANCE[target]:
            expected = padded.gradients_at(ours.graphs.model_weights(), rows)
            gradients[-1] = gradient_difference(ours.graphs.gradients(), expected)
            padded.accumulate(rows)
        losses.append((ours.loss(supervised[0]), padded.loss(supervised[1])))
        gradient_limit = (GRADIENT_TOLERANCE if step == 1 else LATER_GRADIENT_TOLERANCE)[target]
        if found is None and not (abs(losses[-1][0] - losses[-1][1]) <= limit and gradients[-1][0] <= gradient_limit):
            found = _where_it_begins(ours, parts, padded, rows, against)
        rate = learning_rate(recipe.train, done + step)
        ours.apply(rate, supervised[0])
        padded.apply(rate, supervised[1])
        hashes.append(ids_hash(ids))
        on_step(step, *losses[-1])
    return {
        "recipe": recipe.checkpoint.output_dir.name,
        "mode": recipe.mode,
        "steps": steps,
        "first_step": done,
        **compare(losses, gradients, limit, GRADIENT_TOLERANCE[target], LATER_GRADIENT_TOLERANCE[target]),
        "against": against,
        "noise_floor": noise if tolerance is None else None,
        "bisect": found,
        "sample_ids_sha256": hashes,
        "versions": ours.graphs.versions,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _where_it_begins(
    ours: "Side", parts: list[np.ndarray], other: "Side", other_parts: list[np.ndarray], against: str
) -> dict[str, Any]:
    """Both sides of a failed step against dense padded rows, which share nothing with either: the recipe's first."""
    weights = ours.graphs.model_weights()
    dense = dense_side(ours.workload, ours.target)[2]
    found = bisect(ours.workload, parts, weights, ours.graphs.attention, dense)
    if against == "padded" or found["rung"] is not None:
        return found
    found = bisect(other.workload, other_parts, weights, other.graphs.attention, dense)
    if found["rung"] is None:
        return found | {"text": f"the recipe's layout and --against {against} both agree with dense rows: drift"}
    words = f"the recipe's layout agrees with dense rows, --against {against} does not: {found['text']}"
    return found | {"text": words}


def _begin(workload: Workload, start_from: Path | None, *sides: "Side") -> tuple[PlanState, int]:
    """The place in the plan to begin at and the steps done before, with the sides' weights and moments as they were."""
    if start_from is None:
        return workload.plans.start(), 0
    mode = read_manifest(start_from)["mode"]
    checkpoint = load_checkpoint(start_from, mode, sides[0].graphs.parameter_shapes())
    for side in sides:
        side.graphs.load(checkpoint.model, checkpoint.optimizer)
    # What was imported from elsewhere has no place in a plan.
    saved = checkpoint.state.get("plan")
    if not saved:
        return workload.plans.start(), checkpoint.step
    check_data(start_from, checkpoint.manifest, workload.store.fingerprint)
    return resumed_state(workload.plans, saved, []), checkpoint.step


def compare(
    losses: list[tuple[float, float]],
    gradients: list[tuple[float, str]],
    loss_limit: float,
    gradient_limit: float,
    later_gradient_limit: float,
) -> dict[str, Any]:
    """Judge two trainings.

    Args:
        losses: of both sides, by step.
        gradients: by step, the largest relative difference of a parameter's gradient and that parameter's name.
        loss_limit: largest difference of the loss.
        gradient_limit: largest relative difference of the first step's gradients.
        later_gradient_limit: the same for later steps.
    Returns:
        the curves, the largest differences, the limits, and the first step beyond one of them (a NaN is beyond it).
    """
    loss, loss_padded = np.array(losses).T
    differences = np.abs(loss - loss_padded)
    relative = np.array([difference for difference, _ in gradients])
    limits = np.array([gradient_limit] + [later_gradient_limit] * (len(gradients) - 1))
    failed = np.flatnonzero(~((differences <= loss_limit) & (relative <= limits)))
    worst = int(np.argmax(relative / limits))
    return {
        "loss": loss.tolist(),
        "loss_padded": loss_padded.tolist(),
        "gradient_rel_diff": relative.tolist(),
        "max_abs_diff": float(differences.max()),
        "tolerance": loss_limit,
        "gradient_max_rel_diff": float(relative[0]),
        "gradient_tolerance": gradient_limit,
        "gradient_max_rel_diff_later": float(relative[1:].max(initial=0.0)),
        "gradient_tolerance_later": later_gradient_limit,
        "gradient_worst_parameter": gradients[worst][1],
        "first_failed_step": int(failed[0]) + 1 if failed.size else None,
        "passed": failed.size == 0,
    }


def gradient_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and that parameter's name.

    A parameter's difference is held against its own norm, or a thousandth of the whole gradient's where that is larger:
    some gradients are zero but for rounding (a key bias moves no softmax).
    """
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in expected.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values())))
    differences = {
        name: _relative(float(np.linalg.norm(found[name] - gradient)), max(norms[name], floor))
        for name, gradient in expected.items()
    }
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def _relative(difference: float, scale: float) -> float:
    """0 for equal gradients, of zeros too; infinity for what cannot be compared."""
    if difference == 0:
        return 0.0
    return difference / scale if np.isfinite(difference) and 0 < scale < np.inf else np.inf


@dataclasses.dataclass
class Side:
    """One of the two trainings."""

    workload: Workload
    target: str
    attention: AttentionPath | None

    def __post_init__(self):
        store = self.workload.store
        self.graphs = TrainingGraphs(self.workload, self.target, self.attention)
        self._batches = MicroBatches(store.train, self.workload.layout, store.pad_id, self.graphs.attention.columns)
        self._loss_sum = 0.0

    def accumulate(self, parts: list[np.ndarray]) -> int:
        """Add the gradient of micro-batches of sample ids; the number of supervised tokens."""
        supervised = 0
        self._loss_sum = 0.0
        for ids in parts:
            columns = self._batches.columns(ids)
            self._loss_sum += float(self.graphs.accumulate(columns).asnumpy())
            supervised += int((columns["labels"] != IGNORE_INDEX).sum())
        return supervised

    def gradients_at(self, weights: dict[str, np.ndarray], parts: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Gradient sums of micro-batches at other weights; this side's own weights stay, its accumulators are empty."""
        own = self.graphs.model_weights()
        self.graphs.clear_gradients()
        self.graphs.set_weights(weights)
        self.accumulate(parts)
        gradients = self.graphs.gradients()
        self.graphs.clear_gradients()
        self.graphs.set_weights(own)
        return gradients

    def noise(self, parts: list[np.ndarray]) -> float:
        """How much the loss of micro-batches moves when their samples change places; the accumulators stay empty."""
        losses = []
        for chosen in (parts, _in_other_places(parts, self.workload.layout)):
            supervised = self.accumulate(chosen)
            self.graphs.clear_gradients()
            losses.append(self.loss(max(supervised, 1)))
        return abs(losses[0] - losses[1])

    def loss(self, supervised: int) -> float:
        """The loss per supervised token of what was accumulated."""
        return self._loss_sum / supervised

    def apply(self, rate: float, supervised: int) -> None:
        """Apply the step."""
        self.graphs.apply(rate, supervised, self._loss_sum)


def dense_side(workload: Workload, target: str) -> tuple[Workload, str, AttentionPath]:
    """The workload laid out as dense padded rows."""
    recipe = workload.recipe
    divisor = recipe.shapes.divisor
    longest = round_up(recipe.model.seq_length, divisor)
    # At least two sizes, since a range must be open.
    shapes = TokenShapes(
        "range", DENSE_ROWS * divisor, DENSE_ROWS * max(longest, 2 * divisor), DENSE_ROWS * divisor, DENSE_ROWS
    )
    row_lengths = tuple(divisor_boundaries(longest, divisor).tolist())
    layout = Layout("padded", shapes, longest, rows=DENSE_ROWS, row_lengths=row_lengths)
    path = AttentionPath(dense_attention, _row_mask, lambda _: declared_dense_columns(), "dense")
    return dataclasses.replace(workload, shapes=shapes, layout=layout), target, path


def _row_mask(lens: SeqLens) -> dict[str, np.ndarray]:
    rows = lens.segment_lens.size
    return dense_columns(lens.seq_lens, rows, lens.tokens // rows)


def other_side(workload: Workload, target: str, mode: str) -> tuple[Workload, str, AttentionPath | None]:
    """The workload laid out in a mode that is compared with the recipe's; None is the attention of `varlen_attention`.

    Raises:
        RecipeError: no such mode.
    """
    modes = dict(zip(AGAINST, AGAINST, strict=True))
    if mode not in modes:
        raise RecipeError([f"--against: must be one of {', '.join(AGAINST)}, got {mode}"], "align")
    dense, _, path = dense_side(workload, target)
    if mode == "padded":
        return dense, target, path
    shapes = dataclasses.replace(dense.shapes, divisor=workload.shapes.divisor, max_segments=MOST_SEGMENTS)
    row_lengths = dense.layout.row_lengths if mode == "bucketed" else ()
    layout = Layout(modes[mode], shapes, dense.layout.seq_length, row_lengths=row_lengths)
    return dataclasses.replace(workload, shapes=shapes, layout=layout), target, None


def _in_other_places(parts: list[np.ndarray], layout: Layout) -> list[np.ndarray]:
    """The same samples in another order, rows also in other micro-batches: sums over them are rounded otherwise."""
    if not layout.row_lengths:
        return [ids[::-1] for ids in parts]
    return np.array_split(np.roll(np.concatenate(parts), DENSE_ROWS // 2), len(parts))


def _parts_of_other(ids: np.ndarray, lengths: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """A step's samples in micro-batches of another layout: rows of like length, or as many as T holds."""
    if layout.row_lengths:
        ids = ids[np.argsort(lengths[ids], kind="stable")]  # which computes fewer pads
        return [ids[start : start + DENSE_ROWS] for start in range(0, ids.size, DENSE_ROWS)]
    if layout.mode == "packed":
        ids = ids[np.argsort(-np.asarray(lengths)[ids], kind="stable")]
    capacity, parts = DENSE_ROWS * layout.seq_length, [[int(ids[0])]]
    for sample in ids[1:].tolist():
        full = int(lengths[parts[-1]].sum()) + int(lengths[sample]) > capacity
        if full or len(parts[-1]) == MOST_SEGMENTS // 2:
            parts.append([])
        parts[-1].append(sample)
    return [np.array(part) for part in parts]
