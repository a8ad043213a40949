"""The doctor names what is wrong, and finds nothing on a healthy recipe."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.layout import Layout
from ms_varlen.diagnose.doctor.checkpoint import bad_step_checks
from ms_varlen.diagnose.doctor.doctor import examine
from ms_varlen.diagnose.doctor.environment import cann_check, package_checks, python_check
from ms_varlen.diagnose.doctor.performance import causes
from tests.support.planted import plant
from tests.support.tiny_recipe import numbered, write_corpus, write_recipe


def doctor_recipe(folder, lengths):
    write_corpus(folder, numbered(random.Random(0), lengths, "abcdefgh"))
    return write_recipe(folder, batch={"token_budget": 256})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    rng = random.Random(1)
    lengths = [min(int(rng.lognormvariate(2.3, 0.8)) + 3, 56) for _ in range(120)]
    return doctor_recipe(tmp_path_factory.mktemp("doctor"), lengths)


def test_a_healthy_recipe_is_green_to_the_last_probe(recipe):
    result = examine(recipe)
    assert (result["worst"], result["codes"]) == ("green", [])
    probe = [check["text"].split(":")[0] for check in result["checks"] if check["area"] == "probe"]
    assert probe == ["compiled 0 of 2 graphs predicted", "forward", "backward", "padding", "apply", "graphs compiled"]
    assert "padded places have no gradient, to the last bit" in str(result["checks"])


@pytest.mark.parametrize("name", ["quickstart", "padded", "packed", "bucketed", "align_cpu", "bench_cpu"])
def test_the_recipes_that_come_along_are_healthy(name):
    result = examine(Path("recipes") / f"{name}.yaml", ["checkpoint.resume=never"], probe=False)
    assert [check for check in result["checks"] if check["level"] != "green"] == []


def test_a_wrong_recipe_stops_before_the_data(recipe):
    result = examine(recipe, ["train.steps=0", "model.seq_length=32"])
    assert (result["worst"], result["codes"]) == ("red", ["RECIPE", "SHAPE-POSITIONS"])
    assert "data" not in {check["area"] for check in result["checks"]}
    assert "train.steps" in str(result["checks"])
    assert "max_position_embeddings" in str(result["checks"])


def test_the_limits_of_an_npu_are_checked_on_any_machine(recipe):
    healthy = examine(recipe, ["model.config.hidden_size=32"], for_ascend=True, probe=False)
    assert "ASCEND-LIMITS" not in healthy["codes"]
    with plant("compressed mask upside down"):
        wrong = examine(recipe, ["model.config.hidden_size=32"], for_ascend=True, probe=False)
    assert (wrong["worst"], wrong["codes"]) == ("red", ["MASK-INVERTED"])
    result = examine(recipe, [], for_ascend=True, probe=False)  # head size 8
    assert result["codes"] == ["ASCEND-LIMITS"]
    assert "head_dim must be a multiple of 16 and at most 512, got 8" in str(result["checks"])


def test_an_extreme_tail_and_equal_lengths_are_named(tmp_path):
    equal = doctor_recipe(tmp_path, [20] * 60)
    assert examine(equal, probe=False)["codes"] == ["PERF-SPREAD"]
    tail = doctor_recipe(tmp_path, [5] * 300 + [600])
    result = examine(
        tail, ["model.seq_length=640", "model.max_position_embeddings=640", "batch.token_budget=640"], probe=False
    )
    assert "DATA-TAIL" in result["codes"]


def test_documents_that_are_mostly_split_are_named(tmp_path):
    recipe = doctor_recipe(tmp_path, [150, 180, 200] * 20)
    result = examine(recipe, probe=False)
    assert "DATA-TAIL" in result["codes"]
    assert "most documents must fit model.seq_length (64)" in str(result["checks"])


def test_segments_that_are_reached_before_the_budget_are_named(recipe):
    result = examine(recipe, ["batch.max_segments=8", "shapes.kind=static"], probe=False)
    text = next(check["text"] for check in result["checks"] if check["code"] == "PERF-ALIGNMENT")
    assert "batch.max_segments (8) is reached first; raise batch.max_segments to " in text
    assert "divisor" not in text


def test_an_output_folder_that_cannot_be_made_is_red(recipe):
    result = examine(recipe, [f"checkpoint.output_dir={recipe.parent}/corpus.jsonl/inside"], probe=False)
    assert (result["worst"], result["codes"]) == ("red", ["RECIPE"])
    assert "checkpoint.output_dir must be a folder that can be made and written" in str(result["checks"])


def test_a_page_that_cannot_be_written_is_refused_before_the_steps(recipe, tmp_path, capfd):
    from ms_varlen.cli.app import main

    page = str(recipe.parent / "corpus.jsonl" / "page.html")
    arguments = ["align", str(recipe), f"checkpoint.output_dir={tmp_path}", "--steps", "1", "--report", page]
    assert main(arguments) == 1
    assert "--report: must be in a folder that can be written" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "align.json").exists()


def test_lengths_in_another_order_than_the_rows_are_found(recipe, monkeypatch):
    place = Layout.place
    monkeypatch.setattr(Layout, "place", lambda self, seq_lens: place(self, np.sort(seq_lens)))
    result = examine(recipe, probe=False)
    assert (result["worst"], result["codes"]) == ("red", ["LEN-ORDER"])
    assert "in one order" in str(result["checks"])


def _shifted(ends):
    return np.append(0, ends[:-1]).astype(np.int32)


@pytest.mark.parametrize(
    ("column", "change", "code"),
    [
        ("seq_lens", lambda c: c["seq_lens"][::-1].copy(), "LEN-ORDER"),
        ("seq_lens", lambda c: c["seq_lens"][:, None], "LEN-SHAPE"),
        ("seq_lens", lambda c: c["seq_lens"] * 1.0, "LEN-DTYPE"),
        ("actual_seq_qlen", lambda c: _shifted(c["actual_seq_qlen"]), "LEN-PLAIN"),
        ("input_ids", lambda c: c["input_ids"] * 1.0, "LEN-DTYPE"),
        ("input_ids", lambda c: np.roll(c["input_ids"], 1), "LEN-ORDER"),
        ("position_ids", lambda c: np.zeros_like(c["position_ids"]), "POS-RESET"),
        ("labels", lambda c: np.full_like(c["labels"], -100), "LABEL-NONE"),
    ],
)
def test_a_micro_batch_that_is_changed_behind_its_check_is_named(recipe, monkeypatch, column, change, code):
    columns = MicroBatches.micro_batch
    changed = lambda self, ids: (made := columns(self, ids)) | {column: change(made)}  # noqa: E731
    monkeypatch.setattr(MicroBatches, "micro_batch", changed)
    result = examine(recipe, probe=False)
    assert (result["worst"], result["codes"]) == ("red", [code])


def test_a_checkpoint_of_another_recipe_is_named(recipe, tmp_path):
    from ms_varlen.recipe.recipe import load_recipe
    from ms_varlen.train.run import train

    train(load_recipe(recipe, [f"checkpoint.output_dir={tmp_path}"]), lambda _: None)
    same = examine(recipe, [f"checkpoint.output_dir={tmp_path}", "train.steps=5"], probe=False)
    assert "training goes on from" in str(same["checks"])
    changed = examine(recipe, [f"checkpoint.output_dir={tmp_path}", "train.learning_rate=1"], probe=False)
    assert changed["codes"] == ["CKPT-RECIPE"]
    (folder,) = (tmp_path / "varlen").glob("step_*")
    other = ["mode=padded", "model.variable_seq_lengths=false", "batch.token_budget=null", "batch.rows=4"]
    result = examine(
        recipe, [*other, "batch.pad_to=max", "shapes.kind=static", f"checkpoint.resume={folder}"], probe=False
    )
    assert "CKPT-MODE" in result["codes"]
    assert "ckpt-tools convert --to padded" in str(result["checks"])
    (folder / "model.safetensors").unlink()
    gone = examine(recipe, [f"checkpoint.output_dir={tmp_path}"], probe=False)
    assert gone["codes"] == ["CKPT-CORRUPT"]
    way_out = "copy all files of the checkpoint; start from scratch with checkpoint.resume=never"
    assert f"model.safetensors is missing; {way_out}" in str(gone["checks"])
    (folder / "manifest.json").write_text("{}")
    assert "CKPT-CORRUPT" in examine(recipe, [f"checkpoint.output_dir={tmp_path}"], probe=False)["codes"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe and the run folder that its four steps left."""
    from ms_varlen.recipe.recipe import load_recipe
    from ms_varlen.train.run import train

    folder = tmp_path_factory.mktemp("trained")
    recipe = doctor_recipe(folder, [9, 12, 30, 41, 7] * 12)
    train(load_recipe(recipe, []), lambda _: None)
    return recipe, folder / "output" / "varlen"


