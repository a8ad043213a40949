"""A checkpoint of one mode as a checkpoint of another: the same bits, and training resumes with each sample once.

Weights, moments, the step counter and the place in the plan stay as they are; only the manifest's mode changes, and a
recipe of the new mode lies next to it. `ms-varlen train` sees that its plan differs from the saved one and plans what
remains of the epoch again. No array of our checkpoints is as long as the context (rotary tables and masks are made from
the recipe), which is checked.
"""

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ckpt_tools.new_folder import new_folder
from ckpt_tools.step_folder import IMPORTED, StepFolder, open_step, tree_of, write_step
from ms_varlen.checkpoint.resume import DATA_FINGERPRINT, RECIPE_FILE
from ms_varlen.checkpoint.run_folder import METRICS_FILE, lines_up_to, run_folders
from ms_varlen.checkpoint.tensors import running_total
from ms_varlen.errors import CheckpointError, RecipeError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import Recipe, load_recipe
from ms_varlen.workload.translation import variant

_NO_PART_OF_THE_NET = ("initializer_range", "max_position_embeddings", "sliding_window")


def convert(
    source: Path, destination: Path, mode: Mode, recipe: Path | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write a run folder of another mode that `ms-varlen train` resumes.

    Args:
        source: a step folder of ours, or a run folder: its newest.
        destination: the run folder to make.
        mode: of the new checkpoint.
        recipe: to resume with; by default the source's, with its sizes translated as `translation` does.
        progress: called with bytes written and bytes in all.
    Returns:
        what was written, for people and `--json`.
    Raises:
        CheckpointError: the source is damaged, or the recipe's model is another.
        RecipeError: the source's recipe has no equal in this mode.
    """
    step = open_step(source)
    if not step.optimizer:
        raise CheckpointError(
            f"{step.path} must have optimizer moments to go on from, found weights only; train from its weights with "
            f"model.init_from={step.path}"
        )
    target = _target_recipe(step, mode, recipe)
    _check_model(step, target)
    with new_folder(destination, tree_of(step, source), step.nbytes) as folder:
        _write_run_files(folder, step, target, destination.parent)
        state, manifest = _place(step, target)
        tell = running_total(progress, step.nbytes)
        written = write_step(folder, step.manifest["step"], step.model, step.optimizer, state, manifest, tell).name
    return {
        "source": str(step.path),
        "source_mode": step.manifest["mode"],
        "destination": str(destination / written),
        "mode": mode,
        "step": step.manifest["step"],
        "parameters": len(step.model),
        "bytes": step.nbytes,
        "goes_on_in": _continuation(destination, mode),
        "train_with": shlex.join(
            ["ms-varlen", "train", str(destination / RECIPE_FILE), f"checkpoint.resume={destination / written}"]
        ),
    }


def _write_run_files(folder: Path, step: StepFolder, target: Recipe, output_dir: Path) -> None:
    """The recipe, and the metrics up to the checkpoint's step where there are any."""
    values = target.resolved()
    # Training resumes in the new folder, or next to it, and never in the source's runs.
    values["checkpoint"] |= {"resume": "auto", "output_dir": str(output_dir)}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    (folder / RECIPE_FILE).write_text(text, encoding="utf-8")
    metrics = step.path.parent / METRICS_FILE
    if metrics.exists():
        with (folder / METRICS_FILE).open("wb") as kept:
            kept.writelines(lines_up_to(metrics, step.manifest["step"]))


def _continuation(destination: Path, mode: Mode) -> str:
    """The folder that `train_with` writes to: the new one if it is named like a run, else a new run next to it."""
    runs = run_folders(destination.parent, mode)
    if destination in runs:
        return str(destination)
    return f"{destination.parent / mode}{'-N, a new number' if runs else ''}"


def _target_recipe(step: StepFolder, mode: Mode, path: Path | None) -> Recipe:
    if path is not None:
        target = load_recipe(path)
        if target.mode is not mode:
            raise CheckpointError(f"{path}: mode must be {mode} as --to says, found {target.mode}; change one of them")
        return target
    beside = step.path.parent / RECIPE_FILE
    if not beside.exists():
        raise CheckpointError(f"{beside} must be there to make a {mode} recipe from; give one with --recipe")
    try:
        recipe = load_recipe(beside)
    except RecipeError as error:
        # The source is only read, so its recipe is not to be corrected where it lies.
        where = f"{beside}, of which a {mode} recipe is made unless --recipe gives one"
        raise RecipeError(error.faults, where, error.code) from error
    if recipe.mode is mode:
        raise CheckpointError(
            f"{step.path} is a {mode} checkpoint already; resume it as it is, or give the mode it is to become"
        )
    return variant(recipe, mode, recipe.shapes.kind, _mean_length(step))


def _mean_length(step: StepFolder) -> float:
    """Mean length in tokens of the samples that were trained, by which rows and token budgets are translated."""
    path = step.path.parent / METRICS_FILE
    tokens = segments = 0
    if path.exists():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                metrics = json.loads(line)
            except ValueError:
                break  # a half-written last line
            try:
                tokens, segments = tokens + metrics["tokens_real"], segments + metrics["segments"]
            except (KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path} line {number} must have the numbers tokens_real and segments, found {line[:60]!r}; give a "
                    "recipe of the new mode with --recipe"
                ) from error
    if not segments:
        raise CheckpointError(
            f"{path} must tell the samples' lengths, by which rows and token budgets are translated, found nothing; "
            "give a recipe of the new mode with --recipe"
        )
    return tokens / segments


