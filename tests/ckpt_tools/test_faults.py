import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools import new_folder
from ckpt_tools.convert import convert
from ckpt_tools.new_folder import new_folder as make_folder
from ms_varlen.checkpoint import store
from ms_varlen.checkpoint import tensors as tensors_module
from ms_varlen.checkpoint.run_folder import open_run
from ms_varlen.checkpoint.store import read_manifest, sealed_manifest
from ms_varlen.errors import CheckpointError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import load_recipe
from tests.support.ckpt_made import contents, numbers, run, saved_step, tensors

PARAMETER = "model.layers.1.mlp.up_proj.weight"

RECIPE = """
mode: {mode}
data: {{source: pydoc, tokenizer: bytes}}
batch: {batch}
shapes: {{kind: range, divisor: 16}}
model:
  config: {{architecture: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
            intermediate_size: 24, vocab_size: 34}}
  variable_seq_lengths: {variable}
  seq_length: 64
  max_position_embeddings: 64
train: {{steps: 90, learning_rate: 1e-2}}
checkpoint: {{output_dir: {folder}, every: 10}}
"""


@pytest.fixture
def padded(tmp_path):
    """A padded run of 30 steps; its checkpoint."""
    step = saved_step(tmp_path / "run")
    recipe = RECIPE.format(mode="padded", batch="{rows: 4}", variable="false", folder=tmp_path)
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    lines = [{"step": n, "tokens_real": 40, "segments": 4} for n in range(1, 34)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return step


def cut(step, file, keep=0.6):
    path = step / file
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def flip(step, file, name=None):
    """Flip a bit in the middle of a file, or of a tensor."""
    data = bytearray((step / file).read_bytes())
    place = len(data) // 2
    if name is not None:
        size = int.from_bytes(data[:8], "little")
        place = 8 + size + json.loads(data[8 : 8 + size])[name]["data_offsets"][0]
    data[place] ^= 16
    (step / file).write_bytes(data)


def change(step, file, edit):
    """Write a tensor file anew after `edit` of its arrays, the manifest as it was."""
    arrays = numbers(step / file)
    edit(arrays)
    save_file(arrays, step / file)


def change_both(step, edit):
    """The same with a manifest that agrees, as another program might have written it."""
    change(step, "model.safetensors", edit)
    manifest = read_manifest(step)
    arrays = numbers(step / "model.safetensors")
    rows = [
        {"name": n, "shape": v.shape, "dtype": v.dtype.name, "sha256": store._sha256(v)}
        for n, v in sorted(arrays.items())
    ]
    parameters = {**manifest.pop("parameters"), "model.safetensors": rows}
    state = (step / "state.json").read_bytes()
    (step / "manifest.json").write_bytes(sealed_manifest(manifest, 30, parameters, state))


def other_version(step):
    manifest = json.loads((step / "manifest.json").read_bytes())
    manifest.pop("manifest_sha256")
    manifest["format_version"] = 7
    seal = store._sha256(store._json_bytes(manifest))
    (step / "manifest.json").write_bytes(store._json_bytes({**manifest, "manifest_sha256": seal}))


def without(arrays):
    del arrays[PARAMETER]


def extra(arrays):
    arrays["model.layers.1.mlp.extra.weight"] = np.zeros(3, np.float32)


def reshaped(arrays):
    arrays[PARAMETER] = arrays[PARAMETER][:-1].copy()


def halved(arrays):
    arrays[PARAMETER] = arrays[PARAMETER].astype(np.float16)


def integers(arrays):
    arrays[PARAMETER] = arrays[PARAMETER].astype(np.int32)


FAULTS = {
    "truncated model file": (lambda s: cut(s, "model.safetensors"), r"model.safetensors is cut short: parameter model"),
    "truncated header": (lambda s: cut(s, "model.safetensors", 0.01), "its header is not whole"),
    "truncated optimizer file": (lambda s: cut(s, "optimizer.safetensors"), "cut short: parameter adam_"),
    "flipped byte in a weight": (
        lambda s: flip(s, "model.safetensors", PARAMETER),
        f"the source .*model.safetensors is altered: the checksum of parameter {PARAMETER} does not fit",
    ),
    "flipped byte in a moment": (
        lambda s: flip(s, "optimizer.safetensors", f"adam_v.{PARAMETER}"),
        f"optimizer.safetensors is altered: the checksum of parameter adam_v.{PARAMETER} does not fit",
    ),
    "flipped byte in the manifest": (lambda s: flip(s, "manifest.json"), "manifest.json is (cut short or )?altered"),
    "flipped byte in the state": (lambda s: flip(s, "state.json"), "state.json is altered"),
    "missing parameter": (
        lambda s: change(s, "model.safetensors", without),
        f"model.safetensors: parameter {PARAMETER} is missing, its manifest has it",
    ),
    "extra parameter": (
        lambda s: change(s, "model.safetensors", extra),
        r"parameter model.layers.1.mlp.extra.weight \(F32 \[3\]\) is one too many, its manifest has none",
    ),
    "wrong shape": (
        lambda s: change(s, "model.safetensors", reshaped),
        rf"parameter {PARAMETER} must be float32 \[24, 16\] as its manifest says, found float32 \[23, 16\]",
    ),
    "wrong dtype": (
        lambda s: change(s, "model.safetensors", halved),
        rf"parameter {PARAMETER} must be float32 \[24, 16\] as its manifest says, found float16 \[24, 16\]",
    ),
    "parameter that the model misses": (
        lambda s: change_both(s, without),
        rf"parameter {PARAMETER} is missing, this model has it with shape \[24, 16\]",
    ),
    "parameter that the model has not": (
        lambda s: change_both(s, extra),
        "extra.weight .* is one too many, this model",
    ),
    "shape that is not the model's": (
        lambda s: change_both(s, reshaped),
        rf"parameter {PARAMETER} must have shape \[24, 16\] for this model, found F32 \[23, 16\]",
    ),
    "integers for weights": (lambda s: change_both(s, integers), rf"{PARAMETER} must be one of F64, .*, found I32"),
    "foreign manifest version": (other_version, "format_version must be 1 for this ms_varlen, found 7"),
    "missing file": (lambda s: (s / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_source_is_named_and_nothing_is_written(padded, tmp_path, capsys, fault):
    damage, message = FAULTS[fault]
    damage(padded)
    before = contents(tmp_path)
    recipe = tmp_path / "varlen.yaml"
    recipe.write_text(RECIPE.format(mode="varlen", batch="{token_budget: 64}", variable="true", folder=tmp_path))
    before[recipe] = (recipe.read_bytes(), recipe.stat().st_mtime_ns)
    for command in (
        ["convert", "--to", "varlen", padded, tmp_path / "new", "--recipe", recipe],
        ["export-hf", padded, tmp_path / "new"],
    ):
        if command[0] == "export-hf" and "moment" in fault:
            continue  # it reads no moments
        status, _, error = run(capsys, *command)
        assert status == 1
        with pytest.raises(ValueError, match=message):
            raise ValueError(error)
        assert "Traceback" not in error
        assert contents(tmp_path) == before
    status, said, _ = run(capsys, "inspect", padded, "--json")
    assert (status, said["complete"]) == (1, False)
    with pytest.raises(ValueError, match=message):
        raise ValueError(" ".join(said["faults"]))


def test_place_for_the_destination_is_checked(padded, tmp_path, capsys):
    def error(*arguments):
        status, _, said = run(capsys, "convert", "--to", "varlen", padded, *arguments)
        assert status == 1
        return said

    (tmp_path / "there").mkdir()
    assert "there exists already; nothing is overwritten" in error(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link exists already" in error(tmp_path / "link")
    assert f"must not lie in the source {tmp_path / 'run'}" in error(tmp_path / "run" / "new")
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    assert "must not lie in the source" in error(tmp_path / "alias" / "new")
    assert "parameter" not in error(tmp_path / "there")


def test_room_is_looked_for_first(padded, tmp_path, capsys, monkeypatch):
    before = contents(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda _: usage._replace(free=40_000))
    status, _, error = run(capsys, "convert", "--to", "varlen", padded, tmp_path / "new")
    assert status == 1
    assert "new needs 1.1 MB, free are 0.0 MB" in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", [1, 3, 6])
def test_disk_that_fills_up_leaves_nothing(padded, tmp_path, capsys, monkeypatch, number):
    before, calls = contents(tmp_path), []
    original = tensors_module.os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    status, _, error = run(capsys, "convert", "--to", "varlen", padded, tmp_path / "new")
    assert status == 1
    assert "new could not be written (No space left on device): needed 0.1 MB, free" in error
    assert "nothing was left there and the source is as it was; make room or choose another disk" in error
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".ckpt-tools*"))


def test_small_disk_is_full_before_and_while_writing(padded, tmp_path, capsys, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        before = contents(tmp_path)
        command = ["convert", "--to", "varlen", padded, disk / "new"]
        status, _, error = run(capsys, *command)
        assert status == 1
        assert "needs 1.1 MB, free are 0.1 MB" in error
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda _: usage)
        status, _, error = run(capsys, *command)
        assert status == 1
        assert "could not be written (No space left on device)" in error
        assert contents(tmp_path) == before
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_kill_at_any_moment_leaves_no_half_destination(padded, tmp_path, monkeypatch):
    before = contents(tmp_path / "run")
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 256)  # so that there are many moments
    new = tmp_path / "new"
    begin = time.perf_counter()
    convert(padded, tmp_path / "whole", Mode.VARLEN, None, lambda *_: None)
    seconds = time.perf_counter() - begin
    whole = tensors(tmp_path / "whole")
    rng, killed = random.Random(5), 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            convert(padded, new, Mode.VARLEN, None, lambda *_: None)
            os._exit(0)
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert contents(tmp_path / "run") == before
        if new.exists():
            assert tensors(new) == whole
            shutil.rmtree(new)
    assert killed > 2
    convert(padded, new, Mode.VARLEN, None, lambda *_: None)
    assert tensors(new) == whole
    assert not list(tmp_path.glob(".ckpt-tools*"))


def test_two_writers_of_one_destination_do_not_meet(padded, tmp_path):
    with (
        make_folder(tmp_path / "new", padded, 0),
        pytest.raises(CheckpointError, match="new is being written by another process"),
        make_folder(tmp_path / "new", padded, 0),
    ):
        raise AssertionError("not reached")


def test_leftovers_of_killed_commands_are_removed_and_others_work_stays(padded, tmp_path, capsys):
    leftover = tmp_path / ".ckpt-tools-killed"
    (leftover / "step_00000030").mkdir(parents=True)
    (leftover / "step_00000030" / "model.safetensors").write_bytes(b"half")
    with make_folder(tmp_path / "busy", padded, 0) as hidden:
        (hidden / "written").touch()
        assert run(capsys, "convert", "--to", "varlen", padded, tmp_path / "new")[0] == 0
        assert not leftover.exists()
        assert (hidden / "written").exists()
    assert (tmp_path / "busy" / "written").exists()


@pytest.mark.parametrize("line", ['{"step": 1}', '{"step": 1, "tokens_real": "40", "segments": 4}', "[1]"])
def test_metrics_line_without_lengths_is_named(padded, tmp_path, capsys, line):
    metrics = padded.parent / "metrics.jsonl"
    metrics.write_text(line + "\n" + metrics.read_text())
    status, _, error = run(capsys, "convert", "--to", "varlen", padded, tmp_path / "new")
    assert status == 1
    assert "metrics.jsonl line 1 must have the numbers tokens_real and segments, found" in error
    assert "give a recipe of the new mode with --recipe" in error


def test_garbled_metrics_line_is_named_in_the_source(padded, tmp_path, capsys):
    metrics = padded.parent / "metrics.jsonl"
    first = metrics.read_text().splitlines(keepends=True)[0]
    metrics.write_text(first + "oops\n" + metrics.read_text())
    status, _, error = run(capsys, "convert", "--to", "varlen", padded, tmp_path / "new")
    assert status == 1
    assert f"{metrics} line 2 must be an object with a step, found b'oops" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["varlen", "varlen-3", "converted"])
def test_training_continues_in_the_new_folder_or_next_to_it(padded, tmp_path, capsys, name):
    new = tmp_path / "elsewhere" / name
    status, said, error = run(capsys, "convert", "--to", "varlen", padded, new, "--json")
    assert status == 0, error
    recipe = load_recipe(new / "recipe.yaml", [f"checkpoint.resume={new / 'step_00000030'}"])
    assert recipe.checkpoint.output_dir == tmp_path / "elsewhere"
    with open_run(recipe.checkpoint, recipe.mode, recipe.resolved()) as opened:
        assert str(opened.folder) == said["goes_on_in"]
    assert said["goes_on_in"] == str(new if name != "converted" else tmp_path / "elsewhere" / "varlen")


@pytest.mark.parametrize(
    "damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-5]), lambda p: p.write_text("{}")]
)
def test_damaged_manifest_says_what_to_do(padded, tmp_path, capsys, damage):
    older = shutil.copytree(padded, padded.parent / "step_00000020")
    damage(padded / "manifest.json")
    status, said, _ = run(capsys, "inspect", padded, "--json")
    assert status == 1
    assert said["faults"][0].endswith(f"; take another copy of the checkpoint, or use the one before it, {older}")


def test_interrupt_leaves_nothing(padded, tmp_path):
    before = contents(tmp_path)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(padded, tmp_path / "new", Mode.VARLEN, None, interrupt)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size: 16": "hidden_size: 32"}, "model.config.hidden_size must be 16 as in .*, the recipe has 32"),
        ({"num_hidden_layers: 2": "num_hidden_layers: 3"}, "model.config.num_hidden_layers must be 2"),
        ({"mode: varlen": "mode: packed"}, "mode must be varlen as --to says, found packed"),
    ],
)
def test_recipe_of_another_model_or_mode_is_refused(padded, tmp_path, capsys, changes, message):
    text = RECIPE.format(mode="varlen", batch="{token_budget: 64}", variable="true", folder=tmp_path)
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "other.yaml").write_text(text)
    command = ["convert", "--to", "varlen", padded, tmp_path / "new", "--recipe", tmp_path / "other.yaml"]
    status, _, error = run(capsys, *command)
    assert status == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_another_context_is_no_other_model(padded, tmp_path, capsys):
    text = RECIPE.format(mode="varlen", batch="{token_budget: 4096}", variable="true", folder=tmp_path)
    (tmp_path / "long.yaml").write_text(text.replace(": 64\n", ": 4096\n"))
    command = ["convert", "--to", "varlen", padded, tmp_path / "new", "--recipe", tmp_path / "long.yaml"]
    status, _, error = run(capsys, *command)
    assert status == 0, error
    assert tensors(tmp_path / "new") == tensors(padded)


def test_path_that_is_nothing_says_what_was_looked_for(tmp_path, capsys):
    for path, what in ((tmp_path / "none", "a file or folder that is there"), (tmp_path, "a checkpoint")):
        status, _, error = run(capsys, "inspect", path)
        assert status == 1
        assert f"{path} must be {what}: a step or run folder of ms_varlen, a Hugging Face folder" in error
