import dataclasses

import numpy as np
import pytest

from ms_varlen.diagnose.advise.advice import PREFERRED, Situation, advise, choose_boundaries, choose_pair
from ms_varlen.modes import Mode
from ms_varlen.planning.buckets import length_counts
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.statistics import cut_at, length_statistics
from ms_varlen.planning.work import Calibration, EpochWork


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    intermediate_size: int = 176
    vocab_size: int = 258


def work(computed, steps=100, graphs=3, largest=4096):
    return EpochWork(steps, graphs, real=1000, computed=computed, real_squared=0, computed_squared=0, largest=largest)


WORKS = {
    (Mode.PADDED, "static"): work(8000, largest=16384),
    (Mode.PADDED, "range"): work(4000, largest=16384),
    (Mode.BUCKETED, "range"): work(1200),
    (Mode.PACKED, "static"): work(1005, steps=90),
    (Mode.PACKED, "range"): work(1001, steps=90),
    (Mode.VARLEN, "static"): work(1100),
    (Mode.VARLEN, "buckets"): work(1020, graphs=10),
    (Mode.VARLEN, "range"): work(1010),
}
LONG_TAIL = np.array([100] * 900 + [500] * 85 + [2000] * 14 + [6000])


def situation(lengths=LONG_TAIL, **changes):
    statistics = length_statistics(lengths)
    chosen = Situation(
        pair=(Mode.VARLEN, "range"),
        works=WORKS,
        padded={"maximum": work(8000), "batch_maximum": work(4000)},
        documents=statistics,
        cut_at_p99=cut_at(lengths, -(-int(np.ceil(statistics["p99"])) // 64) * 64, CostModel.of_decoder(Sizes())),
        counts=length_counts(np.minimum(lengths, 2048)),
        padded_counts=length_counts(np.minimum(lengths, 2048)),
        sizes=Sizes(),
        parameters=100_000,
        value_bytes=4,
        recompute=False,
        seq_length=2048,
        divisor=64,
        token_budget=4096,
        rows=None,
        row_buckets=None,
        num_buckets=None,
        max_graphs=16,
        learning_rate=1e-3,
        epochs=2.0,
        max_memory=None,
        slow_range=False,
        calibration=None,
    )
    return dataclasses.replace(chosen, **changes)


def by_key(chosen):
    return {advice.key: advice for advice in advise(chosen)}


def test_every_pair_has_a_place_in_the_order_of_preference():
    assert len(set(PREFERRED)) == 12
    assert {mode for mode, _ in PREFERRED} == {"padded", "bucketed", "packed", "varlen"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (Mode.VARLEN, "range")),
        ({"pair": (Mode.PADDED, "static")}, (Mode.VARLEN, "range")),
        ({"pair": (Mode.PACKED, "static")}, (Mode.PACKED, "static")),  # as cheap: the recipe stays as it is
        ({"pair": (Mode.BUCKETED, "range")}, (Mode.VARLEN, "range")),
        ({"slow_range": True}, (Mode.PACKED, "static")),
        ({"slow_range": True, "max_graphs": 2}, (Mode.VARLEN, "range")),  # nothing fits: all are candidates
    ],
)
def test_the_pair_is_the_recipes_or_the_simplest_of_the_cheapest(changes, expected):
    assert choose_pair(situation(**changes)) == expected


def test_a_pair_of_too_many_graphs_is_not_advised():
    works = {**WORKS, (Mode.VARLEN, "buckets"): work(500, graphs=10)}
    assert choose_pair(situation(works=works)) == (Mode.VARLEN, "buckets")
    assert choose_pair(situation(works=works, max_graphs=9)) == (Mode.VARLEN, "range")


@pytest.mark.parametrize(("computed", "expected"), [(1100, (Mode.PADDED, "range")), (1200, (Mode.VARLEN, "range"))])
def test_where_p99_is_below_twice_the_median_a_small_gain_does_not_pay(computed, expected):
    alike = np.array([400] * 50 + [600] * 50)
    works = {**WORKS, (Mode.PADDED, "range"): work(computed)}
    chosen = situation(alike, works=works, pair=(Mode.PADDED, "range"))
    assert choose_pair(chosen) == expected
    assert "below 2: padding may be as good" in by_key(chosen)["mode"].why


def test_a_long_tail_says_how_long():
    mode = by_key(situation())["mode"]
    assert mode.numbers["p99_over_p50"] == pytest.approx(20.0, abs=0.2)
    assert (mode.advised, mode.recipe, mode.differs) == ("varlen", "varlen", False)
    assert mode.numbers["padded_work_over_advised"] == pytest.approx(4000 / 1010)


def test_speed_up_by_flops_and_next_to_it_by_measured_seconds():
    predicted = by_key(situation())["speed-up over padding"]
    assert predicted.advised == round(8000 / 1010, 2)
    assert predicted.numbers == pytest.approx(
        {"over_padded_to_maximum_by_flops": 8000 / 1010, "over_padded_to_batch_maximum_by_flops": 4000 / 1010}
    )
    assert "decided by the model's FLOPs" in predicted.why
    calibration = Calibration(0.001, 0.0, 1e-3, 5.0, 0.04, "some CPU, 2 cores", 1000, "kernel")
    measured = by_key(situation(calibration=calibration))["speed-up over padding"]
    assert measured.numbers["over_padded_to_maximum_by_flops"] == pytest.approx(8000 / 1010)
    assert measured.numbers["over_padded_to_maximum_by_seconds"] == pytest.approx(8.1 / 1.11)
    assert measured.advised == round(8.1 / 1.11, 2)
    assert "decided by calibration.json (some CPU, 2 cores; fit within 4%)" in measured.why


