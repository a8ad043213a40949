"""Every mode with every kind of shapes, in graph mode: what the plan says happens, and the loss is that of padding.

``MS_VARLEN_MODES_STEPS=50 python -m pytest tests/test_modes.py`` runs more steps than there is time for every day.
"""

import os

import mindspore as ms
import numpy as np
import pytest

from ms_varlen.diagnose.align.align import align
from ms_varlen.errors import ShapesError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.run import train
from ms_varlen.workload.summary import PlanSummary
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe, write_corpus

STEPS = int(os.environ.get("MS_VARLEN_MODES_STEPS", "24"))
ALIGN_STEPS = int(os.environ.get("MS_VARLEN_MODES_STEPS", "12"))
PAIRS = [(mode, kind) for mode in ("padded", "bucketed", "packed", "varlen") for kind in ("static", "buckets", "range")]
SIZES = {
    (Mode.PADDED, "buckets"): {"row_buckets": "auto", "num_buckets": 2},
    (Mode.BUCKETED, "static"): {"row_buckets": [16, 32, 64]},
    (Mode.BUCKETED, "buckets"): {"row_buckets": "auto", "num_buckets": 2},
    (Mode.PACKED, "buckets"): {"token_sizes": [64, 128]},
    (Mode.VARLEN, "buckets"): {"token_sizes": "auto", "num_buckets": 2},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(2.7, 1.0, 80)), 2, 100).astype(int)
    texts = ["".join(chr(97 + c) for c in random.integers(0, 26, n)) for n in lengths]
    write_corpus(folder, texts)
    return folder


@pytest.fixture(autouse=True)
def _back_to_pynative():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def recipe(corpus, mode, kind):
    rows = {"token_budget": None, "rows": 3, "pad_to": "max" if kind == "static" else "batch"}
    return parse_recipe(
        tiny_recipe(
            corpus,
            mode=mode,
            batch={**(rows if mode == "padded" else {"max_segments": 16}), "micro_batches": 2},
            shapes={"kind": kind, **SIZES.get((mode, kind), {})},
            model={"variable_seq_lengths": mode != "padded"},
            train={"steps": STEPS, "warmup_steps": 5, "eval_every": STEPS // 2},
            graph={"mode": "graph", "compile_cache": "off"},
            checkpoint={"output_dir": str(corpus / f"{mode}-{kind}")},
        )
    )


def test_more_graphs_than_allowed_are_refused_before_anything_is_compiled(corpus):
    values = recipe(corpus, "packed", "buckets").resolved()
    values["graph"]["max_graphs"] = 3  # two sizes in training, the optimizer, evaluation
    with pytest.raises(ShapesError, match=r"must be <= graph.max_graphs \(3\), got 4 \(train 2, apply 1, eval 1\)"):
        prepare(parse_recipe(values))


@pytest.mark.graph
@pytest.mark.parametrize(("mode", "kind"), PAIRS)
def test_a_run_is_what_its_plan_says(corpus, mode, kind):
    chosen = recipe(corpus, mode, kind)
    plan = PlanSummary.of(prepare(chosen)).to_json()
    lines = []
    summary = train(chosen, lines.append)
    assert summary["graphs_compiled"] == plan["graphs"]
    assert all(line["graphs_compiled"] == plan["graphs"] for line in lines)
    epoch = lines[: plan["steps_per_epoch"]]
    real, computed = (sum(line[key] for line in epoch) for key in ("tokens_real", "tokens_computed"))
    assert (real, computed) == (plan["tokens_real"], plan["tokens_computed"])
    assert 1 - real / computed == plan["pad_ratio"]
    assert len(lines) == STEPS
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert np.isfinite(summary["eval_loss"])
    for unit in ("tokens", "samples"):
        assert summary["ledger"][unit]["balanced"]
        assert plan["ledger"][unit]["balanced"]


@pytest.mark.graph
@pytest.mark.parametrize(("mode", "kind"), PAIRS)
def test_every_mode_gives_the_loss_of_dense_padding(corpus, mode, kind):
    verdict = align(recipe(corpus, mode, kind), ALIGN_STEPS, lambda *_: None).verdict
    assert verdict.passed, (verdict.max_abs_diff, verdict.gradient_max_rel_diff, verdict.first_failed_step)
    assert verdict.max_abs_diff <= 2e-5
