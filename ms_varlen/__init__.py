"""Train language models on sequences of very different lengths, with MindSpore.

The public API: `from ms_varlen import ...` gives the names below, each described in docs/library.md. Everything else
in the package is private and may move. A name is imported from its module when it is first used, so that
`import ms_varlen` is fast and starts no MindSpore.
"""
# ruff: noqa: F401

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    # lengths and modes
    "SeqLens": "ms_varlen.lengths",
    "Mode": "ms_varlen.modes",
    # samples, layout, data set
    "ArraySamples": "ms_varlen.batches.samples",
    "Layout": "ms_varlen.batches.layout",
    "MicroBatches": "ms_varlen.batches.dataset",
    "MicroBatchLoader": "ms_varlen.batches.dataset",
    # plan
    "EpochPlan": "ms_varlen.planning.plan",
    "PlanSettings": "ms_varlen.planning.plan",
    "token_budget_offsets": "ms_varlen.planning.batches",
    # shapes and operators
    "TokenShapes": "ms_varlen.graph.shapes",
    "attention_columns": "ms_varlen.ops.attention",
    "attention_inputs": "ms_varlen.ops.attention",
    "declared_batch": "ms_varlen.ops.attention",
    "varlen_attention": "ms_varlen.ops.attention",
    "linear_cross_entropy": "ms_varlen.ops.loss",
    # errors
    "VarlenError": "ms_varlen.errors",
    "CheckpointError": "ms_varlen.errors",
    "DataError": "ms_varlen.errors",
    "LengthsError": "ms_varlen.errors",
    "RanksError": "ms_varlen.errors",
    "RecipeError": "ms_varlen.errors",
    "ShapesError": "ms_varlen.errors",
}
"""Each public name and the module that it lives in."""

if TYPE_CHECKING:  # the same for editors and type checkers
    from ms_varlen.batches.dataset import MicroBatches, MicroBatchLoader
    from ms_varlen.batches.layout import Layout
    from ms_varlen.batches.samples import ArraySamples
    from ms_varlen.errors import (
        CheckpointError,
        DataError,
        LengthsError,
        RanksError,
        RecipeError,
        ShapesError,
        VarlenError,
    )
    from ms_varlen.graph.shapes import TokenShapes
    from ms_varlen.lengths import SeqLens
    from ms_varlen.modes import Mode
    from ms_varlen.ops.attention import attention_columns, attention_inputs, declared_batch, varlen_attention
    from ms_varlen.ops.loss import linear_cross_entropy
    from ms_varlen.planning.batches import token_budget_offsets
    from ms_varlen.planning.plan import EpochPlan, PlanSettings
else:

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


__all__ = [*_HOME]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
