import hashlib
import json
import time

import numpy as np
import pytest

from ms_varlen.graph.compile_cache import MARKER
from tests.support import cli_run
from tests.support.cli_run import arrays, checkpoints, metrics, ms_varlen
from tests.support.tiny_recipe import write_corpus, write_recipe

ONE_OF_EACH = {"train": 1, "apply": 1, "eval": 1}

FIVE_FAULTS = """
mode: varlen
data: {source: missing.jsonl, tokenizer: bytes}
batch: {token_budget: 1024, length_buckets: [128, 256]}
model:
  config: {hidden_size: 64}
  variable_seq_lengths: false
  seq_length: 2048
  max_position_embeddings: 4096
train: {steps: 1, learning_rate: 1e-3}
checkpoint: {output_dir: output}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cli_run.first_run(tmp_path_factory.getbasetemp())


def strict_json(text):
    """The only object in a text; NaN and infinities are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def succeeded(done):
    assert done.returncode == 0, done.stderr
    return done


def losses(folder):
    return [line["loss"] for line in metrics(folder)]


def entries(cache):
    """Every file of the compile cache: its hash and when it was written (but markers are touched)."""
    files = [path for path in (cache / "ms_varlen" / "compile_cache").rglob("*") if path.is_file()]
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.name != MARKER and path.stat().st_mtime_ns)
        for path in files
    }


@pytest.mark.graph
def test_train_prints_one_json_object_and_writes_its_files(tiny):
    summary = strict_json(tiny.done.stdout)
    last = metrics(tiny.run)[-1]
    assert {key: summary[key] for key in last} == last
    assert (summary["run_folder"], summary["first_step"], summary["compile_cache"]) == (str(tiny.run), 0, "cold")
    assert all(ledger["balanced"] for ledger in summary["ledger"].values())
    assert summary["report"] == f"{tiny.run}/report.html"
    names = {path.name for path in tiny.run.iterdir()} - {".lock"}
    files = {"recipe.yaml", "plan.json", "metrics.jsonl", "report.html"}
    assert names == {*files, "step_00000009", "step_00000012"}
    assert "step 12 of 12" in tiny.done.stderr


@pytest.mark.graph
def test_range_is_one_graph_for_several_sizes(tiny):
    lines = metrics(tiny.run)
    assert [line["graphs_compiled"] for line in lines] == [ONE_OF_EACH] * 12
    sizes = {line["tokens_computed"] for line in lines}
    assert len(sizes) > 1
    assert sizes <= set(range(64, 513, 32))


@pytest.mark.graph
def test_static_is_one_graph_of_one_size(tiny, tmp_path):
    succeeded(tiny.train(tmp_path, "shapes.kind=static", "train.steps=3", "train.eval_every=null"))
    lines = metrics(tmp_path / "varlen")
    assert [line["graphs_compiled"] for line in lines] == [{"train": 1, "apply": 1}] * 3
    assert [line["tokens_computed"] for line in lines] == [2 * 256] * 3
    # The same samples, and padding changes nothing but the order of sums.
    assert losses(tmp_path / "varlen") == pytest.approx(losses(tiny.run)[:3], abs=1e-5, rel=0)


@pytest.mark.graph
def test_second_run_starts_warm_and_is_equal(tiny, tmp_path):
    before = entries(tiny.cache)
    done = succeeded(tiny.train(tmp_path, "--json"))
    assert strict_json(done.stdout)["compile_cache"] == "warm"
    assert metrics(tmp_path / "varlen") == metrics(tiny.run)
    assert entries(tiny.cache) == before


@pytest.mark.graph
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("varlen", ["model.config.hidden_size=48"]),
        ("varlen", ["model.config.num_hidden_layers=2"]),
        ("padded", ["mode=padded", "model.variable_seq_lengths=false", "batch.token_budget=null", "batch.rows=4"]),
    ],
    ids=["hidden_size", "layers", "mode"],
)
def test_another_network_keeps_cached_graphs_and_is_right(tiny, tmp_path, mode, changes):
    before = entries(tiny.cache)
    done = succeeded(tiny.train(tmp_path / "graph", *changes, "train.steps=2", "--json"))
    assert strict_json(done.stdout)["compile_cache"] == "cold"
    assert before.items() < entries(tiny.cache).items()
    succeeded(tiny.train(tmp_path / "pynative", *changes, "train.steps=2", "graph.mode=pynative"))
    found, expected = losses(tmp_path / "graph" / mode), losses(tmp_path / "pynative" / mode)
    # Two steps of fp32: another network's graph would differ in the second digit.
    assert found == pytest.approx(expected, abs=2e-6, rel=0)
    assert abs(found[1] - losses(tiny.run)[1]) > 1e-3


