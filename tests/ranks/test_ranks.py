"""Several ranks as real workers of msrun, against one process with the same global batches."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from ms_varlen.planning.plan import EpochPlan
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.loop import ids_hash
from ms_varlen.workload.workload import prepare
from tests.support import cli_run, ranks_run
from tests.support.cli_run import checkpoints, metrics

pytestmark = pytest.mark.ranks


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def under_msrun(folder, ranks, names):
    """Scenarios of ranks_run.py; [rank][name] -> outcome."""
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}"]
    command += [f"--local_worker_num={ranks}", f"--master_port={free_port()}", f"--log_dir={folder}/log{ranks}"]
    command += ["--join=True", str(Path(ranks_run.__file__)), str(folder), *names]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env={**os.environ, "PATH": search}
    )
    logs = "".join(path.read_text() for path in sorted(folder.glob(f"log{ranks}/worker_*.log")))
    assert done.returncode == 0, done.stdout + logs
    return [json.loads((folder / f"outcomes_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    rng = random.Random(3)
    ranks_run.write_corpus(folder / "corpus.jsonl", [rng.randint(2, 32) for _ in range(60)])
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "truncated.jsonl").write_text("".join(lines[:45]))
    rng.shuffle(lines)
    (folder / "shuffled.jsonl").write_text("".join(lines))
    ranks_run.write_corpus(folder / "uneven.jsonl", [32, 32, 32, 4, 4, 4])
    ranks_run.write_corpus(folder / "nine.jsonl", [30] * 8 + [4])
    ranks_run.write_corpus(folder / "twelve.jsonl", [5] * 12)
    return folder


@pytest.fixture(scope="module")
def four(folder):
    return under_msrun(folder, 4, ["nine_samples", "twelve_on_four"])


@pytest.fixture(scope="module")
def two(folder, four):
    names = [name for name in ranks_run.SCENARIOS if name not in ("nine_samples", "twelve_on_four")]
    return under_msrun(folder, 2, names)


def value(outcomes, name):
    assert all("value" in outcome[name] for outcome in outcomes), [outcome[name] for outcome in outcomes]
    return [outcome[name]["value"] for outcome in outcomes]


def plan_of(folder, name, ranks, remaining=None, **changes):
    plans = prepare(parse_recipe(ranks_run.values(folder, name, **changes)), world_size=ranks).plans
    return EpochPlan(plans.lengths, plans.settings, 0, remaining)


@pytest.mark.parametrize("mode", ["varlen", "packed", "padded"])
def test_two_ranks_train_what_one_process_does(folder, two, mode):
    changes = ranks_run.MODES[mode] | ({"train__eval_every": 2} if mode == "varlen" else {})
    alone = ranks_run.values(folder, "one", **changes)
    alone["batch"]["micro_batches"] = 2
    ranks_run.train(alone)
    one, both = (metrics(folder / name / mode) for name in ("one", "two"))
    assert [line["sample_ids_sha256"] for line in both] == [line["sample_ids_sha256"] for line in one]
    for name in ("tokens_real", "tokens_supervised", "segments"):
        assert [line[name] for line in both] == [line[name] for line in one]
    for name in ("loss", "eval_loss"):
        found, expected = ([line[name] for line in lines if name in line] for lines in (both, one))
        assert found == pytest.approx(expected, abs=1e-5, rel=0)
    # AdamW's first moment after one step is the gradient, scaled.
    found, expected = (
        load_file(folder / name / mode / "step_00000001" / "optimizer.safetensors") for name in ("two", "one")
    )
    for name, moment in expected.items():
        np.testing.assert_allclose(found[name], moment, rtol=0, atol=1e-6 * np.abs(moment).max(), err_msg=name)
    assert [line["ranks"] for line in both] == [2] * 3


def test_only_rank_0_writes_and_each_rank_trains_its_slice(folder, two):
    run = folder / "two" / "varlen"
    assert checkpoints(run) == [1, 2, 3]
    assert len(metrics(run)) == 3
    plan = plan_of(folder, "two", 2)
    lengths = prepare(parse_recipe(ranks_run.values(folder, "two"))).plans.lengths
    for rank, found in enumerate(value(two, "varlen")):
        planned = [lengths[plan.micro_batch(step, 0, rank)].tolist() for step in range(3)]
        assert found["lengths"][:2] == planned[:2]  # then an evaluation
        assert planned[2] in found["lengths"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shuffled_corpus", r"all ranks must train the same, but on rank 1 corpus\.fingerprint is "),
        ("truncated_corpus", r"on rank 1 .*corpus\.samples is \d+, on rank 0 \d+; corpus\.tokens is \d+, on rank 0"),
        ("other_recipe", r"but on rank 1 recipe\.train\.learning_rate is 0\.02, on rank 0 0\.01; start every rank"),
        ("other_mode", r'on rank 1 .*recipe\.mode is "packed", on rank 0 "varlen"'),
        (
            "other_samples",
            r"step 2: rank 1 has other data than .*: samples must be \d+ as planned, got \d+, in its mic",
        ),
        ("other_step", r"step 1: all ranks must be at one place, but step is 1 on rank 1 and 0 on rank 0; all ranks s"),
    ],
)
def test_a_rank_with_something_else_stops_all_with_one_message(two, name, message):
    outcomes = [outcome[name] for outcome in two]
    assert [outcome["kind"] for outcome in outcomes] == ["RanksError"] * 2
    assert outcomes[0]["error"] == outcomes[1]["error"]
    assert re.search(message, outcomes[0]["error"]), outcomes[0]["error"]
    assert max(outcome["seconds"] for outcome in outcomes) < 30


def test_an_error_of_one_rank_is_reported_by_all(two):
    first, other = (outcome["error_on_one_rank"] for outcome in two)
    assert (other["kind"], other["error"]) == ("DataError", "record 7 must be whole, got half of it")
    assert first["error"] == f"rank 1 stopped, and with it all others: {other['error']}"


def test_the_loss_is_the_mean_over_the_tokens_of_all_ranks(two):
    # The moment is a tenth of the gradient: 2.5 on both ranks.
    assert value(two, "token_mean") == [[2.5, True, pytest.approx(0.25)]] * 2


def test_a_rank_without_labels_harms_no_other(folder, two):
    lines = metrics(folder / "silent" / "varlen")
    whole = metrics(folder / "two" / "varlen")
    assert [line.get("skipped", False) for line in lines] == [False] * 3
    assert 0 < lines[0]["tokens_supervised"] < whole[0]["tokens_supervised"]
    assert (lines[1]["tokens_supervised"], lines[1]["loss"], lines[1]["grad_norm"]) == (0, 0, None)
    before, after = (
        load_file(folder / "silent" / "varlen" / f"step_0000000{step}" / "model.safetensors") for step in (1, 2)
    )
    assert all((before[name] == after[name]).all() for name in before)
    assert lines[2]["tokens_supervised"] == whole[2]["tokens_supervised"]
    assert np.isfinite(lines[2]["loss"])


def test_a_nan_of_one_rank_skips_the_step_on_all_and_is_written_down(folder, two):
    run = folder / "nan" / "varlen"
    lines = metrics(run)
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    record = json.loads((run / "bad_step_00000002.json").read_text())
    assert [batch["rank"] for batch in record["micro_batches"]] == [0, 1]
    assert record["micro_batches"][1]["loss_sum"] == "nan"
    assert record["micro_batches"][0]["loss_sum"] > 0
    ids = np.concatenate([batch["sample_ids"] for batch in record["micro_batches"]])
    assert ids_hash(ids) == lines[1]["sample_ids_sha256"]
    assert sum(sum(batch["seq_lens"]) for batch in record["micro_batches"]) == lines[1]["tokens_real"]
    assert (record["step"], record["layout"]["mode"]) == (2, "varlen")


def test_ranks_whose_weights_drifted_apart_save_nothing(folder, two):
    outcomes = [outcome["drifted"] for outcome in two]
    assert outcomes[0]["error"] == outcomes[1]["error"]
    assert re.match(
        r"weights and moments must be the same on all ranks, but after step 2 those of rank 1 are not those of "
        r"rank 0 \(1 of 2 ranks agree, so whose are wrong is not known\): on rank 1 1 of \d+ differ, first \S+; "
        r"nothing was saved",
        outcomes[0]["error"],
    )
    assert checkpoints(folder / "drift" / "varlen") == [1]


def test_whose_gradient_was_not_finite_is_found_though_ranks_added_it_up(folder, two):
    run = folder / "inf" / "varlen"
    assert [line.get("skipped", False) for line in metrics(run)] == [True, False]
    batches = json.loads((run / "bad_step_00000001.json").read_text())["micro_batches"]
    assert [(batch["rank"], batch["micro_batch"]) for batch in batches] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [batch["gradient_finite"] for batch in batches] == [True, True, True, False]
    assert all(isinstance(batch["loss_sum"], float) for batch in batches)


def test_a_run_stopped_before_its_first_step_leaves_nothing_and_begins_again(folder, two):
    assert [summary["step"] for summary in value(two, "stopped_before_the_first_step")] == [1, 1]
    assert [path.name for path in folder.glob("early/varlen*")] == ["varlen"]
    assert checkpoints(folder / "early" / "varlen") == [1]
    assert len(metrics(folder / "early" / "varlen")) == 1


def test_an_epoch_that_does_not_divide_has_the_same_steps_on_each_rank(folder, two):
    found = value(two, "ends_unevenly")
    plan = plan_of(
        folder,
        "uneven",
        2,
        corpus="uneven",
        data__eval_fraction=0.0,
        batch={"token_budget": 32},
        shapes={"kind": "static", "divisor": 16},
    )
    assert [len(rank["lengths"]) for rank in found] == [plan.num_steps] * 2
    samples = found[0]["summary"]["ledger"]["samples"]
    assert (samples["trained"], samples["left_over"]) == (6 - plan.left_over.size, plan.left_over.size)
    assert plan.left_over.size > 0


def test_nine_samples_on_four_ranks(four):
    found = value(four, "nine_samples")
    assert [len(rank["lengths"][0]) for rank in found] == [3, 2, 2, 2]


def test_twelve_samples_on_four_ranks_resume_on_two(folder, two):
    lines = metrics(folder / "twelve" / "padded")
    rows = {"mode": "padded", "batch": {"rows": 1}, "model__variable_seq_lengths": False, "data__eval_fraction": 0.0}
    first = plan_of(folder, "twelve", 4, corpus="twelve", **rows).step_ids(0)
    rest = plan_of(folder, "twelve", 2, remaining=np.setdiff1d(np.arange(12), first), corpus="twelve", **rows)
    steps = [first, *(rest.step_ids(step) for step in range(4))]
    assert [line["sample_ids_sha256"] for line in lines] == [ids_hash(ids) for ids in steps]
    assert sorted(np.concatenate(steps)) == list(range(12))


def test_two_ranks_then_one_then_two_train_each_sample_once(folder, two):
    (_, alone, _), (_, _) = value(two, "elastic")
    assert "is planned again: ranks: were 2, are 1" in " ".join(alone["log"].split())
    trained, hashes = [], []
    for ranks in (2, 1, 2):
        samples = prepare(parse_recipe(ranks_run.values(folder, "elastic"))).plans.lengths.size
        rest = plan_of(folder, "elastic", ranks, np.setdiff1d(np.arange(samples), trained) if trained else None)
        for step in range(2):
            hashes.append(ids_hash(rest.step_ids(step)))
            trained += rest.step_ids(step).tolist()
    assert len(set(trained)) == len(trained)
    lines = metrics(folder / "elastic" / "varlen")
    assert [line["sample_ids_sha256"] for line in lines] == hashes
    assert [line.get("ranks", 1) for line in lines] == [2, 2, 1, 1, 2, 2]


def launched(tiny, output, port):
    """The launcher with two ranks that train without end, in graph mode."""
    command = [sys.executable, "-m", "ms_varlen.launch", tiny.recipe, "2", "--", "batch.micro_batches=1"]
    command += ["train.steps=100000", "train.eval_every=null", f"checkpoint.output_dir={output}"]
    environment = cli_run.environment(tiny.cache) | {"MASTER_PORT": str(port), "LOG_DIR": str(output / "log")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_lines(launcher, run, lines):
    end = time.monotonic() + 200
    while not (run / "metrics.jsonl").is_file() or len(metrics(run)) < lines:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    return psutil.Process(launcher.pid).children(recursive=True)


@pytest.mark.graph
def test_launcher_saves_on_sigterm_and_names_a_killed_rank(tmp_path_factory, tmp_path):
    tiny, run = cli_run.first_run(tmp_path_factory.getbasetemp()), tmp_path / "varlen"
    launcher = launched(tiny, tmp_path, free_port())
    processes = wait_for_lines(launcher, run, 4)
    launcher.terminate()
    out, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, out + err
    saved = len(metrics(run))
    assert checkpoints(run)[-1] == saved
    assert not [process for process in processes if process.is_running()]
    assert {path.name for path in (tmp_path / "log").iterdir()} == {
        "msrun.log",
        "scheduler.log",
        "worker_0.log",
        "worker_1.log",
    }

    launcher = launched(tiny, tmp_path, free_port())
    processes = wait_for_lines(launcher, run, saved + 2)
    (victim,) = (p for p in processes if p.environ().get("RANK_ID") == "1" and p.environ()["MS_ROLE"] == "MS_WORKER")
    victim.kill()
    out, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 137
    assert "rank 1 was killed by SIGKILL" in err
    assert not [process for process in processes if process.is_running()]

    lines = [line for line in metrics(run) if line["step"] <= saved + 2]
    done = tiny.train(tmp_path / "one", f"train.steps={saved + 2}", "train.eval_every=null")
    assert done.returncode == 0, done.stderr
    alone = metrics(tmp_path / "one" / "varlen")
    assert [line["sample_ids_sha256"] for line in lines] == [line["sample_ids_sha256"] for line in alone]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], abs=1e-4, rel=0)