def of_area(result, area):
    return [check["text"] for check in result["checks"] if check["area"] == area]


def test_a_finished_run_is_healthy_and_its_folder_does_for_the_recipe(trained):
    recipe, run = trained
    for path in (recipe, run):
        result = examine(path, probe=False)
        (text,) = of_area(result, "checkpoint")
        assert (result["worst"], text) == (
            "green",
            f"every checksum fits; {run}/step_00000004 has its 4 steps already, raise train.steps to go on",
        )
    result = examine(recipe, ["train.steps=9", "batch.token_budget=128"], probe=False)
    (text,) = of_area(result, "checkpoint")
    assert text.endswith("the rest of the epoch planned anew for batch.token_budget: was 256, is 128")
    (text,) = of_area(examine(recipe, ["checkpoint.resume=never"], probe=False), "checkpoint")
    assert text == f"checkpoint.resume is never; training begins at step 0 beside {run}"


def test_a_link_to_a_checkpoint_does_for_it(trained, tmp_path):
    recipe, run = trained
    (tmp_path / "best").symlink_to(run / "step_00000004")
    result = examine(recipe, [f"checkpoint.resume={tmp_path}/best"], probe=False)
    assert (result["worst"], "has its 4 steps already" in of_area(result, "checkpoint")[0]) == ("green", True)


