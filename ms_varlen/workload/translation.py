"""A recipe translated to another mode and kind of shapes, and the modes compared on one corpus.

A translated recipe keeps about as many samples in a step: rows and token budget convert by the mean length.
"""

import dataclasses
import json

import numpy as np

from ms_varlen.errors import VarlenError
from ms_varlen.graph.shapes import round_up
from ms_varlen.modes import MODES, Mode
from ms_varlen.planning.batches import row_offsets
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.work import EpochWork
from ms_varlen.recipe.recipe import Recipe, parse_recipe
from ms_varlen.workload.sizes import SampleLengths, plan_lengths
from ms_varlen.workload.summary import MOST_SAMPLES, epoch_batches, sampled_lengths

PAIRS = [(mode, kind) for mode in MODES for kind in ("static", "buckets", "range")]
"""Every mode with every kind of shapes."""


def variant(recipe: Recipe, mode: Mode, kind: str, mean_length: float) -> Recipe:
    """Translate the recipe to another mode and `shapes.kind`; batch sizes follow from `mean_length`.

    Returns `recipe` itself if it already has both.

    Args:
        mean_length: mean length of the training samples, in tokens.
    Raises:
        RecipeError: the pair does not suit the rest of the recipe, e.g. its `model.seq_length`.
    """
    if (mode, kind) == (recipe.mode, recipe.shapes.kind):
        return recipe
    batch, divisor, seq_length = recipe.batch, recipe.shapes.divisor, recipe.model.seq_length
    rows = rows_of(recipe, mean_length)
    budget = batch.token_budget or round_up(max(seq_length, round(rows * mean_length)), divisor)
    size = (
        {"rows": rows, "token_budget": None, "pad_to": "max" if kind == "static" else "batch"}
        if mode.sized_by_rows
        else {"rows": None, "token_budget": budget, "pad_to": None}
    )
    values = recipe.resolved()
    values["mode"] = mode.value
    values["batch"] |= size | {"window": None}
    values["shapes"] = {"kind": kind, "divisor": divisor}
    values["model"]["variable_seq_lengths"] = mode.follows_lengths
    return parse_recipe(values, where=f"{mode} with shapes.kind {kind}")


def overrides_between(recipe: Recipe, other: Recipe) -> list[str]:
    """``section.key=value`` for each key in which `other` differs from `recipe`."""
    before, after = recipe.resolved(), other.resolved()
    found = [] if before["mode"] == after["mode"] else [f"mode={after['mode']}"]
    for section in ("batch", "shapes", "model"):
        for key, value in after[section].items():
            if value != before[section][key]:
                found.append(f"{section}.{key}={json.dumps(value, separators=(',', ':'))}".replace('"', ""))
    return found


def rows_of(recipe: Recipe, mean_length: float) -> int:
    """Rows of a micro-batch: the recipe's, or as many as its token budget holds samples of the mean length."""
    batch = recipe.batch
    return batch.rows or min(max(1, round(batch.size / mean_length)), batch.max_segments)


def sampled(lengths: SampleLengths, most: int = MOST_SAMPLES) -> SampleLengths:
    """The lengths, or `most` of them drawn at random, always the same."""
    train = sampled_lengths(lengths.train, most)
    return lengths if train is lengths.train else dataclasses.replace(lengths, train=train)


def epoch_work(recipe: Recipe, lengths: SampleLengths, cost: CostModel, world_size: int = 1) -> EpochWork:
    """The work of an epoch of a recipe on some lengths.

    Raises:
        DataError: the lengths do not fill a step.
    """
    plans, shapes, layout = plan_lengths(recipe, lengths, cost, world_size)
    seq_lens, offsets, plan = epoch_batches(plans)
    evaluates = recipe.train.eval_every is not None and lengths.longest_held_out > 0
    return EpochWork(
        steps=plan.num_steps,
        graphs=shapes.predicted_graphs + 1 + evaluates,
        real=int(seq_lens.sum(dtype=np.int64)),
        computed=int(layout.computed_tokens(seq_lens, offsets).sum()),
        real_squared=int(np.square(seq_lens, dtype=np.int64).sum()),
        computed_squared=int(layout.squared_tokens(seq_lens, offsets).sum()),
        largest=shapes.max,
    )


def padded_works(
    recipe: Recipe, lengths: SampleLengths, mean_length: float, world_size: int = 1
) -> dict[str, EpochWork]:
    """An epoch of rows in random order, padded to the "maximum" (the longest sample) and to the "batch_maximum".

    No row holds pads only, and nothing is rounded up: this is the work of a framework that just pads.

    Args:
        mean_length: see `variant`.
    """
    sizes, rows = lengths.train, rows_of(recipe, mean_length)
    offsets = row_offsets(sizes.size, rows)
    order = np.random.default_rng(recipe.train.seed).permutation(sizes.size)
    longest, in_batch = int(sizes.max()), np.maximum.reduceat(sizes[order], offsets[:-1]).astype(np.int64)
    steps = -(-(offsets.size - 1) // (recipe.batch.micro_batches * world_size))
    work = EpochWork(
        steps=steps,
        graphs=2,  # of one size, or of a range, and the optimizer
        real=int(sizes.sum(dtype=np.int64)),
        computed=longest * sizes.size,
        real_squared=int(np.square(sizes, dtype=np.int64).sum()),
        computed_squared=longest**2 * sizes.size,
        largest=longest * rows,
    )
    counts = np.diff(offsets)
    computed, squared = int(in_batch @ counts), int(in_batch**2 @ counts)
    return {
        "maximum": work,
        "batch_maximum": dataclasses.replace(work, computed=computed, computed_squared=squared),
    }


def compare_variants(
    recipe: Recipe, lengths: SampleLengths, cost: CostModel, world_size: int = 1
) -> tuple[dict[tuple[Mode, str], EpochWork], dict[tuple[Mode, str], str]]:
    """An epoch in every mode and kind of shapes.

    Args:
        lengths: of the corpus; see `sampled`.
        cost: of the recipe's model.
    Returns:
        (mode, kind) -> its work; and the reason for each pair that the recipe or the corpus does not allow.
    """
    mean = float(lengths.train.mean(dtype=np.float64))
    works, refused = {}, {}
    for mode, kind in PAIRS:
        try:
            works[mode, kind] = epoch_work(variant(recipe, mode, kind, mean), lengths, cost, world_size)
        except VarlenError as error:
            refused[mode, kind] = str(error)
    return works, refused