@pytest.mark.graph
def test_align_passes(tiny, tmp_path):
    folder = f"checkpoint.output_dir={tmp_path}"
    done = succeeded(tiny.program("align", tiny.recipe, "--steps", "4", "--json", folder, "train.eval_every=null"))
    result = strict_json(done.stdout)
    assert (result["passed"], result["first_failed_step"], len(result["loss"])) == (True, None, 4)
    assert result["max_abs_diff"] <= result["tolerance"] == 2e-5
    assert result["gradient_max_rel_diff"] <= 1e-5
    assert result["sample_ids_sha256"] == [line["sample_ids_sha256"] for line in metrics(tiny.run)[:4]]
    assert (tmp_path / "align.html").read_text().count("<img") >= 1


@pytest.mark.graph
@pytest.mark.parametrize(("micro_batch", "step"), [(5, 3), (7, 4)])  # the second moves the loss by less than 1e-5
def test_align_names_the_step_in_which_a_length_was_wrong(tiny, tmp_path, micro_batch, step):
    folder = f"checkpoint.output_dir={tmp_path}"
    faults = [{"kind": "moved_end", "number": micro_batch}]
    done = tiny.program("align", tiny.recipe, "--steps", "4", "--json", folder, "graph.mode=pynative", faults=faults)
    result = strict_json(done.stdout)
    assert (done.returncode, result["passed"], result["first_failed_step"]) == (1, False, step)


@pytest.mark.graph
def test_steps_that_cannot_be_applied_change_nothing_and_training_continues(tiny, tmp_path):
    # Micro-batches: the second of step 2, both of step 4, the first of step 5.
    faults = [{"kind": "nan", "number": 4}, *({"kind": "no_labels", "number": number} for number in (7, 8, 9))]
    settings = ("train.steps=6", "checkpoint.every=1", "checkpoint.keep=6")
    done = succeeded(tiny.train(tmp_path, *settings, "--json", faults=faults))
    run = tmp_path / "varlen"
    lines, clean = metrics(run), metrics(tiny.run)
    assert [line["sample_ids_sha256"] for line in lines] == [line["sample_ids_sha256"] for line in clean[:6]]
    assert lines[0] == clean[0]

    skipped, unlabelled, half = lines[1], lines[3], lines[4]
    assert [line.get("skipped", False) for line in lines] == [False, True, False, False, False, False]
    assert (skipped["loss"], skipped["grad_norm"]) == (None, None)
    ids = np.sort(skipped["sample_ids"]).astype("<i8")
    assert hashlib.sha256(ids.tobytes()).hexdigest() == skipped["sample_ids_sha256"]
    assert "step 2 is skipped: its loss or gradient is not finite: " in done.stderr
    assert "(1 skipped so far)" in done.stderr
    assert (unlabelled["loss"], unlabelled["tokens_supervised"]) == (0, 0)
    assert "step 4 has no supervised token: its loss is 0 and no weight changes" in done.stderr
    assert 0 < half["tokens_supervised"] < clean[4]["tokens_supervised"]

    after = [arrays(run / f"step_{step:08d}") for step in checkpoints(run)]
    assert [after[i] == after[i + 1] for i in range(5)] == [True, False, True, False, False]
    # Steps 3 and 5 follow one and two updates, as steps 2 and 3 of the run without faults do.
    assert lines[2]["loss"] == pytest.approx(clean[1]["loss"], abs=0.2)
    assert half["loss"] == pytest.approx(clean[2]["loss"], abs=0.2)
    first_epoch, last = (json.loads((run / f"step_0000000{step}" / "state.json").read_text()) for step in (3, 6))
    assert first_epoch["skipped"] == {"steps": 1, "samples": ids.size, "tokens": skipped["tokens_real"]}
    assert first_epoch["ledger"]["tokens"]["skipped"] == skipped["tokens_real"]
    assert first_epoch["ledger"]["samples"]["skipped"] == ids.size
    assert last["skipped"] == {"steps": 1, "samples": 0, "tokens": 0}
    assert all(ledger["balanced"] for state in (first_epoch, last) for ledger in state["ledger"].values())
    assert strict_json(done.stdout)["step"] == 6
    assert "skipped" in (run / "report.html").read_text()


