import dataclasses
from types import SimpleNamespace

import pytest

from ms_varlen import DataError
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.work import Calibration, EpochWork, memory_estimate

WORK = EpochWork(steps=4, graphs=3, real=60, computed=80, real_squared=500, computed_squared=1000, largest=20)
CALIBRATION = {
    "format": 1,
    "machine": {"processor": "some CPU", "cores": 2, "system": "Linux x86_64"},
    "versions": None,
    "seconds_per_token": 0.5,
    "seconds_per_squared_token": 0.01,
    "seconds_per_step": 2.0,
    "relative_error": 0.03,
    "steps": 12,
    "seconds_per_compile": 7.0,
    "parameters": 5000,
    "body": "kernel",
}


def test_shares_and_totals_of_an_epoch():
    cost = CostModel(linear=10.0, quadratic=2.0)
    assert WORK.flops(cost) == 10 * 80 + 2 * 1000
    assert WORK.flop_share(cost) == (10 * 60 + 2 * 500) / 2800
    assert (WORK.token_share, WORK.tokens_per_step, WORK.per_token(120.0)) == (0.75, 15.0, 2.0)


def test_a_part_speaks_for_the_whole():
    assert WORK.scaled(2.5) == EpochWork(10, 3, 150, 200, 1250, 2500, 20)


def test_seconds_of_an_epoch_by_calibration():
    calibration = Calibration.from_dict(CALIBRATION, "calibration.json")
    assert calibration.machine == "some CPU, 2 cores, Linux x86_64"
    assert calibration.seconds(WORK) == 0.5 * 80 + 0.01 * 1000 + 2.0 * 4


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"format": 2}, "got format 2, in c.json"),
        ({"seconds_per_token": None}, "got format 1 without seconds_per_token, in c.json"),
        ({"parameters": None, "body": 3}, "got format 1 without parameters, body, in c.json"),
    ],
)
def test_another_calibration_is_refused(changes, found):
    with pytest.raises(DataError, match=found):
        Calibration.from_dict(CALIBRATION | changes, "c.json")


def test_a_calibration_speaks_of_one_model_and_one_body():
    calibration = Calibration.from_dict(CALIBRATION, "c.json")
    assert calibration.mismatch(5000, ["kernel"]) is None
    assert calibration.mismatch(6000, ["kernel"]) == (
        "it was measured on a model of 5,000 parameters, the recipe's has 6,000"
    )
    assert calibration.mismatch(5000, ["reference", "ascend"]) == (
        "it was measured with the kernel body of the operators, here it is reference or ascend"
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden_size: int = 8
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 3
    intermediate_size: int = 10
    vocab_size: int = 50


def test_memory_counts_weights_activations_and_logits():
    layer = 4 * 8 + 2 * 4 * 3 + 2 * 2 * 3 + 3 * 10
    assert memory_estimate(Sizes(), 1000, 20, 4, recompute=False) == {
        "weights": 16_000,
        "gradients": 4_000,
        "casts": 0,
        "activations": 4 * 20 * 2 * layer,
        "logits": 4 * 4 * 20 * 50,
        "total": 16_000 + 4_000 + 160 * layer + 16_000,
    }


def test_weights_that_compute_in_bf16_are_cast_and_recomputed_ones_one_after_another():
    casts = [memory_estimate(Sizes(), 1000, 20, 2, recompute)["casts"] for recompute in (False, True)]
    assert casts == [2 * 1000, 2 * 50 * 8]


def test_recomputing_keeps_the_inputs_of_layers_and_one_whole_layer():
    layer = 4 * 8 + 2 * 4 * 3 + 2 * 2 * 3 + 3 * 10
    assert memory_estimate(Sizes(), 1, 1, 2, recompute=True)["activations"] == 2 * (2 * 8 + layer)


def test_memory_needs_a_vocabulary():
    with pytest.raises(AssertionError, match="with_vocab_size"):
        memory_estimate(SimpleNamespace(**dataclasses.asdict(Sizes()) | {"vocab_size": None}), 1, 1, 4, False)
