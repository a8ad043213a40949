"""A planted fault is found, named, and traced to the sample, layer and tensor where it begins."""

import contextlib

import numpy as np
import pytest

from ms_varlen.diagnose.align import align
from ms_varlen.errors import RecipeError
from ms_varlen.testing.detection import (
    FILE_FAULTS,
    RECIPE_FAULTS,
    detection_rate,
    find,
    find_in_files,
    find_in_recipe,
    write_recipe,
)
from ms_varlen.testing.planted import FAULTS, plant
from ms_varlen.train.recipe import load_recipe

CHECKED = [fault for fault in FAULTS if fault.found_by == "check"]
REACHING = [fault for fault in FAULTS if fault.found_by == "align"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("bisect"))


@pytest.mark.parametrize("fault", CHECKED, ids=lambda fault: fault.name)
def test_a_fault_in_the_data_path_never_reaches_the_model(recipe, fault):
    assert find(fault, recipe)[:2] == ("check", fault.code)


@pytest.mark.parametrize("fault", REACHING, ids=lambda fault: fault.name)
def test_a_fault_behind_the_checks_is_named_by_align(recipe, fault):
    assert find(fault, recipe)[:2] == ("align", fault.code)


@pytest.mark.parametrize(("name", "code", "overrides"), RECIPE_FAULTS, ids=[fault[0] for fault in RECIPE_FAULTS])
def test_a_fault_of_a_recipe_is_named_by_the_doctor(recipe, name, code, overrides):
    assert find_in_recipe(recipe, overrides)[:2] == ("doctor", code)


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_fault_of_a_file_is_named_by_the_doctor(recipe, name):
    assert find_in_files(recipe, name)[:2] == ("doctor", FILE_FAULTS[name])


@pytest.mark.parametrize("against", ["padded", "bucketed", "packed", "varlen"])
def test_a_healthy_run_agrees_with_every_layout(recipe, against):
    result = align(load_recipe(recipe, []), 2, lambda *_: None, against=against)
    assert (result["passed"], result["bisect"], result["against"]) == (True, None, against)
    assert result["noise_floor"] < 1e-6
    assert result["tolerance"] == 2e-5


def test_an_unknown_layout_is_refused(recipe):
    with pytest.raises(RecipeError, match="--against: must be one of padded, bucketed, packed, varlen, got dense"):
        align(load_recipe(recipe, []), 1, lambda *_: None, against="dense")


def test_the_first_rung_sample_layer_and_tensor_are_given(recipe):
    with plant("attention end a token late"):
        found = align(load_recipe(recipe, []), 1, lambda *_: None)["bisect"]
    assert found["rungs"][-1] == {"rung": found["rung"], "differs": "forward"}
    assert (found["layer"], found["tensor"], found["code"]) == (0, "attention output", "LEN-WRONG")
    assert found["length"] in found["lengths"]
    assert found["text"].endswith("segment 0 ends a token late")


def test_random_mutations_that_nobody_finds_are_explained(recipe):
    with contextlib.redirect_stdout(None):
        found = detection_rate(recipe, 60)
    silent = {key: count for key, count in found.items() if key.startswith("silent")}
    assert sum(found.values()) == 60
    assert all("counts for nothing" in key or "masking" in key or "consistent" in key for key in silent)
    assert np.sum(list(silent.values())) <= 3
