import mindspore as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ms_varlen.errors import ShapesError
from ms_varlen.graph.config import GraphConfig, ShapesConfig
from ms_varlen.graph.declare import declared_inputs
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.lengths import SeqLens

COLUMNS = {"input_ids": "T", "labels": "T", "actual_seq_qlen": "G", "key_rows": "??"}


def test_largest_size_is_rounded_up_to_the_divisor():
    shapes = TokenShapes.from_config(ShapesConfig(max=13, divisor=16), tokens=13, max_segments=4)
    assert shapes == TokenShapes("range", 16, 16, 16, 4)


@pytest.mark.parametrize("kind", ["static", "range"])
def test_thirteen_tokens_are_sixteen_in_every_column(kind):
    shapes = TokenShapes(kind, 16, 16, 16, max_segments=4)
    lengths = SeqLens.packed([6, 7], seq_length=16, tokens=shapes.size_for(13))
    assert lengths.position_ids.size == lengths.segment_ids.size == lengths.tokens == 16


def test_sizes_of_a_range_go_up_in_steps_of_the_divisor():
    shapes = TokenShapes("range", 100, 200, 64, max_segments=4)
    assert [shapes.size_for(tokens) for tokens in (1, 128, 129, 192, 193, 256)] == [128, 128, 192, 192, 256, 256]
    assert (shapes.sizes, shapes.predicted_graphs, shapes.describe()) == (None, 1, "T=128..256 by 64")


def test_static_has_one_size_for_all():
    shapes = TokenShapes.from_config(ShapesConfig(kind="static"), tokens=4096, max_segments=256)
    assert [shapes.size_for(tokens) for tokens in (1, 4095, 4096)] == [4096] * 3
    assert (shapes.sizes, shapes.predicted_graphs, shapes.describe()) == ((4096,), 1, "T=4096")


def test_buckets_round_up_to_the_next_size():
    shapes = TokenShapes.from_config(ShapesConfig(kind="buckets", divisor=16), 256, 9, sizes=[256, 64, 128, 64])
    assert [shapes.size_for(tokens) for tokens in (1, 64, 65, 129, 256)] == [64, 64, 128, 256, 256]
    assert (shapes.sizes, shapes.predicted_graphs, shapes.describe()) == ((64, 128, 256), 3, "T=64,128,256")
    assert shapes.tail_segments(50) == 3  # 129 tokens on 256
    assert shapes.as_range() == TokenShapes("range", 16, 256, 16, 9)


def test_more_tokens_than_the_largest_size_are_refused():
    with pytest.raises(
        ShapesError, match=r"T must be <= 256, the largest size declared \(shapes.max\), got 257; raise"
    ):
        TokenShapes("range", 64, 256, 64, max_segments=4).size_for(257)


def test_shapes_must_hold_a_full_micro_batch():
    with pytest.raises(ShapesError, match=r"the largest size must be >= 4096, .* got 2048; raise it"):
        TokenShapes.from_config(ShapesConfig(max=2048), tokens=4096, max_segments=4)


def test_smallest_size_above_the_largest_is_refused():
    with pytest.raises(ShapesError, match=r"shapes.min must be <= shapes.max \(128\), got 192"):
        TokenShapes.from_config(ShapesConfig(min=129), tokens=128, max_segments=4)


@given(
    kind=st.sampled_from(["static", "range"]),
    smallest=st.integers(1, 50),
    more=st.integers(0, 100),
    divisor=st.integers(1, 40),
    seq_length=st.integers(1, 60),
    share=st.floats(0, 1),
)
def test_every_size_is_declared_and_no_tail_has_more_segments_than_said(
    kind, smallest, more, divisor, seq_length, share
):
    shapes = TokenShapes(kind, smallest, smallest + more, divisor, max_segments=9)
    tokens = 1 + int(share * (shapes.max - 1))
    size = shapes.size_for(tokens)
    assert size >= tokens
    assert shapes.min <= size <= shapes.max
    assert size % divisor == 0
    assert -(-(size - tokens) // seq_length) <= shapes.tail_segments(seq_length)


def test_tail_segments_of_a_range_and_of_one_size():
    assert TokenShapes("range", 64, 4096, 64, 256).tail_segments(64) == 1
    assert TokenShapes("range", 1, 4096, 1, 256).tail_segments(64) == 0
    assert TokenShapes("static", 64, 4096, 64, 256).tail_segments(1024) == 4
    assert TokenShapes("static", 64, 4097, 1, 256).tail_segments(1024) == 4
    assert TokenShapes("static", 64, 4098, 1, 256).tail_segments(1024) == 5


def test_range_is_declared_as_one_symbol_shared_by_the_token_columns():
    ids, labels, ends, rows = declared_inputs(TokenShapes("range", 128, 256, 64, max_segments=32), COLUMNS)
    assert (ids.shape, labels.shape, ends.shape, rows.shape) == ((-1,), (-1,), (-1,), (-1, -1))
    assert {tensor.dtype for tensor in (ids, labels, ends, rows)} == {ms.int32}
    symbol = ids.symbolic_shape[0]
    assert symbol == labels.symbolic_shape[0]
    assert "id" in symbol
    assert {key: symbol[key] for key in ("min", "max", "divisor")} == {"min": 128, "max": 256, "divisor": 64}
    assert ends.symbolic_shape[0] == {"max": 32}


def test_static_declares_a_fixed_token_axis_and_a_dynamic_axis_of_ends():
    shapes = TokenShapes("static", 64, 256, 64, max_segments=32)
    assert [tensor.shape for tensor in declared_inputs(shapes, COLUMNS)] == [(256,), (256,), (-1,), (-1, -1)]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "static", "min": 64}, "min must be null with kind: static, got 64"),
        ({"min": 128, "max": 64}, r"min must be <= max \(64\), got 128"),
        ({"divisor": 0}, "greater than or equal to 1"),
        ({"kind": "buckets", "max": 64}, "max must be null with kind: buckets, got 64"),
        ({"kind": "dynamic"}, "'static', 'buckets' or 'range'"),
        ({"buckets": 4}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_shapes_sections_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        ShapesConfig(**section)


def test_defaults_of_the_sections_and_their_descriptions():
    assert ShapesConfig().model_dump() == {
        "kind": "range",
        "min": None,
        "max": None,
        "divisor": 64,
        "row_buckets": None,
        "token_sizes": None,
        "num_buckets": None,
    }
    assert GraphConfig().model_dump() == {
        "mode": "graph",
        "jit_level": "O0",
        "compile_cache": "auto",
        "max_graphs": 16,
    }
    assert all(field.description for model in (ShapesConfig, GraphConfig) for field in model.model_fields.values())
