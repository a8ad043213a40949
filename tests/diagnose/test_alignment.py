import numpy as np
import pytest

from ms_varlen.diagnose.align.align import compare, gradient_difference
from ms_varlen.diagnose.align.alignment import ALIGN_FILE, alignment_warning, recipe_hash, save_alignment
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


def result(**changes):
    return {
        "passed": True,
        "steps": 100,
        "max_abs_diff": 1e-6,
        "tolerance": 2e-5,
        "gradient_max_rel_diff": 1e-6,
        "versions": VERSIONS,
        "loss": [1.0],
    } | changes


def test_recipe_that_passed_has_no_warning(tmp_path):
    assert save_alignment(recipe(tmp_path), result()) == tmp_path / ALIGN_FILE
    assert alignment_warning(recipe(tmp_path), VERSIONS) is None
    assert alignment_warning(recipe(tmp_path, train={"steps": 9, "learning_rate": 0.01}), VERSIONS) is None


@pytest.mark.parametrize(
    ("changes", "sections", "versions", "warning"),
    [
        ({"passed": False}, {}, VERSIONS, r"has FAILED align"),
        ({}, {"train": {"steps": 4, "learning_rate": 0.02}}, VERSIONS, r"align.json is of other settings"),
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
    result = compare([(1.0, 1.0), (np.nan, 1.0)], [(0.0, "a"), (np.inf, "b")], 2e-5, 1e-5, 1e-3)
    assert (result["passed"], result["first_failed_step"], result["gradient_worst_parameter"]) == (False, 2, "b")
