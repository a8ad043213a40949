"""Batches of many lengths: few graphs, all of them counted, and an alarm where there are more (case C02)."""

import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_varlen.errors import ShapesError
from ms_varlen.graph.compile_watch import CompileWatch
from ms_varlen.graph.declare import declared_inputs
from ms_varlen.graph.shapes import TokenShapes

SHAPES = TokenShapes("range", 64, 256, 64, max_segments=1)
LENGTHS = np.random.default_rng(2).choice(np.arange(1, 257), 20, replace=False)


class Scale(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(2.0, ms.float32), name="weight")

    def construct(self, ids):
        return (ids.astype(ms.float32) * self.weight).sum()


@pytest.fixture
def cell():
    ms.set_context(mode=ms.GRAPH_MODE)
    yield Scale()
    ms.set_context(mode=ms.PYNATIVE_MODE)


def run(cell, watch, tokens):
    cell(Tensor(np.ones(tokens, np.int32)))
    return watch.check(f"T={tokens}")["train"]


@pytest.mark.graph
def test_one_graph_serves_twenty_lengths_of_a_declared_range(cell, caplog):
    cell.set_inputs(*declared_inputs(SHAPES, {"ids": "T"}))
    watch = CompileWatch({"train": (cell,)}, {"train": SHAPES.predicted_graphs}, max_graphs=1)
    assert {run(cell, watch, SHAPES.size_for(int(length))) for length in LENGTHS} == {1}
    assert "WARNING" not in {record.levelname for record in caplog.records}


@pytest.mark.graph
def test_undeclared_sizes_compile_as_predicted_then_warn_then_stop(cell, caplog):
    sizes = {SHAPES.size_for(int(length)) for length in LENGTHS}
    assert len(sizes) == 4
    watch = CompileWatch({"train": (cell,)}, {"train": 4}, max_graphs=5)
    caplog.set_level(logging.INFO, "ms_varlen")
    assert [run(cell, watch, SHAPES.size_for(int(length))) for length in LENGTHS][-1] == 4
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert run(cell, watch, 100) == 5
    assert "T=100 fit no declared shape" in caplog.records[-1].getMessage()
    match = (
        r"compiled graphs must be <= graph.max_graphs \(5\), got 6 \(train 6; 4 were predicted\), the last for T=101; "
    )
    with pytest.raises(ShapesError, match=match + "use shapes.kind=range"):
        run(cell, watch, 101)
