"""The doctor: environment, recipe, data, shapes, plan, checkpoints, one probe step and the limits of an NPU, in order.

What fails stops what stands on it: without a recipe no data is read, without a plan nothing is compiled. Each finding
that is not green has a code of the catalogue.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.batches.check import check_micro_batch
from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.micro_batch import MicroBatch
from ms_varlen.checkpoint.resume import RECIPE_FILE
from ms_varlen.data.store.store import Progress
from ms_varlen.diagnose.doctor.checkpoint import checkpoint_checks
from ms_varlen.diagnose.doctor.environment import environment_checks
from ms_varlen.diagnose.doctor.findings import GREEN, RED, YELLOW, Check, worst
from ms_varlen.diagnose.lint.columns import Finding
from ms_varlen.diagnose.lint.lint import lint_batch
from ms_varlen.errors import RecipeError, VarlenError
from ms_varlen.files import folder_fault
from ms_varlen.limits import MAX_SEGMENTS
from ms_varlen.modes import Mode
from ms_varlen.ops.compressed_mask import check_compressed_mask
from ms_varlen.recipe.recipe import Recipe, load_recipe
from ms_varlen.workload.summary import PlanSummary, epoch_batches
from ms_varlen.workload.workload import Workload, prepare

SAMPLED_MICRO_BATCHES = 64
LONG_TAIL = 4.0
"""A longest document of more than this many P99 is an extreme tail."""
MUCH_DIRT = 0.02
"""More than this share of removed documents is worth a look."""
COARSE = {Mode.VARLEN: 0.15, Mode.PACKED: 0.15, Mode.BUCKETED: 0.3}
"""More than this share of computed tokens that are padding means sizes are aligned too coarsely, by mode."""
UNEVEN = 0.05
MOSTLY = 0.5
"""The share of micro-batches, or of documents, from which on something is the rule."""
CODES_OF_KEYS = {
    "model.max_position_embeddings": "SHAPE-POSITIONS",
    "shapes.row_buckets": "SHAPE-BUCKET",
    "shapes.token_sizes": "SHAPE-BUCKET",
    "shapes.max": "SHAPE-RANGE",
    "shapes.divisor": "SHAPE-DIVISOR",
    "batch.token_budget: must be a multiple": "SHAPE-DIVISOR",
}
"""Faults of a recipe that have an entry of their own, by how they begin."""

FEW_TIMES = 2.0
"""The rule of the field: where P99 is below this many medians, padding may be as good."""


def examine(
    path: Path,
    overrides: Iterable[str] = (),
    full: bool = False,
    for_ascend: bool = False,
    probe: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Look at everything that a run of a recipe depends on.

    Args:
        path: the recipe, or the folder of a run, whose recipe and checkpoints are looked at.
        overrides: ``section.key=value``.
        full: look at every micro-batch of the first epoch instead of a sample of them.
        for_ascend: check the limits of the NPU's attention operator, wherever this runs.
        probe: compile the graphs and run one step.
        progress: told how far the token store is, where one is built.
    Returns:
        `checks` (rows of area, level, text, code), `worst` and `codes`.
    """
    checks = list(_all_checks(path, overrides, full, for_ascend, probe, progress))
    return {
        "recipe": str(path),
        "checks": [check.to_dict() for check in checks],
        "worst": worst(checks),
        "codes": sorted({check.code for check in checks if check.code is not None}),
    }


def _all_checks(
    path: Path, overrides: Iterable[str], full: bool, for_ascend: bool, probe: bool, progress: Progress | None
) -> Iterator[Check]:
    yield from environment_checks(for_ascend)
    try:
        recipe = recipe_of(path, overrides)
    except VarlenError as error:
        yield from _refused("recipe", error)
        return
    yield Check("recipe", GREEN, f"mode {recipe.mode}, shapes.kind {recipe.shapes.kind}, {recipe.train.steps} steps")
    yield from output_checks(recipe)
    for_ascend = for_ascend or recipe.device.target == "Ascend"
    if for_ascend:
        yield from ascend_checks(recipe)
    try:
        workload = prepare(recipe, progress)
    except VarlenError as error:
        yield from _refused("data and plan", error)
        return
    yield from data_checks(workload)
    yield from batch_checks(workload, None if full else SAMPLED_MICRO_BATCHES)
    yield from plan_checks(workload)
    yield from checkpoint_checks(recipe, workload.model_config.parameter_shapes(), workload.store.fingerprint)
    if probe:
        from ms_varlen.diagnose.doctor.probe import probe_checks

        yield from probe_checks(workload)