@pytest.mark.graph
def test_run_without_one_good_step_ends_with_its_report(tiny, tmp_path):
    done = tiny.train(tmp_path, "train.steps=3", "--json", faults=[{"kind": "nan_weight"}])
    assert done.returncode == 1
    summary = strict_json(done.stdout)
    assert (summary["loss"], summary["eval_loss"], summary["skipped"]) == (None, None, True)
    assert summary["skipped_steps"] == 3
    assert summary["ledger"]["tokens"]["trained"] == 0
    assert losses(tmp_path / "varlen") == [None] * 3
    assert "every step was skipped" in (tmp_path / "varlen" / "report.html").read_text()


@pytest.mark.graph
def test_folder_that_cannot_be_made_is_an_error_without_traceback(tiny, tmp_path):
    (tmp_path / "file").touch()
    done = tiny.train(tmp_path / "file" / "below")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: checkpoint.output_dir must be a folder that can be made, got {tmp_path}/file/below" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def corpus_with_a_bad_line(tmp_path):
    write_corpus(tmp_path, ["good", 5])
    return str(write_recipe(tmp_path))


def test_error_has_a_traceback_only_with_debug(corpus_with_a_bad_line, tmp_path):
    done = ms_varlen(tmp_path, "plan", corpus_with_a_bad_line)
    assert (done.returncode, done.stdout) == (1, "")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "corpus.jsonl" in error
    assert "[DATA-SOURCE] ms-varlen doctor --explain DATA-SOURCE" in done.stderr
    assert "Traceback" not in done.stderr
    debugged = ms_varlen(tmp_path, "plan", corpus_with_a_bad_line, "--debug")
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr
    assert "DataError" in debugged.stderr


def test_plan_prints_one_json_object(tmp_path):
    write_corpus(tmp_path, [f"{number} " + "a" * number for number in range(40)])
    recipe = write_recipe(tmp_path, data={"eval_fraction": 0})
    done = succeeded(ms_varlen(tmp_path, "plan", str(recipe), "--json"))
    plan = strict_json(done.stdout)
    # Each text has two or three bytes before its letters, and an end-of-text after them.
    real = sum(len(f"{number} ") + number + 1 for number in range(40))
    assert (plan["mode"], plan["samples"], plan["tokens_real"]) == ("varlen", 40, real)
    assert plan["graphs"] == {"train": 1, "apply": 1}
    assert plan["padding_overhead"] == pytest.approx(plan["tokens_computed"] / real - 1)
    assert not (tmp_path / "output").exists()


def test_schema_is_one_json_object(tmp_path):
    schema = strict_json(succeeded(ms_varlen(tmp_path, "schema")).stdout)
    assert schema["additionalProperties"] is False
    assert {"mode", "data", "batch", "shapes", "model", "train", "graph", "checkpoint", "device"} == set(
        schema["properties"]
    )


def test_five_faults_are_reported_at_once_and_soon(tmp_path):
    recipe = tmp_path / "faulty.yaml"
    recipe.write_text(FIVE_FAULTS)
    begin = time.perf_counter()
    done = ms_varlen(tmp_path, "train", str(recipe))
    seconds = time.perf_counter() - begin
    assert (done.returncode, done.stdout) == (1, "")
    first, *faults = done.stderr.splitlines()
    assert first == f"error: {recipe}: 5 faults"
    assert sorted(fault.split(":")[0].strip() for fault in faults) == [
        "batch.length_buckets",
        "batch.token_budget",
        "data.source",
        "model.max_position_embeddings",
        "model.variable_seq_lengths",
    ]
    assert seconds < 3


@pytest.mark.parametrize("arguments", [["frobnicate"], ["train"], ["train", "a.yaml", "--frobnicate"], []])
def test_wrong_command_line_ends_with_2(tmp_path, arguments):
    assert ms_varlen(tmp_path, *arguments).returncode == 2
