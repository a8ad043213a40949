"""A run goes on with the data that it began with, wherever it lies, and with no other."""

import json
import shutil

import pytest

from ms_varlen.checkpoint.resume import check_data
from ms_varlen.diagnose.align.alignment import recipe_hash
from ms_varlen.errors import CheckpointError
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.run import train
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe

STEPS = 6


def write(path, shift=0, unsupervised=1):
    """Records of ready tokens whose lengths are always the same."""
    path.parent.mkdir(exist_ok=True)
    lines = []
    for i in range(40):
        ids = [(i * 7 + j * 3 + shift) % 200 for j in range(5 + i * 5 % 40)]
        labels = [-100] * unsupervised + ids[unsupervised:]
        lines.append(json.dumps({"input_ids": ids, "labels": labels}))
    path.write_text("\n".join(lines))
    return path


def recipe_on(corpus, output, steps, store_dir):
    return parse_recipe(
        tiny_recipe(
            output.parent,
            data={"source": str(corpus), "eval_fraction": 0.0, "store_dir": str(store_dir)},
            train={"steps": steps, "schedule": "constant"},
            checkpoint={"output_dir": str(output)},
        )
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of two steps of an epoch of more than six, and the corpus that it was trained on."""
    folder = tmp_path_factory.mktemp("begun")
    corpus = write(folder / "corpus.jsonl")
    recipe = recipe_on(corpus, folder / "output", 2, folder / "stores")
    assert prepare(recipe).plans.epoch(0).num_steps > STEPS
    train(recipe, lambda _: None)
    return folder


@pytest.fixture
def run(begun, tmp_path):
    """A copy of the run's output folder."""
    shutil.copytree(begun / "output", tmp_path / "output")
    return tmp_path / "output"


@pytest.mark.parametrize("changes", [{"shift": 1}, {"unsupervised": 3}], ids=["other ids", "another loss mask"])
def test_other_data_of_equal_lengths_is_refused_and_nothing_is_touched(begun, run, tmp_path, changes):
    before = recipe_on(begun / "corpus.jsonl", run, STEPS, begun / "stores")
    after = recipe_on(write(tmp_path / "corpus.jsonl", **changes), run, STEPS, begun / "stores")
    old, new = prepare(before), prepare(after)
    assert old.plans.fingerprint == new.plans.fingerprint  # so the plan alone would let it pass
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(CheckpointError) as caught:
        train(after, lambda _: None)
    message = str(caught.value)
    assert message.startswith("data.source and data.tokenizer must give the samples of ")
    assert f"(token store {old.store.fingerprint[:12]}), got token store {new.store.fingerprint[:12]}: " in message
    step = run / "varlen" / "step_00000002"
    assert message.endswith(
        f"start from scratch from its weights with checkpoint.resume=never and model.init_from={step}"
    )
    assert {path: path.read_bytes() for path in files} == files
    named = after.model_copy(update={"checkpoint": after.checkpoint.model_copy(update={"resume": step})})
    with pytest.raises(CheckpointError, match=r"data\.source and data\.tokenizer must give"):
        train(named, lambda _: None)


def test_the_same_data_may_lie_elsewhere(begun, run, tmp_path):
    moved = write(tmp_path / "moved" / "other_name.jsonl")
    recipe = recipe_on(moved, run, STEPS, tmp_path / "other_stores")
    assert train(recipe, lambda _: None)["first_step"] == 2
    lines, whole = (run / "varlen" / "metrics.jsonl").read_text().splitlines(), []
    train(recipe_on(begun / "corpus.jsonl", tmp_path / "whole", STEPS, begun / "stores"), whole.append)
    assert [json.loads(line)["loss"] for line in lines] == [metrics["loss"] for metrics in whole]


def test_an_alignment_is_of_the_place_that_its_recipe_names(begun, tmp_path):
    recipe = recipe_on(begun / "corpus.jsonl", tmp_path, 1, begun / "stores")
    other = recipe_on(write(tmp_path / "corpus.jsonl"), tmp_path, 1, tmp_path / "stores")
    assert recipe_hash(recipe) != recipe_hash(other)


def test_a_checkpoint_that_names_no_data_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"\(a token store that it does not name\), got token store 0{12}: "):
        check_data(tmp_path, {"data_fingerprint": None}, "0" * 32)
