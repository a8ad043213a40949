"""`varlen_attention`, and the lengths it reads, made on the host.

    columns = attention_columns(lens)                         # NumPy, in the data loader
    lengths = attention_inputs(columns)                       # the tuple that the call takes
    out_TND = varlen_attention(q_TND, k_TND, v_TND, lengths)  # in any Cell, graph mode or PyNative

Lengths reach a graph as values of tensors whose sizes are dynamic: no Python number varies from batch to batch, so no
batch compiles anything again. Finite edits of one segment leave the outputs of the others bit-equal.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_varlen.batches.micro_batch import COLUMNS
from ms_varlen.errors import LengthsError, RecipeError
from ms_varlen.graph.declare import declared_inputs
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.lengths import SeqLens, check_ends
from ms_varlen.limits import MAX_SEGMENTS
from ms_varlen.ops.ascend_attention import ascend_attention, ascend_faults
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernels import kernel_varlen_attention
from ms_varlen.ops.reference_attention import declared_pair_columns, pair_columns, reference_attention


def varlen_attention(q_TND, k_TND, v_TND, lengths):
    """Attention that is causal inside each segment and sees nothing of the others.

    Args:
        q_TND: [T, N, D] queries, N heads of size D.
        k_TND: [T, n, D] keys; n KV heads, n divides N, query head h reads KV head h // (N // n).
        v_TND: [T, n, D] values.
        lengths: tuple of tensors from `attention_inputs`, for the body in use.
    Returns:
        [T, N, D] in q's dtype.
    """
    body = body_in_use()
    if body == "ascend":
        return ascend_attention(q_TND, k_TND, v_TND, lengths)
    if body == "kernel":
        return kernel_varlen_attention(q_TND, k_TND, v_TND, lengths)
    return reference_attention(q_TND, k_TND, v_TND, lengths)


def check_segments(ends: np.ndarray, tokens: int) -> None:
    """Refuse running ends that an attention call cannot take.

    Args:
        ends: [G] ints (host), the running ends of the attention segments, padding's included.
        tokens: size of T in the batch that they came with.
    Raises:
        LengthsError: they do not cover T, or are more than FlashAttentionScore takes. The limit holds for every body: a
            recipe that runs on a CPU runs on an NPU.
    """
    check_ends(ends, tokens)
    if len(ends) > MAX_SEGMENTS:
        raise LengthsError(
            f"actual_seq_qlen must have at most {MAX_SEGMENTS} segments (padding's included), got {len(ends)}; "
            "lower batch.max_segments"
        )


def check_attention_limits(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, max_segments: int, body: str
) -> None:
    """Refuse, all at once and before anything is compiled, what the body cannot compute.

    Args:
        head_dim: size of one head.
        dtype: what q, k and v are computed in, as in "bfloat16".
        max_segments: the most attention segments on T, padding's included.
        body: as `body_in_use` names it.
    Raises:
        RecipeError: one line for each limit that is broken.
    """
    faults = []
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        faults.append(f"num_key_value_heads must divide num_attention_heads ({num_heads}), got {num_kv_heads}")
    if max_segments > MAX_SEGMENTS:
        faults.append(
            f"max_segments must be at most {MAX_SEGMENTS} (FlashAttentionScore), got {max_segments}; "
            "lower batch.max_segments"
        )
    if body == "ascend":
        faults += ascend_faults(num_heads, num_kv_heads, head_dim, dtype)
    if faults:
        raise RecipeError(faults, f"attention ({body} body)")


def attention_columns(lens: SeqLens, body: str | None = None) -> dict[str, np.ndarray]:
    """The columns that a data set carries for this body, in the order of `lengths`.

    Args:
        lens: the lengths of one micro-batch.
        body: as `body_in_use` names it; by default that one.
    Returns:
        actual_seq_qlen: [G] int32, running ends, last == T. For "reference" also those of `pair_columns`.
    Raises:
        LengthsError: more segments than a call takes.
    """
    check_segments(lens.actual_seq_qlen, lens.tokens)
    columns = {"actual_seq_qlen": lens.actual_seq_qlen}
    if (body or body_in_use()) == "reference":
        columns |= pair_columns(lens)
    return columns


def declared_columns(body: str, tokens: int | None = None) -> dict[str, Tensor]:
    """Tensors without data that declare `attention_columns` to `set_inputs`, under the same names in the same order.

    Args:
        tokens: size of T where it never changes; None where it does. The number of segments is dynamic either way.
    """
    declared = {"actual_seq_qlen": Tensor(shape=[None], dtype=ms.int32)}
    if body == "reference":
        declared |= declared_pair_columns(tokens)
    return declared


def declared_batch(shapes: TokenShapes) -> tuple[Tensor, ...]:
    """The arguments of `cell.set_inputs(*...)` for all columns of a micro-batch, in the order of the data set.

    So a cell with ``construct(self, input_ids, labels, position_ids, seq_lens, *lengths)`` takes a data set's items as
    they are, in `mindspore.train.Model` too, and compiles once.

    Args:
        shapes: the sizes that the layout was given; of kind "static" or "range", since a cell has one declaration.
    """
    tokens = dict(zip(COLUMNS, declared_inputs(shapes, dict(zip(COLUMNS, "TTTGG", strict=True))), strict=True))
    attention = declared_columns(body_in_use(), None if shapes.kind == "range" else shapes.max)
    return (*tokens.values(), *(value for name, value in attention.items() if name not in tokens))


def attention_inputs(columns: dict, body: str | None = None) -> tuple[Tensor, ...]:
    """`lengths` for `varlen_attention`: tensors on the host, which nothing should move or compute with on the way.

    Args:
        columns: what `attention_columns` made, alone or among the other columns of a batch; arrays or tensors.
        body: as `body_in_use` names it; by default that one.
    """
    names = declared_columns(body or body_in_use())
    return tuple(columns[name] if isinstance(columns[name], Tensor) else Tensor(columns[name]) for name in names)
