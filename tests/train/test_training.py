"""The step and the data set, in PyNative mode on tiny nets."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor

from ms_varlen import DataError
from ms_varlen.batches.dataset import MicroBatches, MicroBatchLoader
from ms_varlen.batches.layout import lay_out
from ms_varlen.batches.micro_batch import MicroBatch
from ms_varlen.lengths import SeqLens
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.planning.plan import PlanState
from ms_varlen.ranks.agreement import StepLengths, StepPlace, StepReports
from ms_varlen.ranks.exchange import Exchange
from ms_varlen.ranks.join import Ranks
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.recipe.sections import TrainConfig
from ms_varlen.train.graphs import Accumulated, TrainingGraphs
from ms_varlen.train.loop import ids_hash
from ms_varlen.train.schedule import learning_rate
from ms_varlen.train.step import ApplyGradients, clear
from ms_varlen.workload.summary import PlanSummary
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe, write_corpus

LENGTHS = [3, 17, 5, 40, 9, 64, 2, 31, 8, 12, 90, 4]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def recipe_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [(LETTERS[i:] * 9)[:n] for i, n in enumerate(LENGTHS)]
    write_corpus(folder, texts)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_recipe(
        folder,
        data={"eval_fraction": 0.0},
        batch={"max_segments": 16},
        model={"config": {"hidden_size": 32, "num_hidden_layers": 2, **heads}},
    )


@pytest.fixture(scope="module")
def workload(recipe_values):
    return prepare(parse_recipe(recipe_values))


@pytest.fixture(scope="module")
def graphs(workload, body):
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    return TrainingGraphs(workload, "CPU")


@pytest.fixture(autouse=True)
def _empty_accumulators(request):
    if "graphs" in request.fixturenames:
        clear(request.getfixturevalue("graphs").accumulate_cell.accumulated)


def columns_of(graphs, workload, ids):
    return MicroBatches(
        workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns
    ).micro_batch(np.array(ids))


def gradient_of(graphs, *micro_batches):
    """Summed loss, supervised tokens and gradient of micro-batches."""
    clear(graphs.accumulate_cell.accumulated)
    accumulated = graphs.accumulate_all(micro_batches)
    return accumulated.loss_sum, accumulated.supervised, graphs.gradients()


def test_a_step_is_the_same_however_it_is_split_into_micro_batches(graphs, workload):
    whole = gradient_of(graphs, columns_of(graphs, workload, [0, 1, 2, 4]))
    parts = gradient_of(graphs, columns_of(graphs, workload, [0]), columns_of(graphs, workload, [1, 2, 4]))
    assert whole[1] == parts[1] == 3 + 17 + 5 + 9
    assert parts[0] / parts[1] == pytest.approx(whole[0] / whole[1], rel=1e-6)
    for name, gradient in whole[2].items():
        np.testing.assert_allclose(parts[2][name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def test_two_micro_batches_of_uneven_counts_give_the_token_mean():  # 4 over 1 and 6 over 3 is 2.5, not 3.0
    batches = []
    for supervised in (1, 3):
        labels = np.full(8, IGNORE_INDEX, np.int32)
        labels[:supervised] = 7
        batches.append(MicroBatch({"input_ids": labels, "labels": labels, "seq_lens": np.array([4, 3], np.int32)}))
    lengths = StepLengths.of_micro_batches(batches)
    place = StepPlace(0, PlanState(0, 0), "varlen", "0" * 32)
    counts = StepReports(Exchange(Ranks()), micro_batches=2, most=2).check(place, lengths, lengths)
    assert (4 + 6) / counts.supervised == 2.5
    assert counts.metrics() == {
        "tokens_real": 14,
        "tokens_computed": 16,
        "tokens_supervised": 4,
        "segments": 4,
        "pad_ratio": 0.125,
    }


def test_the_gradient_is_divided_by_the_tokens_of_the_whole_step():
    weight = Parameter(Tensor(np.zeros(1, np.float32)), name="w")
    accumulated = Parameter(Tensor(np.array([4.0 + 6.0], np.float32)), name="accumulated.w")
    config = TrainConfig(steps=1, learning_rate=1.0, clip_grad_norm=None)
    apply = ApplyGradients(ParameterTuple([weight]), ParameterTuple([accumulated]), config)
    norm, applied = apply(*(Tensor(v, ms.float32) for v in (1.0, 4.0, 10.0, 0.0)))
    assert (float(norm.asnumpy()), bool(applied.asnumpy())) == (2.5, True)
    assert accumulated.asnumpy().tolist() == [0.0]


def test_a_micro_batch_without_supervised_tokens_harms_no_other(graphs, workload):
    columns = columns_of(graphs, workload, [0, 1])
    silent = columns | {"labels": np.full_like(columns["labels"], IGNORE_INDEX)}
    alone, both = gradient_of(graphs, columns), gradient_of(graphs, silent, columns)
    assert (both[0], both[1]) == (alone[0], alone[1])
    for name, gradient in alone[2].items():
        np.testing.assert_array_equal(both[2][name], gradient, err_msg=name)
    nothing = gradient_of(graphs, silent)
    assert nothing[:2] == (0.0, 0)
    assert all((gradient == 0).all() for gradient in nothing[2].values())


def test_a_sample_scores_the_same_alone_and_padded(graphs, workload):
    tokens = np.array([97, 98, 99], np.int32)
    losses = []
    for tail in (0, 2, 13):
        lens = SeqLens.packed([3], 64, 3 + tail)
        columns = {**lay_out(lens, tokens, workload.store.pad_id), **graphs.attention.columns(lens)}
        losses.append(float(graphs.evaluate(columns).asnumpy()))
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-5)


def test_padding_gets_no_gradient_from_the_loss(graphs, workload):
    columns = columns_of(graphs, workload, [0])  # 4 tokens on 16
    gradients = gradient_of(graphs, columns)[2]
    embedding = gradients["model.embed_tokens.weight"]
    assert (embedding[workload.store.pad_id] == 0).all()
    assert (embedding[columns["input_ids"][:3]] != 0).any(1).all()


def test_parameters_keep_their_hugging_face_names(graphs):
    names = list(graphs.parameter_shapes())
    assert names[:2] == ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert names[-1] == "lm_head.weight"
    assert sorted(graphs.weights()[1])[:2] == ["adam_m.lm_head.weight", "adam_m.model.embed_tokens.weight"]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_matches_pytorch(clip):
    random = np.random.default_rng(0)
    values = {"matrix": random.standard_normal((5, 4)), "bias": random.standard_normal(7)}
    weights = ParameterTuple([Parameter(Tensor(v.astype(np.float32)), name=n) for n, v in values.items()])
    accumulated = weights.clone("accumulated", init="zeros")
    config = TrainConfig(steps=9, learning_rate=0.01, weight_decay=0.1, beta2=0.95, clip_grad_norm=clip)
    apply = ApplyGradients(weights, accumulated, config)
    m, v = ({n: np.zeros_like(x) for n, x in values.items()} for _ in range(2))
    for step in range(1, 7):
        gradients = {n: random.standard_normal(x.shape).astype(np.float32) * 3 for n, x in values.items()}
        for parameter, gradient in zip(accumulated, gradients.values(), strict=True):
            parameter.set_data(Tensor(gradient))
        norm, _ = apply(*(Tensor(x, ms.float32) for x in (0.01, 3.0, 1.0, 0.0)))
        expected = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())) / 3
        assert float(norm.asnumpy()) == pytest.approx(expected, rel=1e-5)
        scale = (1.0 if clip is None else min(1.0, clip / (expected + 1e-6))) / 3
        for n, gradient in gradients.items():
            g = gradient.astype(np.float64) * scale
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.95 * v[n] + 0.05 * g * g
            values[n] = values[n] * (1 - 0.01 * (0.1 if values[n].ndim > 1 else 0.0))
            values[n] -= 0.01 * (m[n] / (1 - 0.9**step)) / (np.sqrt(v[n] / (1 - 0.95**step)) + 1e-8)
    for parameter, value in zip(weights, values.values(), strict=True):
        np.testing.assert_allclose(parameter.asnumpy(), value, atol=2e-6)  # fp32 rounding over six steps


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(graphs, workload, bad, where):
    before = graphs.weights()
    graphs.accumulate(columns_of(graphs, workload, [1]))
    if where == "gradient":
        last = graphs.accumulate_cell.accumulated[-1]
        last.set_data(Tensor(np.full(last.shape, bad, np.float32)))
    norm, applied = graphs.apply(0.01, Accumulated(np.array([bad if where == "loss" else 1.0]), 17))
    assert not applied
    assert np.isfinite(norm) == (where == "loss")
    for old, new in zip(before, graphs.weights(), strict=True):
        for name, value in old.items():
            np.testing.assert_array_equal(new[name], value, err_msg=name)
    assert all((gradient == 0).all() for gradient in graphs.gradients().values())


def test_saved_state_comes_back_bit_for_bit(workload, graphs):
    graphs.accumulate(columns_of(graphs, workload, [1, 2]))
    graphs.apply(0.01, Accumulated(np.array([1.0]), 22))
    saved = graphs.weights()
    fresh = TrainingGraphs(workload, "CPU")
    fresh.load(*saved)
    for side in (graphs, fresh):
        side.accumulate(columns_of(graphs, workload, [4, 5]))
        side.apply(0.01, Accumulated(np.array([1.0]), 73))
    for old, new in zip(graphs.weights(), fresh.weights(), strict=True):
        assert old.keys() == new.keys()
        for name, value in old.items():
            np.testing.assert_array_equal(new[name], value, err_msg=name)


def test_recompute_gives_the_same_gradient(recipe_values, graphs, workload):
    changed = {**recipe_values, "model": {**recipe_values["model"], "recompute": True}}
    again = TrainingGraphs(prepare(parse_recipe(changed)), "CPU")
    columns = columns_of(graphs, workload, [1, 4])
    kept, computed = gradient_of(graphs, columns), gradient_of(again, columns)
    fresh = TrainingGraphs(workload, "CPU")
    kept = gradient_of(fresh, columns)
    assert computed[0] == kept[0]
    for name, gradient in kept[2].items():
        np.testing.assert_allclose(computed[2][name], gradient, atol=1e-6, err_msg=name)


def test_the_data_set_serves_the_plan_in_order(graphs, workload):
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns)
    schedule = [np.array([0, 2]), np.array([3]), np.array([7, 1])]
    loader = MicroBatchLoader(batches, lambda: schedule)
    served = list(loader)
    assert [columns["seq_lens"].tolist() for columns in served] == [[4, 6], [41], [32, 18]]
    assert loader.dataset.get_col_names()[:5] == [
        "input_ids",
        "labels",
        "position_ids",
        "seq_lens",
        "actual_seq_qlen",
    ]
    assert [columns["input_ids"].size for columns in served] == [16, 48, 64]


def test_an_error_of_the_data_side_arrives_as_itself(graphs, workload):
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns)
    with pytest.raises(DataError, match=r"ids\[1\] must be a sample from 0"):
        list(MicroBatchLoader(batches, lambda: [np.array([0]), np.array([1, 10**6])]))


def test_the_plan_counts_what_the_data_set_serves(graphs, workload):
    described = PlanSummary.of(workload).epoch
    plan = workload.plans.epoch(0)
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, graphs.attention.columns)
    served = [batches.micro_batch(plan.micro_batch(step, 0)) for step in range(plan.num_steps)]
    assert described.steps_per_epoch == len(served)
    assert described.tokens_computed == sum(columns["input_ids"].size for columns in served)
    assert described.tokens_real == sum(int(columns["seq_lens"].sum()) for columns in served)
    assert described.pad_ratio == 1 - described.tokens_real / described.tokens_computed
    assert max(columns["input_ids"].size for columns in served) <= 128


def test_ids_hash_is_that_of_the_set_whatever_the_order():
    assert ids_hash(np.array([3, 1, 2])) == ids_hash(np.array([1, 2, 3]))
    assert ids_hash(np.array([1, 2])) != ids_hash(np.array([1, 3]))


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_end():
    def rates(**changes):
        config = TrainConfig(**{"steps": 6, "learning_rate": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.1} | changes)
        return [round(learning_rate(config, step), 6) for step in range(1, 7)]

    assert rates(schedule="linear") == [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert rates(schedule="cosine") == [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]
    assert rates(schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear", warmup_steps=0)[-1] == 0.1


@pytest.mark.graph
def test_weights_set_between_steps_are_those_that_the_next_steps_train(workload, body):
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        plain, touched = TrainingGraphs(workload, "CPU"), TrainingGraphs(workload, "CPU")
        losses = []
        for graphs in (plain, touched):
            for ids in ([1, 2], [4, 5], [7], [8, 9]):
                if graphs is touched:
                    own = graphs.model_weights()
                    graphs.set_weights({name: value * 0 for name, value in own.items()})
                    graphs.accumulate(columns_of(graphs, workload, ids))
                    graphs.clear_gradients()
                    graphs.set_weights(own)
                losses.append(float(graphs.accumulate(columns_of(graphs, workload, ids)).asnumpy()))
                graphs.apply(0.01, Accumulated(np.array([1.0]), 40))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert losses[4:] == losses[:4]
    assert losses[3] != losses[0]
