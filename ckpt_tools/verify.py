"""Two checkpoints compared: every parameter and moment, then the loss on the same samples in both modes' layouts."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.open_any import ReadingHints, open_weights
from ckpt_tools.step_folder import IMPORTED, open_step
from ckpt_tools.weights import Weights
from ms_varlen.checkpoint.tensors import FLOATS, PIECE_BYTES, StoredTensor, cast
from ms_varlen.errors import CheckpointError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import Recipe

LOSS_TOLERANCE = 2e-5
"""Largest difference of a batch's loss, in nats: fp32 sums in another order."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A parameter or moment that is not equal.

    Attributes:
        a, b: dtype and shape on each side, or "missing".
        max_abs_diff: None if the values cannot be compared.
    """

    name: str
    a: str
    b: str
    max_abs_diff: float | None


@dataclasses.dataclass(frozen=True)
class Losses:
    """Loss of each step's samples (nats), each side in the layout of its own mode."""

    mode_a: Mode
    mode_b: Mode
    loss_a: list[float]
    loss_b: list[float]

    @property
    def max_abs_diff(self) -> float:
        """Largest difference of a step's losses, in nats."""
        return float(np.max(np.abs(np.array(self.loss_a) - np.array(self.loss_b))))


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of comparing two checkpoints.

    Attributes:
        tensors: number of tensors compared.
        optimizer_only_in: "a" or "b" if only that side has moments and they were to be compared; else None.
        losses: None if no recipe was given.
    """

    a: Path
    b: Path
    tensors: int
    optimizer_compared: bool
    optimizer_only_in: str | None
    differences: list[Difference]
    losses: Losses | None

    @property
    def equal(self) -> bool:
        """Whether all values are equal, and both sides have moments or neither."""
        return self.optimizer_only_in is None and all(row.max_abs_diff == 0 for row in self.differences)

    @property
    def passed(self) -> bool:
        """Whether all values are equal and no loss differs by more than `LOSS_TOLERANCE`."""
        return self.equal and (self.losses is None or self.losses.max_abs_diff <= LOSS_TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        losses = self.losses
        return {
            "a": str(self.a),
            "b": str(self.b),
            "tensors": self.tensors,
            "optimizer_compared": self.optimizer_compared,
            "optimizer_only_in": self.optimizer_only_in,
            "differences": [dataclasses.asdict(row) for row in self.differences],
            "equal": self.equal,
            "loss_tolerance": LOSS_TOLERANCE,
            **({} if losses is None else dataclasses.asdict(losses) | {"loss_max_abs_diff": losses.max_abs_diff}),
            "passed": self.passed,
        }


def verify(
    first: Path,
    second: Path,
    hints: ReadingHints,
    recipe: Recipe | None,
    batches: int,
    progress: Callable[[int, int], None],
    weights_only: bool = False,
) -> Verification:
    """Compare two checkpoints of any kind.

    Args:
        first, second: A and B.
        hints: for a side that does not record these things.
        recipe: for the loss; each side is laid out in its own mode, a side without one in the recipe's.
        batches: steps of the recipe's plan to compute the loss on.
        progress: called with tensors compared and tensors in all.
        weights_only: leave optimizer moments out, so that one side may have none.
    """
    a, b = open_weights(first, hints), open_weights(second, hints)
    differences = []
    tables = [(a.model, b.model)]
    if a.optimizer and b.optimizer and not weights_only:
        tables.append((a.optimizer, b.optimizer))
    lone = None if weights_only or bool(a.optimizer) == bool(b.optimizer) else "a" if a.optimizer else "b"
    total = sum(len(left.keys() | right.keys()) for left, right in tables)
    done = 0
    for left, right in tables:
        for name in sorted(left.keys() | right.keys()):
            row = _difference(name, left.get(name), right.get(name))
            if row is not None:
                differences.append(row)
            done += 1
            progress(done, total)
    losses = None if recipe is None else _compare_losses(a, b, recipe, batches)
    return Verification(a.path, b.path, total, len(tables) == 2, lone, differences, losses)


def _difference(name: str, a: StoredTensor | None, b: StoredTensor | None) -> Difference | None:
    """None for equal bits; else what differs, `max_abs_diff` None where values cannot be compared."""
    if a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and a.sha256() == b.sha256():
        return None
    worst = None
    if a is not None and b is not None and a.shape == b.shape and a.dtype in FLOATS and b.dtype in FLOATS:
        worst = _max_abs_diff(a, b)
    return Difference(name, a.describe() if a else "missing", b.describe() if b else "missing", worst)


def _max_abs_diff(a: StoredTensor, b: StoredTensor) -> float | None:
    """The largest difference of two tensors of one shape, block by block; None where only one side has a number."""
    worst = 0.0
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        # Infinities of one sign have no difference, NaN and NaN neither.
        different = (x != y) & ~(np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore", over="ignore"):
            found = float(np.max(np.abs(x[different] - y[different]), initial=0.0))
        if not np.isfinite(found):
            return None
        worst = max(worst, found)
    return worst


def _blocks(tensor: StoredTensor) -> Iterator[np.ndarray]:
    """The values in blocks of one size, whatever the dtype: the pieces of every dtype are whole numbers of them."""
    count = PIECE_BYTES // 8
    for piece in (tensor if tensor.dtype == "F64" else cast(tensor, "F32")).pieces():
        for first in range(0, piece.size, count):
            yield piece[first : first + count]


def _compare_losses(a: Weights, b: Weights, recipe: Recipe, batches: int) -> Losses:
    from ckpt_tools.losses import LossOfMode, step_samples
    from ms_varlen.workload.workload import prepare

    _check_recipe(a, b, recipe)
    workload = prepare(recipe)
    samples = step_samples(workload, batches)
    losses = []
    for side in (a, b):
        loss = LossOfMode(workload, _mode_of(side) or recipe.mode)
        losses.append((loss.mode, list(loss.compute(side, samples))))
    (mode_a, loss_a), (mode_b, loss_b) = losses
    return Losses(mode_a, mode_b, loss_a, loss_b)


def _check_recipe(a: Weights, b: Weights, recipe: Recipe) -> None:
    shapes = recipe.model.config
    for side, weights in (("A", a), ("B", b)):
        config = shapes if shapes.vocab_size else shapes.model_copy(update={"vocab_size": weights.config.vocab_size})
        expected = config.parameter_shapes()
        for name, tensor in weights.model.items():
            if expected.get(name) != tensor.shape:
                rule = f"must have shape {list(expected[name])} for" if name in expected else "is not in"
                raise CheckpointError(
                    f"{side}, {weights.path}: parameter {name} {rule} the recipe's model, found {tensor.describe()}; "
                    "give the recipe of these checkpoints"
                )


def _mode_of(weights: Weights) -> Mode | None:
    if weights.kind != "ms_varlen":
        return None
    mode = open_step(weights.path).manifest["mode"]
    return None if mode == IMPORTED else Mode(mode)
