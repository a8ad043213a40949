"""Names of parameters and moments, checked, and what else people's checkpoints hold."""

import re
from collections.abc import Iterable, Mapping

from ms_varlen.checkpoint.tensors import FLOATS, StoredTensor
from ms_varlen.errors import CheckpointError

MOMENTS = ("adam_m", "adam_v")

_BUFFERS = re.compile(
    r"(?:^|\.)(?:inv_freq|(?:cos|sin)_cached|masked_bias|attn(?:ention)?\.bias|causal_mask|position_ids)$"
)
_LEARNED_POSITIONS = re.compile(r"(?:^|\.)(?:wpe|embed_positions|position_embeddings?)\.(?:weight|embedding_weight)$")


def without_buffers(tensors: Mapping[str, StoredTensor], side: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors without those that a model makes for its own context (rotary tables, causal masks), and those names.

    Raises:
        CheckpointError: a learned table of positions, which no decoder here has.
    """
    for name, tensor in tensors.items():
        if _LEARNED_POSITIONS.search(name):
            raise CheckpointError(
                f"{side}: parameter {name} is a learned position table of {tensor.shape[0]} positions, which the "
                "decoders here do not have (theirs are rotary); this model cannot be converted"
            )
    buffers = sorted(name for name in tensors if _BUFFERS.search(name))
    return {name: tensor for name, tensor in tensors.items() if name not in buffers}, buffers


def check_parameters(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], side: str, advice: str
) -> None:
    """Compare what a file holds with what a model has.

    Args:
        found: the file's tensors.
        expected: name -> shape.
        side: what the file is, for the message.
        advice: what to do about a difference.
    Raises:
        CheckpointError: a parameter is missing, extra, of another shape, or no floating-point numbers; names the first.
    """
    wrong = list(_differences(found, expected))
    if wrong:
        raise CheckpointError(f"{side}: {wrong[0]} ({len(wrong)} of {len(expected)} parameters differ); {advice}")


def _differences(found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    for name in sorted(found.keys() | expected.keys()):
        tensor = found.get(name)
        if tensor is None:
            yield f"parameter {name} is missing, this model has it with shape {list(expected[name])}"
        elif name not in expected:
            yield f"parameter {name} ({tensor.describe()}) is one too many, this model has none of that name"
        elif tensor.shape != expected[name]:
            yield f"parameter {name} must have shape {list(expected[name])} for this model, found {tensor.describe()}"
        elif tensor.dtype not in FLOATS:
            yield f"parameter {name} must be one of {', '.join(FLOATS)}, found {tensor.describe()}"


def moment_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of AdamW's two moments of each parameter."""
    return {f"{prefix}.{name}": shape for prefix in MOMENTS for name, shape in shapes.items()}