def test_a_folder_that_is_no_run_is_refused_by_name(trained):
    result = examine(trained[1].parent, probe=False)
    assert result["codes"] == ["RECIPE"]
    assert "RECIPE: must be a recipe in YAML, or the folder of a run with its recipe.yaml, got" in str(result["checks"])


def test_a_checkpoint_of_other_data_or_beyond_the_steps_is_red(trained, tmp_path):
    recipe, run = trained
    result = examine(recipe, ["train.steps=3"], probe=False)
    assert result["codes"] == ["CKPT-RECIPE"]
    assert of_area(result, "checkpoint")[0].startswith(
        f"train.steps must be >= 4, the step of {run}/step_00000004, got 3;"
    )
    (tmp_path / "other.jsonl").write_text((recipe.parent / "corpus.jsonl").read_text().replace("a", "b"))
    result = examine(recipe, [f"data.source={tmp_path}/other.jsonl"], probe=False)
    assert result["codes"] == ["CKPT-RECIPE"]
    assert "data.source and data.tokenizer must give the samples of" in of_area(result, "checkpoint")[0]


@pytest.mark.parametrize("content", [None, "{:", "[]"])
def test_a_run_without_its_recipe_is_red(trained, content):
    recipe, run = trained
    saved = run / "recipe.yaml"
    before = saved.read_text()
    saved.unlink() if content is None else saved.write_text(content)
    try:
        result = examine(recipe, probe=False)
    finally:
        saved.write_text(before)
    assert result["codes"] == ["CKPT-RECIPE"]
    said = of_area(result, "checkpoint")[0]
    assert said.startswith(f"{saved} must ")
    assert said.endswith("start from scratch with checkpoint.resume=never")


def test_steps_that_were_skipped_are_read(tmp_path):
    def micro_batch(index, loss_sum, **more):
        ids = list(range(10 * index, 10 * index + 9))
        part = {"rank": 0, "micro_batch": index, "sample_ids": ids, "seq_lens": [7] * 9, "tokens": 64}
        return part | {"loss_sum": loss_sum} | more

    def dump(step, *batches, norm=None, data="a"):
        record = {"step": step, "grad_norm": norm, "data_fingerprint": data, "micro_batches": batches}
        (tmp_path / f"bad_step_{step:08d}.json").write_text(json.dumps(record))

    def last():
        *_, check = bad_step_checks(tmp_path, "a")
        assert (check.area, check.level, check.code) == ("skipped", "yellow", "LOSS-NAN")
        return check.text

    assert list(bad_step_checks(tmp_path, "a")) == []
    dump(4, micro_batch(0, 2.0), micro_batch(1, "nan"))
    assert last() == (
        f"{tmp_path}/bad_step_00000004.json (of 1): loss and gradient of step 4 must be finite, got a loss of nan "
        "in 1 of 2 micro-batches (rank 0, micro-batch 1, T=64, sample ids [10, 11, 12, 13, 14, 15, 16, 17, ... 9 in "
        "all] of lengths [7, 7, 7, 7, 7, 7, 7, 7, ... 9 in all]); look at these samples, or lower train.learning_rate"
    )
    dump(5, micro_batch(0, "inf"), micro_batch(1, "nan"))
    assert "a loss of inf in 2 of 2 micro-batches after a step that was skipped too, so the weights are to" in last()
    dump(6, micro_batch(0, 2.0, gradient_finite=True), micro_batch(1, 3.0, gradient_finite=False))
    assert "finite losses and a gradient that is not in 1 of 2 micro-batches (rank 0, micro-batch 1, T=64" in last()
    dump(7, micro_batch(0, 2.0), micro_batch(1, 3.0), norm="inf", data="b")
    assert "finite losses and a gradient norm of inf over 2 micro-batches (rank 0, micro-batch 0, T=64" in last()
    assert last().endswith("; lower train.learning_rate; the ids are of another token store than the recipe's")
    (tmp_path / "bad_step_00000008.json").write_text('{"step": 8}')
    assert last().endswith("the file must be what training writes, got KeyError ('micro_batches'); delete it")
    assert len(list(bad_step_checks(tmp_path, "a"))) == 3