def recipe_of(path: Path, overrides: Iterable[str]) -> Recipe:
    """The recipe of a file, or of a run's folder, in which its checkpoints are then looked for.

    Raises:
        RecipeError: it cannot be read or has faults.
    """
    if (path / RECIPE_FILE).is_file():
        overrides = [f"checkpoint.output_dir={json.dumps(str(path.absolute().parent))}", *overrides]
        path = path / RECIPE_FILE
    elif path.is_dir():
        rule = f"RECIPE: must be a recipe in YAML, or the folder of a run with its {RECIPE_FILE}, got the folder {path}"
        raise RecipeError([f"{rule}; name the recipe that was trained"], "doctor")
    return load_recipe(path, overrides)


def _refused(area: str, error: VarlenError) -> Iterator[Check]:
    """A check for each fault that an error lists."""
    for fault in getattr(error, "faults", [str(error)]):
        special = next((code for path, code in CODES_OF_KEYS.items() if fault.startswith(path)), None)
        yield Check(area, RED, fault, special or error.code)


def output_checks(recipe: Recipe) -> Iterator[Check]:
    """Whether a run can write where it is to."""
    output_dir = recipe.checkpoint.output_dir
    fault = folder_fault(output_dir)
    if fault is not None:
        rule = f"checkpoint.output_dir must be a folder that can be made and written, got {output_dir} ({fault})"
        yield Check("output", RED, f"{rule}; choose another", "RECIPE")


def data_checks(workload: Workload) -> Iterator[Check]:
    """The corpus: how it is cut, what was removed, how long its longest document is."""
    store = workload.store
    lengths = np.asarray(store.train.lengths)
    cleaning = store.ledgers["train"] + store.ledgers["eval"]
    yield Check("data", GREEN, f"{len(store.train):,} training samples, {store.train.total_tokens:,} tokens")
    dropped = cleaning.documents_dropped
    if dropped > MUCH_DIRT * max(cleaning.documents_in, 1):
        yield Check(
            "data",
            YELLOW,
            f"documents removed in cleaning must be few (up to {MUCH_DIRT:.0%}), got {dropped:,} of "
            f"{cleaning.documents_in:,}; see them with `ms-varlen data`",
            "DATA-DIRTY",
        )
    p99 = float(np.percentile(lengths, 99))
    if lengths.max() > LONG_TAIL * p99:
        yield Check(
            "data",
            YELLOW,
            f"the longest sample must be near P99 ({p99:.0f} tokens), got {int(lengths.max())} (sample "
            f"{int(lengths.argmax())}); set model.seq_length near P99",
            "DATA-TAIL",
        )
    split = cleaning.samples_kept - cleaning.documents_kept
    if split > MOSTLY * max(cleaning.documents_kept, 1):
        yield Check(
            "data",
            YELLOW,
            f"most documents must fit model.seq_length ({workload.recipe.model.seq_length}), got "
            f"{cleaning.samples_kept:,} samples of {cleaning.documents_kept:,} documents; raise model.seq_length "
            "towards their P99 (see `ms-varlen stats`)",
            "DATA-TAIL",
        )
    if cleaning.tokens_cut > 0.2 * max(cleaning.tokens_in, 1):
        yield Check(
            "data",
            YELLOW,
            f"tokens cut off must be few (up to 20%), got {cleaning.tokens_cut:,} of {cleaning.tokens_in:,}; raise "
            "model.seq_length or set data.overlong=split",
            "DATA-TAIL",
        )


def batch_checks(workload: Workload, limit: int | None) -> Iterator[Check]:
    """Micro-batches as training gets them: against the store, and linted.

    Args:
        limit: how many, from the start of epoch 0; None means all.
    """
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, lambda lens: {})
    plan = workload.plans.epoch(0)
    count = plan.num_steps * workload.recipe.batch.micro_batches
    looked_at = count if limit is None else min(limit, count)
    for index in range(looked_at):
        ids = plan.micro_batch(*divmod(index, workload.recipe.batch.micro_batches))
        try:
            finding = _batch_finding(workload, ids, batches.micro_batch(ids))
        except VarlenError as error:
            yield Check("batches", RED, f"micro-batch {index} (sample ids {ids[:4].tolist()}...): {error}", error.code)
            return
        if finding is not None:
            yield Check("batches", RED, f"micro-batch {index}: {finding.text}", finding.code)
            return
    yield Check("batches", GREEN, f"{looked_at:,} of {count:,} micro-batches hold what their lengths say")


