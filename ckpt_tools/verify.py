"""Two checkpoints compared: every parameter and moment, then the loss on the same samples in both modes' layouts."""

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


def verify(
    first: Path,
    second: Path,
    hints: ReadingHints,
    recipe: Recipe | None,
    batches: int,
    progress: Callable[[int, int], None],
    weights_only: bool = False,
) -> dict[str, Any]:
    """Compare two checkpoints of any kind.

    Args:
        first, second: A and B.
        hints: for whichever of them does not say these things.
        recipe: for the loss; each side is laid out in its own mode, a side without one in the recipe's.
        batches: steps of the recipe's plan to compute the loss on.
        progress: told tensors compared and tensors in all.
        weights_only: leave optimizer moments out, so that one side may have none.
    Returns:
        `differences` (one row for each parameter that is not equal), `loss_a`, `loss_b`, `passed`, ...: parameters
        must have equal values, both sides moments or none, losses may differ by `LOSS_TOLERANCE`.
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
    result: dict[str, Any] = {
        "a": str(a.path),
        "b": str(b.path),
        "tensors": total,
        "optimizer_compared": len(tables) == 2,
        "optimizer_only_in": lone,
        "differences": differences,
        "equal": lone is None and all(row["max_abs_diff"] == 0 for row in differences),
        "loss_tolerance": LOSS_TOLERANCE,
    }
    if recipe is not None:
        result |= _compare_losses(a, b, recipe, batches)
    result["passed"] = result["equal"] and result.get("loss_max_abs_diff", 0.0) <= LOSS_TOLERANCE
    return result


def _difference(name: str, a: StoredTensor | None, b: StoredTensor | None) -> dict[str, Any] | None:
    """None for equal bits; else what differs, `max_abs_diff` None where values cannot be compared."""
    if a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and a.sha256() == b.sha256():
        return None
    row: dict[str, Any] = {
        "name": name,
        "a": a.describe() if a else "missing",
        "b": b.describe() if b else "missing",
        "max_abs_diff": None,
    }
    if a is not None and b is not None and a.shape == b.shape and a.dtype in FLOATS and b.dtype in FLOATS:
        row["max_abs_diff"] = _max_abs_diff(a, b)
    return row


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


def _compare_losses(a: Weights, b: Weights, recipe: Recipe, batches: int) -> dict[str, Any]:
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
    return {
        "mode_a": mode_a,
        "mode_b": mode_b,
        "loss_a": loss_a,
        "loss_b": loss_b,
        "loss_max_abs_diff": float(np.max(np.abs(np.array(loss_a) - np.array(loss_b)))),
    }


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
