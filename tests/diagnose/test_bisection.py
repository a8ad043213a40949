"""A planted fault is found, named, and traced to the sample, layer and tensor where it begins."""

import contextlib

import numpy as np
import pytest
from typer.testing import CliRunner

from ms_varlen.catalogue import explain
from ms_varlen.cli.app import app
from ms_varlen.data.store.store import SampleTable
from ms_varlen.diagnose.align.align import align
from ms_varlen.diagnose.align.alignment import Rung
from ms_varlen.errors import RecipeError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import load_recipe
from tests.support.detection import (
    FILE_FAULTS,
    RECIPE_FAULTS,
    detection_rate,
    detection_recipe,
    find,
    find_in_files,
    find_in_recipe,
)
from tests.support.planted import FAULTS, plant
from tests.support.rank_faults import RANK_FAULTS, find_between_ranks, find_on_device

CHECKED = [fault for fault in FAULTS if fault.found_by == "check"]
WORDS = {
    "attention end three tokens late": "segment 0 ends 3 tokens late",
    "an end inside the first sample": "a sample is cut in two",
    "causal mask one too far": "tokens see the next one",
    "causal mask one short": "tokens do not see themselves",
    "sliding window": "tokens see the last 8 of their sample alone",
    "samples see the one before": "tokens see across the boundary",
    "scores scaled by 1.5": "the scores are 1.5 times the right ones",
    "another id": "token 5 of the sample must be id",
    "a target dropped": "token 3 of the sample has no target, must have",
    "labels not shifted": "each target is the token itself: labels were not shifted",
    "loss in padding": "targets lie in padding, which must have none",
    "keys without a gradient": "the gradient does not, most of all that of model.layers.",
    "NaN in the padding": "are not finite",
}
"""Words that the bisection of a fault must contain."""
OF_NO_SAMPLE = ("loss in padding", "keys without a gradient", "NaN in the padding")
REACHING = [fault for fault in FAULTS if fault.found_by == "align" and fault.name not in WORDS]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return detection_recipe(tmp_path_factory.mktemp("bisect"))


@pytest.mark.parametrize("fault", CHECKED, ids=lambda fault: fault.name)
def test_a_fault_in_the_data_path_never_reaches_the_model(recipe, fault):
    assert find(fault, recipe)[:2] == ("check", fault.code)


@pytest.mark.slow
@pytest.mark.parametrize("fault", REACHING, ids=lambda fault: fault.name)
def test_a_fault_behind_the_checks_is_named_by_align(recipe, fault):
    assert find(fault, recipe)[:2] == ("align", fault.code)


@pytest.mark.parametrize(("name", "code", "overrides"), RECIPE_FAULTS, ids=[fault[0] for fault in RECIPE_FAULTS])
def test_a_fault_of_a_recipe_is_named_by_the_doctor(recipe, name, code, overrides):
    assert find_in_recipe(recipe, overrides)[:2] == ("doctor", code)


@pytest.mark.parametrize("name", [None, *RANK_FAULTS])
def test_a_fault_between_ranks_is_named_by_each_that_is_left(recipe, name):
    assert find_between_ranks(recipe, name)[:2] == (("ranks", RANK_FAULTS[name]) if name else ("nobody", None))


@pytest.mark.parametrize(("moved", "found"), [(False, ("nobody", None)), (True, ("emulator", "LEN-DEVICE"))])
def test_ends_on_the_device_are_named_by_the_emulator(recipe, moved, found):
    assert find_on_device(recipe, moved)[:2] == found


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_fault_of_a_file_is_named_by_the_doctor(recipe, name):
    assert find_in_files(recipe, name)[:2] == ("doctor", FILE_FAULTS[name])


@pytest.mark.parametrize("against", list(Mode))
def test_a_healthy_run_agrees_with_every_layout(recipe, against):
    result = align(load_recipe(recipe, []), 2, lambda *_: None, against=against)
    assert (result.verdict.passed, result.bisect, result.against) == (True, None, against)
    assert result.noise_floor < 1e-6
    assert result.verdict.tolerance == 2e-5


def test_a_step_without_a_target_agrees(recipe, monkeypatch):
    monkeypatch.setattr(SampleTable, "gather_supervised", lambda self, ids: np.zeros(self.lengths[ids].sum(), bool))
    result = align(load_recipe(recipe, []), 1, lambda *_: None)
    assert (result.verdict.passed, result.verdict.loss, result.verdict.loss_padded) == (True, [0.0], [0.0])


def test_an_unknown_layout_is_refused(recipe):
    refused = CliRunner().invoke(app, ["align", str(recipe), "--against", "dense"])
    assert refused.exit_code == 2
    assert all(mode.value in refused.output for mode in Mode)


@pytest.mark.slow
def test_the_first_rung_sample_layer_and_tensor_are_given(recipe):
    with plant("attention end a token late"):
        found = align(load_recipe(recipe, []), 1, lambda *_: None).bisect
    assert found.rungs[-1] == Rung(found.rung, "forward")
    assert (found.layer, found.tensor, found.code) == (0, "attention output", "LEN-WRONG")
    assert found.length in found.lengths
    assert found.remedy == explain("LEN-WRONG").remedy
    assert found.text.endswith("segment 0 ends a token late")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), WORDS.items(), ids=list(WORDS))
def test_the_fault_is_described_in_words(recipe, name, words):
    with plant(name):
        found = align(load_recipe(recipe, []), 1, lambda *_: None).bisect
    assert found.code == next(fault.code for fault in FAULTS if fault.name == name)
    assert words in found.text
    assert (found.sample is None) == (name in ("loss in padding", "keys without a gradient", "NaN in the padding"))


@pytest.mark.slow
def test_a_wrong_attention_is_told_from_wrong_lengths_on_the_first_rung(recipe):
    with plant("scores scaled by 1.5"):
        wrong_attention = align(load_recipe(recipe, []), 1, lambda *_: None).bisect
    with plant("attention end three tokens late"):
        wrong_lengths = align(load_recipe(recipe, []), 1, lambda *_: None).bisect
    off = "lengths off, one sample in one segment"
    assert wrong_attention.rungs == [Rung(off, "forward")]
    assert wrong_lengths.rungs[0] == Rung(off, None)


@pytest.mark.slow
def test_the_layout_that_is_wrong_is_named_when_two_are_compared(recipe):
    with plant("attention end three tokens late"):
        ours = align(load_recipe(recipe, []), 1, lambda *_: None, against=Mode.PACKED).bisect
    with plant("another id"):  # in mode varlen alone
        packed = ["mode=packed", "shapes.kind=static"]
        other = align(load_recipe(recipe, packed), 1, lambda *_: None, against=Mode.VARLEN).bisect
    assert ours.code == "LEN-WRONG"
    assert other.code == "DATA-TOKENS"
    assert other.text.startswith("the recipe's layout agrees with dense rows, --against varlen does not: ")


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_a_tolerance_that_nothing_meets_is_refused(recipe, tolerance):
    with pytest.raises(RecipeError, match="--tolerance: must be > 0, got"):
        align(load_recipe(recipe, []), 1, lambda *_: None, tolerance=tolerance)


def test_random_mutations_that_no_check_finds_are_explained(recipe):
    with contextlib.redirect_stdout(None):
        found = detection_rate(recipe, 60)
    silent = {key: count for key, count in found.items() if key.startswith("silent")}
    assert sum(found.values()) == 60
    assert all("counts for nothing" in key or "masking" in key or "consistent" in key for key in silent)
    assert np.sum(list(silent.values())) <= 3
