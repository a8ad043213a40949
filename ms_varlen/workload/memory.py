"""Memory of a training step, and whether it fits the device."""

import dataclasses

from ms_varlen.errors import DataError
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.work import memory_estimate
from ms_varlen.recipe.recipe import Recipe

GB = 1e9


def device_bytes(max_memory: str | None) -> float | None:
    """``device.max_memory`` as bytes; None without a limit."""
    return None if max_memory is None else float(max_memory.removesuffix("GB")) * GB


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Memory of a device in the largest step, in GB: a lower bound, see `memory_estimate`.

    Attributes:
        tokens: T.
        weights: with a step's gradients and moments.
        gradients: of a micro-batch, before they are added to the step's.
        casts: bf16 copies of weights, with the recipe's `recompute`.
        activations, activations_recomputed: without and with recomputing layers.
        logits: of the plain loss.
        recompute: as in the recipe.
        total: with the recipe's `recompute`.
        limit: `device.max_memory`; None without one.
    """

    tokens: int
    weights: float
    gradients: float
    casts: float
    activations: float
    activations_recomputed: float
    logits: float
    recompute: bool
    total: float
    limit: float | None


def step_memory(recipe: Recipe, config: DecoderConfig, shapes: TokenShapes) -> StepMemory:
    """The memory of a recipe's largest step.

    Data parallel ranks hold whole weights, gradients and moments each; nothing is sharded.
    """
    value_bytes = 4 if recipe.device.target == "CPU" else 2
    found = {
        recompute: memory_estimate(config, config.parameter_count(), shapes.max, value_bytes, recompute)
        for recompute in (False, True)
    }
    limit = device_bytes(recipe.device.max_memory)
    kept, recomputed = found[False], found[True]
    own = found[recipe.model.recompute]
    return StepMemory(
        tokens=shapes.max,
        weights=round(kept["weights"] / GB, 3),
        gradients=round(kept["gradients"] / GB, 3),
        casts=round(own["casts"] / GB, 3),
        activations=round(kept["activations"] / GB, 3),
        activations_recomputed=round(recomputed["activations"] / GB, 3),
        logits=round(kept["logits"] / GB, 3),
        recompute=recipe.model.recompute,
        total=round(own["total"] / GB, 3),
        limit=None if limit is None else limit / GB,
    )


def check_memory(recipe: Recipe, config: DecoderConfig, shapes: TokenShapes) -> None:
    """Refuse a recipe whose largest step cannot fit `device.max_memory`.

    Raises:
        DataError: it cannot; the message gives each part of the memory, and what to lower.
    """
    memory = step_memory(recipe, config, shapes)
    if memory.limit is None or memory.total <= memory.limit:
        return
    if memory.weights + memory.gradients > memory.limit:
        advice = (
            "the model needs its weights sharded over devices, which ms_varlen leaves to MindFormers: "
            "`ms-varlen mindformers-recipe` makes a recipe for its Trainer"
        )
    else:
        recompute = "" if recipe.model.recompute else "set model.recompute=true, "
        advice = f"{recompute}lower {recipe.mode.size_key}"
    activations = memory.activations_recomputed if recipe.model.recompute else memory.activations
    raise DataError(
        f"a step must fit device.max_memory ({memory.limit:g} GB), got at least {memory.total:.1f} GB on "
        f"T={memory.tokens}: {memory.weights:.1f} of weights, gradients and moments, "
        f"{memory.gradients + memory.casts:.1f} of a micro-batch's gradients and of casts, {activations:.1f} of "
        f"activations, {memory.logits:.1f} of logits; {advice}, or raise device.max_memory"
    )