def test_a_rank_that_is_lost_in_steps_one_after_another_is_to_blame(tmp_path):
    def dump(step, *losses):
        part = {"micro_batch": 0, "sample_ids": [1], "seq_lens": [7], "tokens": 64}
        batches = [part | {"rank": rank, "loss_sum": loss} for rank, loss in enumerate(losses)]
        record = {"step": step, "grad_norm": "nan", "data_fingerprint": "a", "micro_batches": batches}
        (tmp_path / f"bad_step_{step:08d}.json").write_text(json.dumps(record))

    dump(4, 2.0, "nan")
    dump(5, 2.0, "nan")
    dump(6, "nan", 2.0)
    samples, rank, other = [check.text for check in bad_step_checks(tmp_path, "a")]
    assert samples.endswith("; look at these samples, or lower train.learning_rate")
    assert "a loss of nan in 1 of 2 micro-batches, all of rank 1 as in the step before: its weights or device" in rank
    assert rank.endswith("start again from the last checkpoint, and look at the machine of rank 1 if it comes back")
    assert other.endswith("; look at these samples, or lower train.learning_rate")


def test_the_doctor_says_that_steps_were_skipped(trained):
    recipe, run = trained
    (run / "bad_step_00000002.json").write_text("{}")
    try:
        result = examine(recipe, probe=False)
    finally:
        (run / "bad_step_00000002.json").unlink()
    assert (result["worst"], result["codes"]) == ("yellow", ["LOSS-NAN"])


def test_python_and_packages_that_do_not_belong_together():
    assert [python_check(version).level for version in ((3, 9), (3, 10), (3, 12), (3, 13))] == [
        "red",
        "green",
        "green",
        "red",
    ]
    good = {"mindspore": "2.9.0", "numpy": "1.26.4", "mindformers": "1.9.0"}
    assert {check.level for check in package_checks(good)} == {"green"}
    for change, level in (
        ({"mindspore": None}, "red"),
        ({"mindspore": "2.10.0"}, "red"),
        ({"numpy": "2.1.0"}, "red"),
        ({"mindformers": "1.8.0"}, "yellow"),
        ({"mindformers": "3.0"}, "yellow"),
    ):
        checks = list(package_checks(good | change))
        assert level in {check.level for check in checks}
        assert {check.code for check in checks if check.level != "green"} == {"ENV-VERSIONS"}


def test_cann_that_is_not_set_up(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cann_check({}, for_ascend=True).level == "green"  # there is no NPU here
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/npu-smi")
    assert (cann_check({}, True).level, cann_check({}, False).level) == ("red", "yellow")
    assert cann_check({"ASCEND_HOME_PATH": "/a"}, True).level == "green"


FACTS = {
    "graphs": 3,
    "p50": 100.0,
    "p99": 1000.0,
    "speedup_over_padded": 4.0,
    "compile_share": 0.01,
    "compile_seconds": 3.0,
    "saved_seconds": 300.0,
    "excess_compile_share": 0.0,
    "alignment_share": 0.02,
    "data_share": 0.01,
    "dynamic_share": 0.0,
    "imbalance_share": 0.0,
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"graphs": 60, "compile_seconds": 400.0, "excess_compile_share": 0.8}, "PERF-GRAPHS"),
        ({"p99": 190.0}, "PERF-SPREAD"),
        ({"alignment_share": 0.49}, "PERF-ALIGNMENT"),
        ({"data_share": 0.6}, "PERF-DATA"),
        ({"dynamic_share": 0.3}, "PERF-DYNAMIC"),
        ({"imbalance_share": 0.2}, "PERF-BALANCE"),
    ],
)
def test_each_cause_of_no_gain_is_named(recipe, change, code):
    from ms_varlen.recipe.recipe import load_recipe

    found = [check.code for check in causes(load_recipe(recipe, []), FACTS | change) if check.code]
    assert found == ([code] if code else [])
