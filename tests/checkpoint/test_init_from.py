"""`model.init_from` in a run, and what an evaluation tells."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ms_varlen.errors import CheckpointError
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.graphs import TrainingGraphs
from ms_varlen.train.loop import perplexity
from ms_varlen.train.run import train
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe, write_corpus


@pytest.fixture(scope="module")
def recipe_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, [f"{i} sheep, " * (1 + i % 5) for i in range(40)])
    return tiny_recipe(folder, data={"eval_fraction": 0.3}, train={"steps": 2, "eval_every": 1})


@pytest.fixture(scope="module")
def trained(recipe_values):
    """The folder of a varlen run of two steps, and its metrics."""
    lines = []
    summary = train(parse_recipe(recipe_values), lines.append)
    return summary["run_folder"], lines


def from_checkpoint(recipe_values, trained, **changes):
    weights = f"{trained[0]}/step_00000002"
    return {**recipe_values, "model": {**recipe_values["model"], "init_from": weights, **changes}}


def test_a_run_of_another_mode_begins_with_the_weights_and_says_so(recipe_values, trained):
    values = from_checkpoint(recipe_values, trained) | {"mode": "packed"}
    lines = []
    folder = train(parse_recipe(values), lines.append)["run_folder"]
    weights = values["model"]["init_from"]
    plan = json.loads(Path(folder, "plan.json").read_bytes())
    assert plan["initial_weights"]["init_from"] == weights
    manifest = json.loads(Path(folder, "step_00000002", "manifest.json").read_bytes())
    assert manifest["initial_weights"] == plan["initial_weights"]
    # Two steps more than the run before: it goes on where that one ended.
    assert lines[0]["eval_loss"] < trained[1][-1]["eval_loss"] < trained[1][0]["eval_loss"]


def test_the_weights_match_the_file_and_random_ones_have_no_record(recipe_values, trained):
    graphs = TrainingGraphs(prepare(parse_recipe(from_checkpoint(recipe_values, trained))), "CPU")
    expected = load_file(f"{trained[0]}/step_00000002/model.safetensors")
    actual = graphs.model_weights()
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], value) for name, value in expected.items())
    assert TrainingGraphs(prepare(parse_recipe(recipe_values)), "CPU").initial_weights is None


def test_weights_of_another_size_are_refused_before_anything_is_compiled(recipe_values, trained):
    values = from_checkpoint(recipe_values, trained, config={"hidden_size": 24, "num_attention_heads": 2})
    with pytest.raises(
        CheckpointError, match=r"parameter model.embed_tokens.weight must be \[258, 24\] for this model"
    ):
        TrainingGraphs(prepare(parse_recipe(values)), "CPU")


def test_an_evaluation_gives_loss_per_token_and_perplexity(trained):
    for line in trained[1]:
        assert line["eval_perplexity"] == math.exp(line["eval_loss"])


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (math.log(8), pytest.approx(8)), (None, None), (1e3, None)])
def test_a_perplexity_that_is_no_number_is_none(loss, expected):
    assert perplexity(loss) == expected
