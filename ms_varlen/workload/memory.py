"""What a training step takes of a device's memory, and whether it can fit. Imports no MindSpore."""

from typing import Any

from ms_varlen.errors import DataError
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.models.config import DecoderConfig
from ms_varlen.planning.work import memory_estimate
from ms_varlen.recipe.recipe import Recipe

GB = 1e9


def device_bytes(max_memory: str | None) -> float | None:
    """``device.max_memory`` as bytes; None without a limit."""
    return None if max_memory is None else float(max_memory.removesuffix("GB")) * GB


def step_memory(recipe: Recipe, config: DecoderConfig, shapes: TokenShapes) -> dict[str, Any]:
    """Memory of a device in the largest step, in GB: a lower bound, see `memory_estimate`.

    Data parallel ranks hold whole weights, gradients and moments each; nothing is sharded.

    Returns:
        `tokens` (T), `weights` (with a step's gradients and moments), `gradients` (a micro-batch's own), `casts` (bf16
        copies of weights, as the recipe recomputes), `activations` with and without recomputing layers, `logits`, the
        `total` as the recipe is, and the `limit` (`device.max_memory`).
    """
    value_bytes = 4 if recipe.device.target == "CPU" else 2
    found = {
        recompute: memory_estimate(config, config.parameter_count(), shapes.max, value_bytes, recompute)
        for recompute in (False, True)
    }
    limit = device_bytes(recipe.device.max_memory)
    return {
        "tokens": shapes.max,
        "weights": round(found[False]["weights"] / GB, 3),
        "gradients": round(found[False]["gradients"] / GB, 3),
        "casts": round(found[recipe.model.recompute]["casts"] / GB, 3),
        "activations": round(found[False]["activations"] / GB, 3),
        "activations_recomputed": round(found[True]["activations"] / GB, 3),
        "logits": round(found[False]["logits"] / GB, 3),
        "recompute": recipe.model.recompute,
        "total": round(found[recipe.model.recompute]["total"] / GB, 3),
        "limit": None if limit is None else limit / GB,
    }


def check_memory(recipe: Recipe, config: DecoderConfig, shapes: TokenShapes) -> None:
    """Refuse a recipe whose largest step cannot fit `device.max_memory`.

    Raises:
        DataError: it cannot; says what takes how much, and what to lower.
    """
    memory = step_memory(recipe, config, shapes)
    if memory["limit"] is None or memory["total"] <= memory["limit"]:
        return
    if memory["weights"] + memory["gradients"] > memory["limit"]:
        advice = (
            "the model needs its weights sharded over devices, which ms_varlen leaves to MindFormers: "
            "`ms-varlen mindformers-recipe` makes a recipe for its Trainer"
        )
    else:
        recompute = "" if recipe.model.recompute else "set model.recompute=true, "
        advice = f"{recompute}lower {recipe.mode.size_key}"
    activations = memory["activations_recomputed" if recipe.model.recompute else "activations"]
    raise DataError(
        f"a step must fit device.max_memory ({memory['limit']:g} GB), got at least {memory['total']:.1f} GB on "
        f"T={memory['tokens']}: {memory['weights']:.1f} of weights, gradients and moments, "
        f"{memory['gradients'] + memory['casts']:.1f} of a micro-batch's gradients and of casts, {activations:.1f} of "
        f"activations, {memory['logits']:.1f} of logits; {advice}, or raise device.max_memory"
    )
