"""The compressed mask of the NPU's operator against the full mask of padded rows."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_varlen.errors import VarlenError
from ms_varlen.ops import ascend_attention
from ms_varlen.ops.compressed_mask import check_compressed_mask, compressed_mask
from tests.support.flash_attention import flash_attention_score
from tests.support.planted import plant


@pytest.mark.parametrize("longest", [1, 2, 64, 2048, 2049, 100_000])
def test_the_compressed_mask_means_the_full_one(longest):
    check_compressed_mask(longest)


def test_beyond_one_block_a_query_sees_all_of_the_block_before():
    keep = compressed_mask(2050)
    assert keep[2049].tolist() == [True] * 2050
    assert keep[2048].tolist() == [True] * 2049 + [False]
    assert keep[2047, 2047:].tolist() == [True, False, False]


@pytest.mark.parametrize("tokens", [5, 2060])
def test_it_is_what_the_emulated_operator_computes(tokens, monkeypatch):
    monkeypatch.setattr(ascend_attention.ops, "flash_attention_score", flash_attention_score)
    q, k, v = np.random.default_rng(0).standard_normal((3, tokens, 1, 16)).astype(np.float16)
    ends = Tensor(np.array([tokens], np.int32))
    out = ascend_attention.ascend_attention(Tensor(q), Tensor(k), Tensor(v), (ends,))
    q, k, v = (x[:, 0].astype(np.float32) for x in (q, k, v))
    scores = np.where(compressed_mask(tokens), q @ k.T / 4, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(out.astype(ms.float32).asnumpy()[:, 0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("longest", [64, 4096])
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("compressed mask upside down", "MASK-INVERTED", "discards key 0 for query 1"),
        ("compressed mask that keeps what it must discard", "MASK-INVERTED", "discards key 0 for query 0"),
        ("compressed mask one too far", "MASK-WRONG", "keeps key 1 for query 0"),
    ],
)
def test_another_mask_is_named(name, code, words, longest):
    with plant(name), pytest.raises(VarlenError, match=r"must keep what the full mask keeps .* mark what") as error:
        check_compressed_mask(longest)
    assert error.value.code == code
    if name != "compressed mask upside down":
        assert words in str(error.value)
