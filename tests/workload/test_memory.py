from pathlib import Path

import pytest

from ms_varlen.errors import DataError
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.memory import device_bytes, step_memory
from ms_varlen.workload.summary import PlanSummary
from ms_varlen.workload.workload import prepare

RECIPES = Path(__file__).parents[2] / "recipes"
ASCEND = sorted(RECIPES.glob("ascend_*.yaml"))


@pytest.mark.parametrize("path", ASCEND, ids=lambda path: path.stem)
def test_ascend_recipes_are_planned_and_fit_their_devices(path):
    recipe = load_recipe(path)
    world_size = 16 if "two_nodes" in path.stem else 8
    plan = PlanSummary.of(prepare(recipe, world_size=world_size))
    memory = plan.memory_gb
    assert (plan.epoch.world_size, recipe.device.target) == (world_size, "Ascend")
    assert plan.epoch.steps_per_epoch >= 1
    assert all(ledger.balanced for ledger in plan.ledger.values())
    assert memory.weights == pytest.approx(16 * plan.parameters / 1e9, abs=1e-3)
    assert 1.7e9 < plan.parameters < 1.8e9
    assert memory.activations_recomputed < memory.activations
    assert 40 < memory.total < memory.limit == 58


def test_there_is_a_recipe_for_each_layout_and_for_two_nodes():
    assert [path.stem.removeprefix("ascend_qwen3_1.7b_") for path in ASCEND] == [
        "bucketed",
        "padded",
        "two_nodes",
        "varlen",
    ]


def test_a_step_that_cannot_fit_is_refused_and_says_what_to_lower():
    overrides = ["model.recompute=false", "batch.token_budget=16384"]
    with pytest.raises(
        DataError,
        match=r"a step must fit device\.max_memory \(58 GB\), got at least \d+\.\d GB on T=16384: 27\.\d of weights, "
        r".*; set model\.recompute=true, lower batch\.token_budget",
    ):
        prepare(load_recipe(RECIPES / "ascend_qwen3_1.7b_varlen.yaml", overrides), world_size=8)


def test_a_model_whose_weights_cannot_fit_is_pointed_to_mindformers():
    qwen3_8b = ["hidden_size=4096", "num_hidden_layers=36", "num_attention_heads=32", "intermediate_size=12288"]
    overrides = [f"model.config.{value}" for value in qwen3_8b]
    with pytest.raises(DataError, match=r"1\d\d\.\d of weights.*leaves to MindFormers: `ms-varlen mindformers-recipe`"):
        prepare(load_recipe(RECIPES / "ascend_qwen3_1.7b_varlen.yaml", overrides), world_size=8)


def test_recomputing_is_shown_next_to_keeping(tmp_path):
    recipe = load_recipe(RECIPES / "quickstart.yaml", ["device.max_memory=4GB", "device.target=CPU"])
    workload = prepare(recipe)
    kept = step_memory(recipe, workload.model_config, workload.shapes)
    assert kept.total == pytest.approx(
        kept.weights + kept.gradients + kept.casts + kept.activations + kept.logits, abs=3e-3
    )
    assert (kept.limit, kept.recompute, kept.tokens) == (4, False, 4096)
    assert device_bytes(None) is None
