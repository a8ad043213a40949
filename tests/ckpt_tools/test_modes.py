import json

import numpy as np
import pytest
import yaml

from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.train.loop import ids_hash, resumed_state
from ms_varlen.workload.workload import prepare
from tests.support import cli_run
from tests.support.ckpt_made import contents, run, tensors
from tests.support.cli_run import metrics

pytestmark = pytest.mark.graph

STEPS = 4
"""Steps in each of three stretches of one epoch."""

PADDED = ("mode=padded", "model.variable_seq_lengths=false", "batch.token_budget=null", "batch.rows=3",
          "batch.micro_batches=1", "train.eval_every=null", "checkpoint.every=3")  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cli_run.first_run(tmp_path_factory.getbasetemp())


def trained(tiny, recipe, folder, steps, *overrides):
    """Train a recipe up to a step; the run's folder."""
    done = tiny.program("train", str(recipe), f"checkpoint.output_dir={folder}", f"train.steps={steps}", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / load_recipe(recipe, overrides).mode


def steps_of(run_folder, first, start, monkeypatch, cache):
    """Sample ids of each step of a run from `first` on, by the plan alone; `start` is the place that it began at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    workload = prepare(load_recipe(run_folder / "recipe.yaml"))
    place = workload.plans.start() if start is None else resumed_state(workload.plans, start, [])
    hashes = [line["sample_ids_sha256"] for line in metrics(run_folder) if line["step"] > first]
    for hashed, (state, plan) in zip(hashes, workload.plan_steps(place, len(hashes)), strict=True):
        ids = plan.step_ids(state.step)
        assert (ids_hash(ids), state.epoch) == (hashed, 0)
        yield ids


def test_one_epoch_over_two_conversions_trains_each_sample_once(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.cache))
    first = trained(tiny, tiny.recipe, tmp_path / "a", STEPS, *PADDED)
    ids, place = list(steps_of(first, 0, None, monkeypatch, tiny.cache)), None
    before = contents(first)

    # Another mode is refused, with the command that converts.
    step = first / f"step_{STEPS:08d}"
    done = tiny.train(tmp_path / "x", f"checkpoint.resume={step}", f"train.steps={2 * STEPS}")
    assert done.returncode == 1
    assert f"convert it with `ckpt-tools convert --to varlen {step} NEW_FOLDER`" in done.stderr

    runs = [first]
    for number, mode in enumerate(("varlen", "padded"), start=1):
        source, converted = runs[-1], tmp_path / f"converted{number}"
        status, said, error = run(capsys, "convert", "--to", mode, source, converted, "--json")
        assert status == 0, error
        assert said["train_with"].startswith(
            f"ms-varlen train {converted}/recipe.yaml checkpoint.resume={converted}/step_"
        )
        step = f"step_{number * STEPS:08d}"
        assert tensors(converted / step) == tensors(source / step)
        status, said, error = run(capsys, "verify", source, converted, "--json")
        assert (status, said["differences"], said["optimizer_compared"]) == (0, [], True), error
        manifest = json.loads((converted / step / "manifest.json").read_text())
        assert (manifest["mode"], manifest["converted_from"]["mode"]) == (
            mode,
            "padded" if mode == "varlen" else "varlen",
        )
        place = json.loads((converted / step / "state.json").read_text())["plan"]
        resume = f"checkpoint.resume={converted / step}"
        runs.append(trained(tiny, converted / "recipe.yaml", tmp_path / f"b{number}", (number + 1) * STEPS, resume))
        ids += steps_of(runs[-1], number * STEPS, place, monkeypatch, tiny.cache)
        assert [line["step"] for line in metrics(runs[-1])] == list(range(1, (number + 1) * STEPS + 1))
    assert contents(first) == before
    every = np.concatenate(ids)
    assert np.unique(every).size == every.size
    state = json.loads((runs[-1] / f"step_{3 * STEPS:08d}" / "state.json").read_text())
    samples = state["ledger"]["samples"]
    assert (samples["trained"], samples["pending"] + samples["left_over"]) == (
        every.size,
        samples_left(runs[-1], every),
    )


def test_loss_is_the_same_in_both_layouts_and_alignment_resumes_from_a_checkpoint(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.cache))
    converted = tmp_path / "padded"
    assert run(capsys, "convert", "--to", "padded", tiny.run / "step_00000009", converted)[0] == 0
    recipe = yaml.safe_load((tiny.run / "recipe.yaml").read_text())
    recipe["graph"]["mode"] = "pynative"
    (tmp_path / "varlen.yaml").write_text(yaml.safe_dump(recipe))
    step = tiny.run / "step_00000009"
    status, said, error = run(capsys, "verify", step, converted, "--recipe", tmp_path / "varlen.yaml", "--json")
    assert (status, said["mode_a"], said["mode_b"], len(said["loss_a"])) == (0, "varlen", "padded", 4), error
    assert said["loss_max_abs_diff"] <= 2e-5
    assert np.ptp(said["loss_a"]) > 0.01

    # A checkpoint of other weights differs in parameters and in loss.
    status, said, _ = run(
        capsys, "verify", tiny.run / "step_00000012", converted, "--recipe", tmp_path / "varlen.yaml", "--json"
    )
    assert (status, said["equal"], len(said["differences"])) == (1, False, said["tensors"])
    assert said["loss_max_abs_diff"] > 1e-3

    arguments = ("align", str(tmp_path / "varlen.yaml"), "--steps", "3", "--json", f"checkpoint.output_dir={tmp_path}")
    done = tiny.program(*arguments, "--from", str(converted / "step_00000009"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["first_step"], found["max_abs_diff"] <= 2e-5) == (9, True)
    # Its steps are those of the run that the checkpoint is from.
    lines = {line["step"]: line for line in metrics(tiny.run)}
    expected = [lines[number] for number in (10, 11, 12)]
    assert found["loss"] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
    assert found["sample_ids_sha256"] == [line["sample_ids_sha256"] for line in expected]


def samples_left(run_folder, trained_ids):
    return len(prepare(load_recipe(run_folder / "recipe.yaml")).store.train) - trained_ids.size
