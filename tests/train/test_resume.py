import json
import os
import re
import time

import numpy as np
import pytest

from ms_varlen.planning.plan import EpochPlan
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.train.loop import ids_hash
from ms_varlen.workload.workload import prepare
from tests.support import cli_run
from tests.support.cli_run import arrays, checkpoints, metrics

pytestmark = pytest.mark.graph


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cli_run.first_run(tmp_path_factory.getbasetemp())


def assert_same_run(found, expected):
    assert metrics(found) == metrics(expected)
    assert checkpoints(found) == checkpoints(expected)
    for step in checkpoints(expected):
        name = f"step_{step:08d}"
        assert arrays(found / name) == arrays(expected / name)
        assert (found / name / "state.json").read_bytes() == (expected / name / "state.json").read_bytes()


def contents(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("step_*/*"))}


def test_run_killed_at_every_point_equals_the_uninterrupted_run(tiny, tmp_path):
    assert [line["epoch"] for line in metrics(tiny.run)] == [0] * 4 + [1] * 4 + [2] * 4
    run = tmp_path / "varlen"
    kills = [  # where, in which step, and what it leaves: lines of metrics, checkpoints
        ("kill_in_step", 2, 1, []),
        ("half_file", 3, 3, []),
        ("before_rename", 6, 6, [3]),
        ("kill_in_step", 6, 5, [3]),  # in the middle of the second epoch
        ("after_rename", 9, 9, [3, 6, 9]),
        ("kill_in_step", 11, 10, [3, 6, 9]),
    ]
    for kind, step, lines, saved in kills:
        done = tiny.train(tmp_path, faults=[{"kind": kind, "step": step}])
        assert done.returncode == -9, done.stderr
        assert metrics(run) == metrics(tiny.run)[:lines]
        assert checkpoints(run) == saved
    done = tiny.train(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "goes on at step 9" in done.stderr
    assert_same_run(run, tiny.run)
    assert not list(run.glob(".tmp-*"))


def test_interrupt_ends_with_130_at_once_and_the_run_continues(tiny, tmp_path):
    done = tiny.train(tmp_path, faults=[{"kind": "interrupt", "step": 5}])
    begin = float(re.search(r"interrupted at ([\d.]+)", done.stderr)[1])
    assert (done.returncode, checkpoints(tmp_path / "varlen")) == (130, [3])
    assert time.time() - begin < 5
    assert "Traceback" not in done.stderr
    assert tiny.train(tmp_path).returncode == 0
    assert_same_run(tmp_path / "varlen", tiny.run)


def test_full_disk_stops_or_is_lived_with_as_the_recipe_says(tiny, tmp_path):
    full = [{"kind": "full_disk", "step": 6}]
    done = tiny.train(tmp_path / "stop", faults=full)
    assert (done.returncode, checkpoints(tmp_path / "stop" / "varlen")) == (1, [3])
    assert "step_00000006 could not be written" in done.stderr
    done = tiny.train(tmp_path / "go", "checkpoint.on_save_error=continue", faults=full)
    assert (done.returncode, checkpoints(tmp_path / "go" / "varlen")) == (0, [9, 12]), done.stderr
    assert "checkpoint.on_save_error is continue: training goes on" in " ".join(done.stderr.split())
    assert metrics(tmp_path / "go" / "varlen") == metrics(tiny.run)
    last = [{"kind": "full_disk", "step": 12}]
    done = tiny.train(tmp_path / "last", "checkpoint.on_save_error=continue", faults=last)
    assert (done.returncode, checkpoints(tmp_path / "last" / "varlen")) == (1, [6, 9])
    assert tiny.train(tmp_path / "stop").returncode == 0
    assert_same_run(tmp_path / "stop" / "varlen", tiny.run)


def test_too_many_bad_steps_end_the_run_saved(tiny, tmp_path):
    done = tiny.train(tmp_path, "train.max_bad_steps=1", "graph.mode=pynative", faults=[{"kind": "nan_weight"}])
    assert (done.returncode, checkpoints(tmp_path / "varlen")) == (1, [2])
    assert "skipped steps must be at most 1 (train.max_bad_steps), got 2" in " ".join(done.stderr.split())
    assert sorted(path.name for path in (tmp_path / "varlen").glob("bad_step_*")) == [
        "bad_step_00000001.json",
        "bad_step_00000002.json",
    ]


def test_bad_steps_of_an_earlier_start_do_not_count_again(tiny, tmp_path):
    run, none = tmp_path / "varlen", "train.max_bad_steps=0"
    done = tiny.train(tmp_path, none, faults=[{"kind": "nan", "number": 3}])
    assert (done.returncode, checkpoints(run)) == (1, [2])
    assert "step 2 is skipped: its loss or gradient is not finite: computed again, each micro-batch is" in " ".join(
        done.stderr.split()
    )
    done = tiny.train(tmp_path, none)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run) if line.get("skipped")] == [2]
    assert [line["sample_ids_sha256"] for line in metrics(run)] == [
        line["sample_ids_sha256"] for line in metrics(tiny.run)
    ]
    state = json.loads((run / "step_00000012" / "state.json").read_text())
    assert state["skipped"] == {"steps": 1, "samples": 0, "tokens": 0}  # in all; in this epoch


