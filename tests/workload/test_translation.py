from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.modes import Mode
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.work import EpochWork
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.sizes import SampleLengths
from ms_varlen.workload.translation import PAIRS, compare_variants, epoch_work, overrides_between, sampled, variant

RECIPES = Path(__file__).parents[2] / "recipes"
QUICKSTART, PADDED = RECIPES / "quickstart.yaml", RECIPES / "padded.yaml"
SMALL = ("model.seq_length=128", "model.max_position_embeddings=128", "batch.token_budget=256", "train.seed=3")
COST = CostModel(linear=10.0, quadratic=1.0)


def some_lengths(samples=400, held_out=100):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, samples), 1, 128).astype(np.int32)
    return SampleLengths(lengths, "f", held_out)


@pytest.mark.parametrize("path", [QUICKSTART, PADDED], ids=["varlen", "padded"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_variant_is_a_recipe_and_its_overrides_make_it(path, pair):
    recipe = load_recipe(path)
    other = variant(recipe, *pair, mean_length=200.0)
    assert (other.mode, other.shapes.kind) == pair
    assert load_recipe(path, overrides_between(recipe, other)) == other
    assert other.data == recipe.data
    assert other.model.config == recipe.model.config


def test_the_recipes_own_pair_is_the_recipe():
    recipe = load_recipe(QUICKSTART, ["shapes.min=128"])
    assert variant(recipe, Mode.VARLEN, "range", 200.0) == recipe
    assert overrides_between(recipe, recipe) == []


def test_rows_and_budget_stand_for_each_other_by_the_mean_length():
    rows = variant(load_recipe(QUICKSTART), Mode.PADDED, "static", mean_length=200.0).batch
    assert (rows.rows, rows.token_budget, rows.pad_to) == (20, None, "max")
    budget = variant(load_recipe(PADDED), Mode.VARLEN, "range", mean_length=400.0).batch
    assert (budget.rows, budget.token_budget, budget.pad_to) == (None, 3200, None)
    at_least = variant(load_recipe(PADDED), Mode.VARLEN, "range", mean_length=20.0).batch
    assert at_least.token_budget == 2048


def test_whole_work_of_a_few_samples():
    recipe = load_recipe(QUICKSTART, [*SMALL, "train.eval_every=null", "shapes.kind=static"])
    lengths = SampleLengths(np.array([100, 100, 50, 60], np.int32), "f", 0)
    # Two micro-batches of 256, whatever the order: 100 + 100 + 50 or 60, or 100 + 50 + 60 and the other 100.
    found = epoch_work(recipe, lengths, COST)
    assert (found.steps, found.graphs, found.real, found.computed, found.largest) == (2, 2, 310, 512, 256)
    assert found.real_squared == 100**2 + 100**2 + 50**2 + 60**2
    assert found.computed_squared > found.real_squared


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_pair_is_compared_and_padding_never_helps(world_size):
    works, refused = compare_variants(load_recipe(QUICKSTART, SMALL), some_lengths(), COST, world_size)
    assert not refused
    assert list(works) == PAIRS
    for work in works.values():
        assert work.real <= work.computed
        assert work.real_squared <= work.computed_squared
        assert 0 < work.flop_share(COST) <= 1
    assert works["padded", "static"].computed > works["padded", "range"].computed > works["varlen", "range"].computed


def test_a_pair_that_does_not_suit_the_recipe_is_named():
    odd = ["model.seq_length=120", "model.max_position_embeddings=120", "batch.token_budget=256"]
    lengths = SampleLengths(np.minimum(some_lengths().train, 120), "f", 0)
    works, refused = compare_variants(load_recipe(QUICKSTART, odd), lengths, COST)
    assert {mode for mode, _ in works} == {"packed", "varlen"}
    assert {mode for mode, _ in refused} == {"padded", "bucketed"}
    assert "model.seq_length: must be a multiple of shapes.divisor (64)" in refused["padded", "static"]


def test_a_large_corpus_is_sampled_the_same_each_time():
    lengths = some_lengths(5000)
    part = sampled(lengths, 1000)
    assert part.train.size == 1000
    assert part.train.tolist() == sampled(lengths, 1000).train.tolist()
    assert sampled(lengths, 5000) is lengths
    whole, few = (epoch_work(load_recipe(QUICKSTART, SMALL), given_, COST) for given_ in (lengths, part))
    scaled = few.scaled(5)
    assert scaled.token_share == pytest.approx(whole.token_share, abs=0.01)
    assert scaled.steps == pytest.approx(whole.steps, rel=0.06)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 128), min_size=8, max_size=60), st.sampled_from(PAIRS))
def test_all_tokens_of_whole_steps_are_counted(lengths, pair):
    recipe = variant(load_recipe(QUICKSTART, SMALL), *pair, mean_length=float(np.mean(lengths)))
    found = epoch_work(recipe, SampleLengths(np.array(lengths, np.int32), "f", 0), COST)
    assert isinstance(found, EpochWork)
    assert found.real == sum(lengths)  # one micro-batch a step leaves nothing over
    assert found.real_squared == sum(length**2 for length in lengths)
    assert found.computed % 64 == 0
