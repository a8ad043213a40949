"""The result of an alignment, and the file that tells whether a recipe has passed one."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.catalogue import explain
from ms_varlen.files import write_atomically
from ms_varlen.key_roles import dotted, key_role
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import Recipe

ALIGN_FILE = "align.json"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A batch that the bisection tried, and the stage that differs on it; None if both layouts agree."""

    rung: str
    differs: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bisection:
    """The simplest batch on which two layouts differ, and where the difference begins.

    Attributes:
        rung: the batch; None if the layouts agree on every batch.
        rungs: the batches that were tried, simplest first.
        stage: "batch check", "forward" or "backward (parameter)".
        sample, length: the sample's id and tokens; None if no single sample is to blame.
        lengths: those of the samples around it; None if the batch check found the fault.
        layer, tensor: where the values differ first.
        code: of the catalogue.
        text: all of it in words.
    """

    rung: str | None = None
    rungs: list[Rung] = dataclasses.field(default_factory=list)
    stage: str | None = None
    sample: int | None = None
    length: int | None = None
    lengths: list[int] | None = None
    layer: int | None = None
    tensor: str | None = None
    code: str
    text: str

    @property
    def remedy(self) -> str:
        """What the catalogue advises."""
        return explain(self.code).remedy

    def to_json(self) -> dict[str, Any]:
        """Return the fields that this kind of finding has, as JSON values."""
        place = ("stage", "sample", "length", "lengths", "layer", "tensor")
        unknown = place if self.rung is None else ("length", "lengths") if self.lengths is None else ()
        fields = {key: value for key, value in dataclasses.asdict(self).items() if key not in unknown}
        return fields | {"remedy": self.remedy}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Two trainings on the same samples, compared step by step.

    Attributes:
        loss, loss_padded: of the recipe's side and of the other, by step.
        gradient_rel_diff: by step, the largest relative difference of a parameter's gradient.
        max_abs_diff: largest difference of the loss, at most `tolerance` if passed.
        gradient_max_rel_diff: of the first step, at most `gradient_tolerance` if passed.
        gradient_max_rel_diff_later: of later steps, at most `gradient_tolerance_later` if passed.
        gradient_worst_parameter: the parameter whose gradient comes nearest to its limit.
        first_failed_step: first step beyond a limit (a NaN is beyond it); None if all are within.
    """

    loss: list[float]
    loss_padded: list[float]
    gradient_rel_diff: list[float]
    max_abs_diff: float
    tolerance: float
    gradient_max_rel_diff: float
    gradient_tolerance: float
    gradient_max_rel_diff_later: float
    gradient_tolerance_later: float
    gradient_worst_parameter: str
    first_failed_step: int | None
    passed: bool


def compare(
    losses: list[tuple[float, float]],
    gradients: list[tuple[float, str]],
    loss_limit: float,
    gradient_limit: float,
    later_gradient_limit: float,
) -> Verdict:
    """Judge two trainings.

    Args:
        losses: of both sides, by step.
        gradients: by step, the largest relative difference of a parameter's gradient and that parameter's name.
        loss_limit: largest difference of the loss.
        gradient_limit: largest relative difference of the first step's gradients.
        later_gradient_limit: the same for later steps.
    """
    loss, loss_padded = np.array(losses).T
    differences = np.abs(loss - loss_padded)
    relative = np.array([difference for difference, _ in gradients])
    limits = np.array([gradient_limit] + [later_gradient_limit] * (len(gradients) - 1))
    failed = np.flatnonzero(~((differences <= loss_limit) & (relative <= limits)))
    return Verdict(
        loss=loss.tolist(),
        loss_padded=loss_padded.tolist(),
        gradient_rel_diff=relative.tolist(),
        max_abs_diff=float(differences.max()),
        tolerance=loss_limit,
        gradient_max_rel_diff=float(relative[0]),
        gradient_tolerance=gradient_limit,
        gradient_max_rel_diff_later=float(relative[1:].max(initial=0.0)),
        gradient_tolerance_later=later_gradient_limit,
        gradient_worst_parameter=gradients[int(np.argmax(relative / limits))][1],
        first_failed_step=int(failed[0]) + 1 if failed.size else None,
        passed=failed.size == 0,
    )


def gradient_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """Return the largest relative difference of a parameter's gradient, and that parameter's name.

    A parameter's difference is divided by the norm of its own gradient, or by 1e-3 of the whole gradient's norm if
    that is larger: some gradients hold rounding only (a key bias moves no softmax). The whole gradient's norm, not the
    largest parameter's, gives this floor, because it stays the same however a model is cut into parameters. `align` and
    its bisection share the floor, so that the bisection does not blame rounding that `align` accepts.
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
    """0 for equal gradients, zeros included; infinity if they cannot be compared."""
    if difference == 0:
        return 0.0
    return difference / scale if np.isfinite(difference) and 0 < scale < np.inf else np.inf


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The result of `align`.

    Attributes:
        recipe: name of the recipe's output folder.
        first_step: steps that were done before, in the checkpoint that both sides began with.
        against: the layout of the other side.
        noise_floor: how much rounding alone moves the loss; 0 if the caller gave the tolerance.
        bisect: where the first failed step begins to differ; None if none failed.
        sample_ids_sha256: by step.
        versions: of everything that numbers depend on.
    """

    recipe: str
    mode: Mode
    steps: int
    first_step: int
    verdict: Verdict
    against: Mode
    noise_floor: float | None
    bisect: Bisection | None
    sample_ids_sha256: list[str]
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return one flat table as JSON values, and `bisect` below it."""
        return {
            "recipe": self.recipe,
            "mode": self.mode,
            "steps": self.steps,
            "first_step": self.first_step,
            **dataclasses.asdict(self.verdict),
            "against": self.against,
            "noise_floor": self.noise_floor,
            "bisect": self.bisect.to_json() if self.bisect else None,
            "sample_ids_sha256": self.sample_ids_sha256,
            "versions": self.versions,
            "seconds": self.seconds,
        }


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of all keys of a recipe that decide its numbers; folders, saving and the number of steps do not."""
    deciding = {key: value for key, value in dotted(recipe.resolved()) if not key_role(key).may_change}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def save_alignment(recipe: Recipe, result: Alignment) -> Path:
    """Write the result of `align`, passed or not, to ``<output_dir>/align.json``. Return that path."""
    keys = ("passed", "steps", "max_abs_diff", "tolerance", "gradient_max_rel_diff", "versions")
    path = recipe.checkpoint.output_dir / ALIGN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = result.to_json()
    saved = {"recipe_sha256": recipe_hash(recipe), **{key: fields[key] for key in keys}}
    write_atomically(path, [json.dumps(saved, indent=1).encode()])
    return path


def alignment_warning(recipe: Recipe, versions: Mapping[str, str]) -> str | None:
    """Return why nothing shows that this recipe's numbers are right; None if it has passed `align`.

    Args:
        recipe: the recipe.
        versions: those of this process, the attention body among them.
    """
    advice = "run ms-varlen align on this recipe first, since a fast wrong result is worth nothing"
    path = recipe.checkpoint.output_dir / ALIGN_FILE
    if not path.is_file():
        return f"this recipe has not passed align: there is no {path}; {advice}"
    saved = json.loads(path.read_bytes())
    if saved["recipe_sha256"] != recipe_hash(recipe):
        return f"this recipe has not passed align: {path} belongs to other settings; {advice}"
    if not saved["passed"]:
        return f"this recipe has FAILED align ({path}); fix that first"
    changed = [name for name in sorted(versions) if saved["versions"].get(name) != versions[name]]
    if changed:
        return f"this recipe passed align with another {', '.join(changed)} ({path}); {advice}"
    return None
