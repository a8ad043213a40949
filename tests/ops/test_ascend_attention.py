import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_varlen.errors import LengthsError, RecipeError
from ms_varlen.lengths import SeqLens
from ms_varlen.ops import ascend_attention, body
from ms_varlen.ops.attention import attention_columns, attention_inputs, check_attention_limits, varlen_attention
from tests.support.flash_attention import flash_attention_score, move_to_device
from tests.support.naive_attention import HALF, N, mode, naive, qkvw


@pytest.fixture
def ascend_body():
    body.use_body("ascend")
    yield
    body.use_body(None)


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_ascend_body_through_the_emulator(dtype, ascend_body, monkeypatch):
    calls = []

    def recorded(*args, **kwargs):
        calls.append((args, kwargs))
        return flash_attention_score(*args, **kwargs)

    monkeypatch.setattr(ascend_attention.ops, "flash_attention_score", recorded)
    lens = SeqLens.packed([70, 1, 30], seq_length=128, tokens=128)
    arrays = qkvw(128, size=32)
    q, k, v = (Tensor(x).astype(dtype) for x in arrays[:3])
    out = varlen_attention(q, k, v, attention_inputs(attention_columns(lens, "ascend"), "ascend"))
    assert out.dtype == dtype
    rounded = [x.astype(ms.float32).asnumpy() for x in (q, k, v)]
    bound = {"rtol": 1e-2, "atol": 1e-2} if dtype == ms.bfloat16 else HALF  # bfloat16 keeps 8 bits
    want = naive(*rounded, arrays[3], [70, 1, 30, 27])[0]
    np.testing.assert_allclose(out.astype(ms.float32).asnumpy(), want, **bound)

    [(args, kwargs)] = calls
    assert args[3] == N
    assert kwargs.pop("actual_seq_qlen").asnumpy().tolist() == [70, 71, 101, 128]
    assert kwargs.pop("actual_seq_kvlen").asnumpy().tolist() == [70, 71, 101, 128]
    assert kwargs.pop("attn_mask").shape == (2048, 2048)
    assert kwargs == {
        "keep_prob": 1.0,
        "scalar_value": 32**-0.5,
        "pre_tokens": 2147483647,
        "next_tokens": 0,
        "input_layout": "TND",
        "sparse_mode": 3,
    }


def test_ends_that_were_moved_to_the_device_are_refused(ascend_body, monkeypatch):
    monkeypatch.setattr(ascend_attention.ops, "flash_attention_score", flash_attention_score)
    lens = SeqLens.packed([3, 5], seq_length=8)
    q, k, v = (Tensor(x).astype(ms.float16) for x in qkvw(8, size=16)[:3])
    ends = attention_inputs(attention_columns(lens, "ascend"), "ascend")
    varlen_attention(q, k, v, ends)
    with pytest.raises(LengthsError, match="must stay on the host") as error:
        varlen_attention(q, k, v, (move_to_device(ends[0]),))
    assert error.value.code == "LEN-DEVICE"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 2, 20, "bfloat16", 256, "ascend"), "head_dim must be a multiple of 16 and at most 512, got 20"),
        ((4, 2, 528, "bfloat16", 256, "ascend"), "head_dim must be .* got 528"),
        ((257, 1, 64, "bfloat16", 256, "ascend"), "num_attention_heads must be from 1 to 256, got 257"),
        ((4, 3, 64, "bfloat16", 256, "ascend"), r"num_key_value_heads must divide num_attention_heads \(4\), got 3"),
        ((4, 2, 64, "float32", 256, "ascend"), "dtype of q, k and v must be float16 or bfloat16, got float32"),
        ((4, 2, 64, "bfloat16", 1025, "ascend"), "max_segments must be at most 1024"),
        ((4, 3, 20, "float32", 1025, "reference"), "2 faults"),
    ],
)
def test_limits_are_refused_by_name(numbers, message):
    with pytest.raises(RecipeError, match=message):
        check_attention_limits(*numbers)


def test_what_the_bodies_can_compute_passes():
    check_attention_limits(256, 8, 512, "float16", 1024, "ascend")
    check_attention_limits(300, 3, 20, "float32", 1024, "reference")


def test_ascend_body_refuses_float32_before_the_operator(ascend_body):
    q = Tensor(np.zeros((4, 2, 20), np.float32))
    with pytest.raises(RecipeError, match=r"(?s)2 faults.*head_dim.*float16 or bfloat16, got float32"):
        varlen_attention(q, q, q, (Tensor([4], ms.int32),))


class HalfInputs(nn.Cell):
    """q, k and v become bfloat16 inside, as in a model with float32 master weights."""

    def construct(self, q, k, v, w, ends):
        q, k, v = (ops.cast(x, ms.bfloat16) for x in (q, k, v))
        return (ops.cast(varlen_attention(q, k, v, (ends,)), ms.float32) * w).sum()


class Gradients(nn.Cell):
    def __init__(self):
        super().__init__()
        self.gradient = ops.GradOperation(get_all=True)
        self.net = HalfInputs()

    def construct(self, q, k, v, w, ends):
        return self.gradient(self.net)(q, k, v, w, ends)


# head_num, keep_prob, scalar_value 1 / sqrt(64), pre_tokens, next_tokens, inner_precise, layout (4: TND), sparse_mode
ATTRIBUTES = ["4", "1", "0.125", "2147483647", "0", "0", "4", "3"]


def compile_until_refused(net):
    """The error of compiling and running `net` with dynamic T and a dynamic number of segments."""
    q, kv = Tensor(shape=[None, 4, 64], dtype=ms.float32), Tensor(shape=[None, 2, 64], dtype=ms.float32)
    net.set_inputs(q, kv, kv, q, Tensor(shape=[None], dtype=ms.int32))
    inputs = [Tensor(x) for x in qkvw(8, size=64)]
    with (
        mode(ms.GRAPH_MODE),
        pytest.raises(RuntimeError, match=r"Unsupported op \[FlashAttentionScore\] on CPU") as error,
    ):
        net(*inputs, Tensor([3, 8], ms.int32))
    return str(error.value)


@pytest.mark.graph
def test_ascend_body_compiles_up_to_the_missing_cpu_kernel(ascend_body):
    node = re.search(r"^node: .*PrimFunc_FlashAttentionScore,.*$", compile_until_refused(HalfInputs()), re.M)[0]
    assert node.count("PrimFunc_Cast") == 3
    assert "[7]: ValueNode<Tensor> Tensor(shape=[2048, 2048], dtype=UInt8" in node  # attn_mask
    assert node.count("ValueNode<Primitive> TensorToTuple") == 2  # the ends are read on the host
    assert re.findall(r"ValueNode<(?:Int64|FP32)Imm> ([\d.]+)", node) == ATTRIBUTES


@pytest.mark.graph
def test_gradient_of_the_ascend_body_compiles_to_the_operators_own_gradient(ascend_body, tmp_path):
    ms.set_context(save_graphs=2, save_graphs_path=str(tmp_path))
    try:
        compile_until_refused(Gradients())
    finally:
        ms.set_context(save_graphs=0)
    [graph] = tmp_path.glob("*_validate_*.ir")
    [node] = re.findall(r"^.* = PrimFunc_FlashAttentionScoreGrad\(.*$", graph.read_text(), re.M)
    assert re.findall(r"[IF]\d\d\(([\d.]+)\)", node) == ATTRIBUTES