def _check_model(step: StepFolder, target: Recipe) -> None:
    """The recipe's decoder must be the checkpoint's; positions may differ, since no array depends on them."""
    expected, found = step.config, target.model.config
    if found.vocab_size is None:
        found = found.model_copy(update={"vocab_size": expected.vocab_size})
    before, after = expected.model_dump(), found.model_dump()
    changed = [key for key in before if before[key] != after[key] and key not in _NO_PART_OF_THE_NET]
    if changed:
        key = changed[0]
        raise CheckpointError(
            f"model.config.{key} must be {before[key]} as in {step.path}, the recipe has {after[key]} "
            f"(keys that differ: {', '.join(changed)}); give a recipe of the checkpoint's own model"
        )


def _place(step: StepFolder, target: Recipe) -> tuple[bytes, dict[str, Any]]:
    """State and manifest, with the data and the place in the plan as they are; a checkpoint that came from elsewhere
    begins at the first epoch of the recipe's corpus.
    """
    if step.manifest["mode"] != IMPORTED:
        return step.state_bytes, _manifest(step, target, step.manifest.get(DATA_FINGERPRINT))
    from ms_varlen.workload.workload import prepare

    workload = prepare(target)
    plans = workload.plans
    state = {
        **step.state,
        "plan": plans.to_dict(plans.start()),
        "skipped": {"steps": 0, "samples": 0, "tokens": 0},
        "seed": target.train.seed,
    }
    state_bytes = json.dumps(state, indent=1, sort_keys=True).encode()
    return state_bytes, _manifest(step, target, workload.store.fingerprint)


def _manifest(step: StepFolder, target: Recipe, data_fingerprint: str | None) -> dict[str, Any]:
    kept: dict[str, Any] = {key: step.manifest[key] for key in ("versions",) if key in step.manifest}
    return {
        **kept,
        DATA_FINGERPRINT: data_fingerprint,
        "mode": target.mode,
        "layout": target.mode,
        "shapes": target.shapes.model_dump(mode="json"),
        "model_config": step.manifest["model_config"],
        "seq_length": target.model.seq_length,
        "converted_from": {
            "mode": step.manifest["mode"],
            "step": step.manifest["step"],
            "fingerprint": fingerprint(step),
        },
    }


def fingerprint(step: StepFolder) -> str:
    """A hash of all bytes of a checkpoint, through its manifest's checksums."""
    rows = sorted(step.sums.items())
    return hashlib.sha256(json.dumps([rows, step.manifest["state_sha256"]]).encode()).hexdigest()[:32]
