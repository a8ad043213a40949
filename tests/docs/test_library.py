"""The parts in a program of one's own: the example of docs/library.md, and what it needs of the data set."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ms_varlen import (
    ArraySamples,
    DataError,
    Layout,
    MicroBatches,
    TokenShapes,
    attention_columns,
    declared_batch,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"<!-- library example -->\s*```python\n(.*?)```", re.DOTALL)


@pytest.mark.graph
def test_the_example_of_the_page_learns_in_one_graph(tmp_path):
    (example,) = EXAMPLE.findall((ROOT / "docs/library.md").read_text(encoding="utf-8"))
    script = tmp_path / "example.py"  # a file, since MindSpore compiles nothing that it cannot read again
    script.write_text(example + "print('graphs', len(model.train_network.compile_cache))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss is ([\d.e-]+)", done.stdout)]
    assert len(losses) >= 4
    assert losses[-1] < 0.1 * losses[0]
    assert done.stdout.endswith("graphs 1\n")


def batches_of(samples, kind="range"):
    layout = Layout("varlen", TokenShapes(kind, 16, 64, 16, max_segments=8), seq_length=32)
    return MicroBatches(samples, layout, pad_id=0, attention_columns=attention_columns)


def test_samples_in_memory_make_micro_batches(body):
    samples = ArraySamples([np.arange(3), np.array([7, 8], np.int64), np.arange(5)])
    columns = batches_of(samples).micro_batch(np.array([1, 0]))
    assert columns["input_ids"].tolist() == [7, 8, 0, 1, 2] + [0] * 11
    assert columns["labels"].tolist() == [8, -100, 1, 2, -100] + [-100] * 11
    assert columns["actual_seq_qlen"].tolist() == [2, 5, 16]


def test_tokens_that_are_not_supervised_are_no_targets():
    samples = ArraySamples([np.arange(4), np.arange(2)], [[False, False, True, True], [True, False]])
    assert batches_of(samples).micro_batch(np.array([0, 1]))["labels"][:6].tolist() == [-100, 2, 3, -100, -100, -100]


@pytest.mark.parametrize("kind", ["static", "range"])
def test_a_declaration_has_the_columns_of_the_data_set_in_their_order(body, kind):
    batches = batches_of(ArraySamples([np.arange(30)] * 2), kind)
    columns = batches.micro_batch(np.array([0, 1]))
    declared = declared_batch(TokenShapes(kind, 16, 64, 16, max_segments=8))
    assert list(columns) == batches.column_names()
    assert len(declared) == len(columns)
    for tensor, (name, column) in zip(declared, columns.items(), strict=True):
        assert len(tensor.shape) == column.ndim, name
        fixed = [size for size, of in zip(column.shape, tensor.shape, strict=True) if of not in (-1, size)]
        assert not fixed, name


@pytest.mark.parametrize(
    ("samples", "supervised", "message"),
    [
        ([[1, 2], []], None, r"samples\[1\] must be token ids .* got float64 of shape \(0,\)"),
        ([[1.5, 2.0]], None, r"samples\[0\] must be token ids \(integers\) on one axis"),
        ([[[1, 2]]], None, r"samples\[0\] must .* of shape \(1, 2\)"),
        (
            [[1, 2], [3]],
            [[True, True], [True, False]],
            r"supervised\[1\] must have one entry per token of samples\[1\]",
        ),
        ([[1, 2], [3]], [[True, True]], r"supervised\[2\] must have one entry"),
    ],
)
def test_samples_that_cannot_be_laid_out_are_named(samples, supervised, message):
    with pytest.raises(DataError, match=message):
        ArraySamples(samples, supervised)