def test_finished_run_asked_for_more_steps_equals_one_run(tiny, tmp_path):
    for steps in (9, 12):
        done = tiny.train(tmp_path, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "varlen", tiny.run)


def test_finished_run_says_so_and_is_unchanged(tiny):
    before, lines = contents(tiny.run), metrics(tiny.run)
    done = tiny.train(tiny.run.parent)
    assert done.returncode == 0
    assert "has its 12 steps already; raise train.steps to continue" in done.stderr
    assert len(before) == 8
    assert contents(tiny.run) == before
    assert metrics(tiny.run) == lines


def test_changed_key_is_refused_by_name(tiny):
    before = contents(tiny.run)
    done = tiny.train(tiny.run.parent, "train.steps=15", "train.learning_rate=2e-2")
    assert done.returncode == 1
    assert "train.learning_rate: was 0.01, is 0.02; set back what changed" in done.stderr
    assert contents(tiny.run) == before


def planned(tiny, overrides, remaining=None):
    """The plan of epoch 0, or of what remained of it."""
    plans = prepare(load_recipe(tiny.recipe, overrides)).plans
    return EpochPlan(plans.lengths, plans.settings, 0, remaining)


def test_changed_batch_plans_the_rest_of_the_epoch_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.cache))
    old = ["graph.mode=pynative", "train.eval_every=null"]
    new = [*old, "batch.token_budget=128", "batch.micro_batches=2", "batch.max_segments=9", "shapes.kind=static"]
    before = planned(tiny, old)
    remaining = np.setdiff1d(np.arange(before.batches.order.size), before.trained_ids(2))
    rest = planned(tiny, new, remaining)
    assert rest.left_over.size > 0

    assert tiny.train(tmp_path, *old, "train.steps=2").returncode == 0
    done = tiny.train(tmp_path, *new, f"train.steps={2 + rest.num_steps}", "--json")
    assert done.returncode == 0, done.stderr
    assert (
        f"the rest of epoch 0 ({remaining.size} samples) is planned again: batch.max_segments: was 256, is 9; "
        'batch.token_budget: was 256, is 128; shapes.kind: was "range", is "static"'
    ) in " ".join(done.stderr.split())
    steps = [*(before.step_ids(step) for step in range(2)), *(rest.step_ids(step) for step in range(rest.num_steps))]
    assert [line["sample_ids_sha256"] for line in metrics(tmp_path / "varlen")] == [ids_hash(ids) for ids in steps]
    assert sorted(np.concatenate([*steps, rest.left_over])) == list(range(before.batches.order.size))
    ledgers = json.loads(done.stdout)["ledger"]
    samples = ledgers["samples"]
    assert (samples["trained"], samples["left_over"]) == (sum(map(len, steps)), rest.left_over.size)
    assert [(ledger["balanced"], ledger["pending"]) for ledger in ledgers.values()] == [(True, 0)] * 2

    done = tiny.train(tmp_path, *new, f"train.steps={3 + rest.num_steps}", "--json")
    assert (done.returncode, "planned again" in done.stderr) == (0, False), done.stderr
    assert [line["epoch"] for line in metrics(tmp_path / "varlen")] == [0] * len(steps) + [1]
    assert all(ledger["balanced"] for ledger in json.loads(done.stdout)["ledger"].values())


def test_checkpoint_of_another_mode_is_refused_and_never_begins_again(tiny):
    output = tiny.run.parent
    one_step = ("graph.mode=pynative", "train.steps=1")
    rows = ("mode=padded", "model.variable_seq_lengths=false", "batch.token_budget=null", "batch.rows=4")
    done = tiny.train(output, *one_step, *rows)
    assert (done.returncode, checkpoints(output / "padded")) == (0, [1]), done.stderr
    done = tiny.train(output, f"checkpoint.resume={output}/padded/step_00000001")
    assert done.returncode == 1
    assert "step_00000001 must be of mode varlen, which this recipe trains, got padded" in done.stderr
    done = tiny.train(output, f"checkpoint.resume={tiny.run}/step_00000012", *rows)
    assert done.returncode == 1
    assert "step_00000012 must be of mode padded, which this recipe trains, got varlen" in done.stderr
    assert not (output / "varlen-2").exists()
    done = tiny.train(output, *one_step, "checkpoint.resume=never")
    assert (done.returncode, checkpoints(output / "varlen-2")) == (0, [1]), done.stderr
    assert sorted(os.listdir(output)) == [".lock", "padded", "varlen", "varlen-2"]


def test_graph_and_pynative_agree(tiny, tmp_path):
    done = tiny.train(tmp_path, "graph.mode=pynative", "train.steps=10")
    assert done.returncode == 0, done.stderr
    pynative, graph = metrics(tmp_path / "varlen"), metrics(tiny.run)[:10]
    assert [line["sample_ids_sha256"] for line in pynative] == [line["sample_ids_sha256"] for line in graph]
    assert [line["graphs_compiled"] for line in pynative] == [{"train": 0, "apply": 0, "eval": 0}] * 10
    # fp32 rounding: the orders of sums differ, and ten steps add up to about a millionth.
    assert [line["loss"] for line in pynative] == pytest.approx([line["loss"] for line in graph], abs=1e-5, rel=0)