def _batch_finding(workload: Workload, ids: np.ndarray, columns: MicroBatch) -> Finding | None:
    """What the linter finds in a micro-batch, told which places are real.

    Raises:
        VarlenError: the micro-batch is not what the store has for these ids. It was checked when it was made; whatever
            changed it afterwards shows here.
    """
    table, layout = workload.store.train, workload.layout
    lengths, tokens = np.asarray(table.lengths[ids]), table.gather(ids)
    lens, ends = layout.place(lengths), np.cumsum(lengths)
    edges = tokens[[ends - lengths, ends - 1]]
    check_micro_batch(columns, lens.starts, lengths, edges, layout.seq_length, not layout.mode.follows_lengths)
    return next(iter(lint_batch({**columns, "attention_mask": lens.real_mask})), None)


def plan_checks(workload: Workload) -> Iterator[Check]:
    """Sizes, graphs, padding and balance, as `ms-varlen plan` counts them."""
    plan, recipe = PlanSummary.of(workload), workload.recipe
    graphs = sum(plan.graphs.values())
    yield Check(
        "shapes", GREEN, f"{workload.shapes.describe()}, {graphs} graphs, largest segment {recipe.model.seq_length}"
    )
    yield Check(
        "plan",
        GREEN,
        f"{plan.epoch.steps_per_epoch:,} steps an epoch, pad_ratio {plan.epoch.pad_ratio:.1%}, ledger balanced",
    )
    p50, p99 = plan.lengths["p50"], plan.lengths["p99"]
    if recipe.mode.follows_lengths and p99 < FEW_TIMES * p50:
        yield Check(
            "plan",
            YELLOW,
            f"P99 should be at least {FEW_TIMES:.0f} times the median ({p50:.0f}) for varlen to gain, got {p99:.0f}; "
            "padded may be as good: compare with `ms-varlen bench`",
            "PERF-SPREAD",
        )
    if plan.epoch.pad_ratio > COARSE.get(recipe.mode, 1.0):
        yield segments_bound(workload) or Check(
            "plan",
            YELLOW,
            f"pad_ratio should be at most {COARSE[recipe.mode]:.0%} in mode {recipe.mode}, got "
            f"{plan.epoch.pad_ratio:.1%} (divisor {recipe.shapes.divisor}); lower shapes.divisor or add sizes",
            "PERF-ALIGNMENT",
        )
    if plan.epoch.imbalance_mean > UNEVEN:
        yield Check(
            "plan",
            YELLOW,
            f"the slowest rank should be at most {UNEVEN:.0%} over the mean, got {plan.epoch.imbalance_mean:.1%}; "
            "raise batch.token_budget or batch.micro_batches",
            "PERF-BALANCE",
        )


def segments_bound(workload: Workload) -> Check | None:
    """The check that fails where most micro-batches are full by `batch.max_segments` long before their budget."""
    batch, cap = workload.recipe.batch, workload.plans.settings.max_segments
    if batch.rows is not None:
        return None
    lengths, offsets, _ = epoch_batches(workload.plans)
    counts, tokens = np.diff(offsets), workload.layout.needed_tokens(lengths, offsets)
    full = counts == cap
    if full.mean() <= MOSTLY or tokens[full].mean() > (1 - COARSE[workload.recipe.mode]) * batch.size:
        return None
    needed = int(np.ceil(batch.max_segments * batch.size / tokens[full].mean()))
    raised = min(needed, MAX_SEGMENTS)
    lower = "" if needed <= MAX_SEGMENTS else ", and lower batch.token_budget, since that is the largest"
    more = f"raise batch.max_segments to {raised}{lower}" if raised > batch.max_segments else "lower batch.token_budget"
    return Check(
        "plan",
        YELLOW,
        f"micro-batches should be full by batch.token_budget ({batch.size}), got {tokens[full].mean():.0f} tokens in "
        f"{full.mean():.0%} of them, where batch.max_segments ({batch.max_segments}) is reached first; {more}",
        "PERF-ALIGNMENT",
    )


def ascend_checks(recipe: Recipe) -> Iterator[Check]:
    """The documented limits of FlashAttentionScore in TND, and its compressed mask; see `ops.ascend_attention`."""
    from ms_varlen.ops.ascend_attention import ascend_faults

    config = recipe.model.config
    faults = ascend_faults(config.num_attention_heads, config.num_key_value_heads, config.head_dim, "bfloat16")
    if recipe.batch.max_segments > MAX_SEGMENTS:
        faults.append(f"batch.max_segments must be <= {MAX_SEGMENTS} (TND), got {recipe.batch.max_segments}; lower it")
    for fault in faults:
        yield Check("ascend", RED, f"{fault}, in FlashAttentionScore (TND)", "ASCEND-LIMITS")
    try:
        check_compressed_mask(recipe.model.seq_length)
    except VarlenError as error:
        yield Check("ascend", RED, str(error), error.code)
        return
    if not faults:
        text = "head size, heads, segments and compressed mask are as FlashAttentionScore's documentation asks"
        yield Check("ascend", GREEN, text)
