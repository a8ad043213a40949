import numpy as np
import pytest

from ms_varlen.diagnose.align.alignment import (
    ALIGN_FILE,
    Alignment,
    Bisection,
    Rung,
    alignment_warning,
    compare,
    gradient_difference,
    recipe_hash,
    save_alignment,
)
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import parse_recipe

VERSIONS = {"attention": "kernel", "mindspore": "2.9.0"}


def recipe(folder, **sections):
    return parse_recipe(
        {
            "mode": "varlen",
            "data": {"source": "pydoc", "tokenizer": "bytes"},
            "model": {
                "config": {"hidden_size": 64},
                "variable_seq_lengths": True,
                "seq_length": 512,
                "max_position_embeddings": 512,
            },
            "train": {"steps": 4, "learning_rate": 0.01},
            "checkpoint": {"output_dir": str(folder)},
        }
        | sections
    )


def result(passed=True):
    verdict = compare([(1.0, 1.0 if passed else 2.0)], [(1e-6, "a")], 2e-5, 1e-5, 1e-3)
    return Alignment("output", Mode.VARLEN, 100, 0, verdict, Mode.PADDED, 0.0, None, ["0"], VERSIONS, 1.0)


def test_recipe_that_passed_has_no_warning(tmp_path):
    assert save_alignment(recipe(tmp_path), result()) == tmp_path / ALIGN_FILE
    assert alignment_warning(recipe(tmp_path), VERSIONS) is None
    assert alignment_warning(recipe(tmp_path, train={"steps": 9, "learning_rate": 0.01}), VERSIONS) is None


@pytest.mark.parametrize(
    ("changes", "sections", "versions", "warning"),
    [
        ({"passed": False}, {}, VERSIONS, r"has FAILED align"),
        ({}, {"train": {"steps": 4, "learning_rate": 0.02}}, VERSIONS, r"align.json belongs to other settings"),
        ({}, {}, VERSIONS | {"attention": "reference"}, r"passed align with another attention"),
    ],
)
def test_warning_says_what_is_wrong(tmp_path, changes, sections, versions, warning):
    save_alignment(recipe(tmp_path), result(**changes))
    assert warning in alignment_warning(recipe(tmp_path, **sections), versions)


def test_recipe_without_alignment_is_warned_of(tmp_path):
    assert "there is no" in alignment_warning(recipe(tmp_path), VERSIONS)


def test_hash_follows_what_decides_numbers_only(tmp_path):
    assert recipe_hash(recipe(tmp_path)) == recipe_hash(recipe(tmp_path / "elsewhere"))
    assert recipe_hash(recipe(tmp_path)) != recipe_hash(recipe(tmp_path, shapes={"kind": "static"}))


def test_gradients_that_are_equal_differ_by_nothing_and_others_by_infinity_where_nothing_scales_them():
    zeros, ones, bad = (
        {"a": np.full(3, value, np.float32), "b": np.full(2, value, np.float32)} for value in (0.0, 1.0, np.nan)
    )
    assert gradient_difference(zeros, zeros)[0] == 0.0
    assert gradient_difference(ones, zeros)[0] == np.inf
    assert gradient_difference(bad, ones) == gradient_difference(ones, bad) == (np.inf, "a")
    verdict = compare([(1.0, 1.0), (np.nan, 1.0)], [(0.0, "a"), (np.inf, "b")], 2e-5, 1e-5, 1e-3)
    assert (verdict.passed, verdict.first_failed_step, verdict.gradient_worst_parameter) == (False, 2, "b")


def test_the_floor_of_a_gradient_is_the_same_however_a_model_is_cut_into_parameters():
    small = np.full(3, 1e-6)
    whole = {"fused": np.full(4, 1.0), "bias": np.zeros(3)}
    cut = {"q": np.full(2, 1.0), "k": np.full(2, 1.0), "bias": np.zeros(3)}
    differences = [gradient_difference(expected | {"bias": small}, expected) for expected in (whole, cut)]
    assert differences[0] == differences[1] == (pytest.approx(1e-6 * 3**0.5 / 2e-3), "bias")


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, {"stage", "sample", "length", "lengths", "layer", "tensor"}),
        ({"rung": "two samples", "stage": "batch check"}, {"length", "lengths"}),
        ({"rung": "two samples", "stage": "forward", "lengths": [2, 3], "tensor": "loss"}, set()),
    ],
)
def test_a_finding_holds_the_keys_of_its_kind(fields, missing):
    found = Bisection(rungs=[Rung("one sample", None)], code="LOSS-DIFFERS", text="...", **fields).to_json()
    every = {"rung", "rungs", "stage", "sample", "length", "lengths", "layer", "tensor", "code", "text", "remedy"}
    assert set(found) == every - missing
    assert found["rungs"] == [{"rung": "one sample", "differs": None}]
