"""The two sides of an alignment: how each lays out the same samples and trains on them."""

import dataclasses

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.layout import Layout
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.lengths import SeqLens
from ms_varlen.modes import Mode
from ms_varlen.ops.dense_attention import declared_dense_columns, dense_attention, dense_columns
from ms_varlen.planning.rows import divisor_boundaries
from ms_varlen.train.graphs import Accumulated, AttentionPath, TrainingGraphs
from ms_varlen.workload.workload import Workload

DENSE_ROWS = 4
"""Rows of a micro-batch on the padded side."""

MOST_SEGMENTS = 128
"""Segments of a micro-batch on the other side, if that is not padded."""


@dataclasses.dataclass
class Side:
    """One of the two trainings."""

    workload: Workload
    target: str
    attention: AttentionPath | None

    def __post_init__(self):
        store = self.workload.store
        self.graphs = TrainingGraphs(self.workload, self.target, self.attention)
        self._batches = MicroBatches(store.train, self.workload.layout, store.pad_id, self.graphs.attention.columns)

    def accumulate(self, parts: list[np.ndarray]) -> Accumulated:
        """Add the gradients of micro-batches of sample ids."""
        return self.graphs.accumulate_all([self._batches.micro_batch(ids) for ids in parts])

    def gradients_at(self, weights: dict[str, np.ndarray], parts: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradient sums of micro-batches at other weights; own weights stay, accumulators end empty."""
        own = self.graphs.model_weights()
        self.graphs.clear_gradients()
        self.graphs.set_weights(weights)
        self.accumulate(parts)
        gradients = self.graphs.gradients()
        self.graphs.clear_gradients()
        self.graphs.set_weights(own)
        return gradients

    def noise(self, parts: list[np.ndarray]) -> float:
        """Return how much the loss moves when samples change places; the accumulators stay empty."""
        losses = []
        for chosen in (parts, _in_other_places(parts, self.workload.layout)):
            losses.append(self.accumulate(chosen).loss)
            self.graphs.clear_gradients()
        return abs(losses[0] - losses[1])


def dense_side(workload: Workload, target: str) -> tuple[Workload, str, AttentionPath]:
    """Return the workload laid out as dense padded rows, and its attention."""
    recipe = workload.recipe
    divisor = recipe.shapes.divisor
    longest = round_up(recipe.model.seq_length, divisor)
    # At least two sizes, since a range must be open.
    shapes = TokenShapes(
        "range", DENSE_ROWS * divisor, DENSE_ROWS * max(longest, 2 * divisor), DENSE_ROWS * divisor, DENSE_ROWS
    )
    row_lengths = tuple(divisor_boundaries(longest, divisor).tolist())
    layout = Layout(Mode.PADDED, shapes, longest, rows=DENSE_ROWS, row_lengths=row_lengths)
    path = AttentionPath(dense_attention, _row_mask, lambda _: declared_dense_columns(), "dense")
    return dataclasses.replace(workload, shapes=shapes, layout=layout), target, path


def _row_mask(lens: SeqLens) -> dict[str, np.ndarray]:
    rows = lens.segment_lens.size
    return dense_columns(lens.seq_lens, rows, lens.tokens // rows)


def other_side(workload: Workload, target: str, mode: Mode) -> tuple[Workload, str, AttentionPath | None]:
    """Return the workload laid out in another mode; the path is None if attention is `varlen_attention`."""
    dense, _, path = dense_side(workload, target)
    if not mode.follows_lengths:
        return dense, target, path
    shapes = dataclasses.replace(dense.shapes, divisor=workload.shapes.divisor, max_segments=MOST_SEGMENTS)
    row_lengths = dense.layout.row_lengths if mode.in_rows else ()
    layout = Layout(mode, shapes, dense.layout.seq_length, row_lengths=row_lengths)
    return dataclasses.replace(workload, shapes=shapes, layout=layout), target, None


def _in_other_places(parts: list[np.ndarray], layout: Layout) -> list[np.ndarray]:
    """Return the samples in another order, rows also in other micro-batches, so that sums are rounded differently."""
    if not layout.row_lengths:
        return [ids[::-1] for ids in parts]
    return np.array_split(np.roll(np.concatenate(parts), DENSE_ROWS // 2), len(parts))


def parts_of_other(ids: np.ndarray, lengths: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """Return a step's samples in micro-batches of another layout: rows of similar length, or as many as T holds."""
    if layout.row_lengths:
        ids = ids[np.argsort(lengths[ids], kind="stable")]  # fewer pads
        return [ids[start : start + DENSE_ROWS] for start in range(0, ids.size, DENSE_ROWS)]
    if layout.mode.policy == "packed":
        ids = ids[np.argsort(-np.asarray(lengths)[ids], kind="stable")]
    capacity, parts = DENSE_ROWS * layout.seq_length, [[int(ids[0])]]
    for sample in ids[1:].tolist():
        full = int(lengths[parts[-1]].sum()) + int(lengths[sample]) > capacity
        if full or len(parts[-1]) == MOST_SEGMENTS // 2:
            parts.append([])
        parts[-1].append(sample)
    return [np.array(part) for part in parts]
