"""The arguments of `set_inputs`, made from a `TokenShapes`.

Columns are named with one letter per axis: `T` tokens, `G` attention segments, `?` any size. All are int32::

    columns = {"input_ids": "T", "labels": "T", "position_ids": "T", "actual_seq_qlen": "G", "key_rows": "??"}
    cell.set_inputs(*declared_inputs(shapes, columns))
"""

from collections.abc import Mapping

import mindspore as ms
from mindspore import Symbol, Tensor

from ms_varlen.graph.shapes import TokenShapes


def declared_inputs(shapes: TokenShapes, columns: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Tensors without data for `cell.set_inputs(*...)`, in the order of `columns`.

    A range of T is one unique `Symbol`, so MindSpore itself refuses a batch whose columns differ in T. G is dynamic in
    every kind: lengths vary as values and need no filler.

    Args:
        shapes: the sizes that T and G may have.
        columns: name -> axes, one letter each of `T`, `G`, `?`.
    Source: mindspore.Symbol and mindspore.nn.Cell.set_inputs, MindSpore 2.9.
    """
    tokens: int | Symbol = shapes.max
    if shapes.kind == "range":
        tokens = Symbol(min=shapes.min, max=shapes.max, divisor=shapes.divisor, unique=True)
    sizes = {"T": tokens, "G": Symbol(min=1, max=shapes.max_segments), "?": None}
    return tuple(Tensor(shape=[sizes[axis] for axis in axes], dtype=ms.int32) for axes in columns.values())