def test_calibration_decides_where_steps_cost_more_than_tokens():
    per_step = Calibration(1e-6, 0.0, 1.0, 5.0, 0.0, "m", 1000, "kernel")
    assert choose_pair(situation(calibration=per_step)) == (Mode.PACKED, "static")  # 90 steps instead of 100


def test_calibration_tells_seconds_of_an_epoch_and_of_compiling():
    found = by_key(situation(calibration=Calibration(0.001, 0.0, 1e-3, 5.0, 0.0, "m", 1000, "kernel")))
    assert found["steps an epoch"].numbers["seconds_per_epoch"] == pytest.approx(1.11)
    assert found["graphs"].numbers["compile_seconds"] == 15.0


@pytest.mark.parametrize(
    ("lengths", "seq_length", "advised"),
    [
        (LONG_TAIL, 2048, 2048),  # P99 is 2,000 and the recipe is near it
        (LONG_TAIL, 8192, 2048),  # one document of 6,000 tokens decides: P99 instead
        (LONG_TAIL, 512, 2048),
        (np.array([300] * 99 + [500] * 2), 4096, 512),  # the maximum is near P99: keep all
    ],
)
def test_the_longest_sequence_is_near_p99_where_the_tail_is_long(lengths, seq_length, advised):
    assert by_key(situation(lengths, seq_length=seq_length))["model.seq_length"].advised == advised


def test_cutting_at_p99_is_reported_with_its_price():
    numbers = by_key(situation())["model.seq_length"].numbers
    assert (numbers["p99"], numbers["max"], numbers["documents_cut"]) == (2048, 6016, 1)
    assert numbers["tokens_cut_share"] == pytest.approx((6000 - 2048) / LONG_TAIL.sum())
    assert numbers["memory_max_gb"] > numbers["memory_p99_gb"]


def test_buckets_are_as_many_as_pay():
    boundaries = choose_boundaries(situation(), Mode.BUCKETED)
    assert boundaries.tolist() == [128, 512, 2048]
    assert choose_boundaries(situation(max_graphs=4), Mode.BUCKETED).size == 2
    buckets = by_key(situation())["shapes.row_buckets"]
    assert buckets.numbers["num_buckets"] == 3
    assert buckets.numbers["padding_overhead"] < buckets.numbers["padding_overhead_one_less"]
    assert not buckets.differs


def test_buckets_that_cost_more_to_compile_than_they_save_are_left_out():
    dear = Calibration(1e-9, 0.0, 0.0, 1000.0, 0.0, "m", 1000, "kernel")
    cheap = Calibration(1.0, 0.0, 0.0, 1e-3, 0.0, "m", 1000, "kernel")
    assert choose_boundaries(situation(calibration=dear), Mode.BUCKETED).tolist() == [2048]
    assert choose_boundaries(situation(calibration=cheap), Mode.BUCKETED).tolist() == [128, 512, 2048]


def test_a_list_of_buckets_ends_where_a_recipe_wants_it():
    short = situation(np.array([100, 200, 300]), row_buckets=[2048], pair=(Mode.BUCKETED, "range"))
    advice = by_key(short)["shapes.row_buckets"]
    assert advice.advised[-1] == 2048
    assert advice.differs


def test_the_number_of_buckets_is_advised_where_rows_are_bucketed():
    works = {(Mode.BUCKETED, "buckets"): work(1000)}
    chosen = situation(works=works, pair=(Mode.BUCKETED, "buckets"), num_buckets=8)
    advice = by_key(chosen)["shapes.num_buckets"]
    assert (advice.advised, advice.recipe, advice.differs) == (3, 8, True)
    assert "shapes.num_buckets" not in by_key(situation(num_buckets=8))


def test_a_budget_that_memory_does_not_hold_is_lowered():
    assert by_key(situation())["batch.token_budget"].advised == 4096
    per_token = situation().memory(1)["total"] - situation().memory(0)["total"]
    tight = situation().memory(0)["total"] + 3000 * per_token
    advice = by_key(situation(max_memory=tight))["batch.token_budget"]
    assert (advice.advised, advice.differs) == (2944, True)
    too_tight = by_key(situation(max_memory=1.0))["batch.token_budget"]
    assert (too_tight.advised, too_tight.numbers["largest_tokens_in_memory"]) == (2048, 0)


def test_rows_are_advised_for_a_padded_recipe():
    works = {(Mode.PADDED, "range"): work(1000, largest=16384)}
    chosen = situation(works=works, pair=(Mode.PADDED, "range"), token_budget=None, rows=8)
    advice = by_key(chosen)["batch.rows"]
    assert (advice.advised, advice.recipe, advice.differs) == (8, 8, False)


def test_a_learning_rate_is_warned_about_where_steps_change():
    assert "train.learning_rate" not in by_key(situation())
    works = {**WORKS, (Mode.PADDED, "static"): work(8000, steps=400)}
    advice = by_key(situation(works=works, pair=(Mode.PADDED, "static")))["train.learning_rate"]
    assert (advice.advised, advice.recipe) == (2e-3, 1e-3)
    assert advice.numbers == {"tokens_per_step_ratio": 4.0}
    assert "from 2 to 10 real tokens" in advice.why


def test_each_advice_has_its_number_and_plain_values():
    found = [advice.to_json() for advice in advise(situation())]
    assert [advice["key"] for advice in found] == [
        "mode",
        "shapes.kind",
        "speed-up over padding",
        "model.seq_length",
        "shapes.row_buckets",
        "batch.token_budget",
        "memory, GB at least",
        "graphs",
        "steps an epoch",
    ]
    for advice in found:
        assert advice["numbers"]
        assert all(isinstance(number, int | float) for number in advice["numbers"].values())
        assert not advice["differs"]
