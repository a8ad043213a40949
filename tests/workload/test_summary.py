import numpy as np
import pytest

from ms_varlen.planning.cost import CostModel
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.workload.summary import rank_balance
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe, write_corpus

COST = CostModel(linear=1.0, quadratic=0.01)


def balance_of(folder, lengths, shapes, micro_batches, world_size, seed=0):
    """The balance of a varlen plan of documents of these lengths, with a budget of 100 tokens."""
    write_corpus(folder, (f"{i:03d}" + "x" * (n - 4) for i, n in enumerate(lengths)))  # each an end-of-text longer
    values = tiny_recipe(
        folder,
        data={"eval_fraction": 0.0},
        batch={"token_budget": 100, "micro_batches": micro_batches},
        shapes=shapes,
        model={"seq_length": 100, "max_position_embeddings": 100},
        train={"seed": seed},
    )
    workload = prepare(parse_recipe(values), world_size=world_size)
    return rank_balance(workload.plans, workload.layout, COST)


def test_a_long_sample_next_to_full_ranks_sets_the_floor(tmp_path):
    balance = balance_of(tmp_path, [60] + [10] * 14, {"kind": "range", "divisor": 10}, 1, 2, seed=0)
    slowest, other = 100 + 0.01 * (60**2 + 4 * 10**2), 100 + 0.01 * 10 * 10**2
    assert balance.after == pytest.approx([2 * slowest / (slowest + other) - 1])
    assert balance.floor == pytest.approx(balance.after)


@pytest.mark.parametrize(
    "shapes",
    [
        {"kind": "range", "divisor": 10},
        {"kind": "range", "divisor": 10, "min": 80},
        {"kind": "static", "divisor": 10},
    ],
)
@pytest.mark.parametrize(("micro_batches", "world_size"), [(1, 2), (1, 4), (2, 2)])
def test_no_step_is_balanced_better_than_its_floor(tmp_path, shapes, micro_batches, world_size):
    lengths = np.random.default_rng(0).lognormal(3, 0.8, 300).astype(int).clip(5, 90)
    balance = balance_of(tmp_path, lengths, shapes, micro_batches, world_size)
    assert balance.after.size > 10
    assert (balance.floor <= balance.after + 1e-12).all()
