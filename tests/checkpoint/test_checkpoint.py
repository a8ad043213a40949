import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ms_varlen.checkpoint import resume as same_recipe
from ms_varlen.checkpoint import run_folder as run_dir
from ms_varlen.checkpoint import store
from ms_varlen.checkpoint.config import CheckpointConfig
from ms_varlen.checkpoint.resume import changed_keys
from ms_varlen.checkpoint.run_folder import cut_metrics, open_run, run_folders
from ms_varlen.checkpoint.store import (
    CorruptCheckpointError,
    list_checkpoints,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from ms_varlen.errors import CheckpointError

SHAPES = {"model.embed_tokens.weight": (5, 3), "model.norm.weight": (3,), "lm_head.weight": (5, 3)}
MANIFEST = {"mode": "varlen", "layout": "varlen", "shapes": {"kind": "range", "sizes": (64, 128)}, "fingerprint": "f00"}
RECIPE = {
    "mode": "varlen",
    "batch": {"token_budget": 4096, "rows": None},
    "train": {"steps": 40, "learning_rate": 1e-3},
    "checkpoint": {"output_dir": "output", "every": 10},
}

# What a child process runs: the same arrays as `arrays(step)`, so that the parent can compare.
CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path({tests!r})))
    from tests.checkpoint.test_checkpoint import CheckpointConfig, RECIPE, open_run, save
    from tests.support.faults import kill_at, kill_now, kill_when
    folder = Path({folder!r})
    """
)


def arrays(step: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(step)
    model = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    optimizer: dict[str, np.ndarray] = {"applied_steps": np.array(step, np.int64)}
    for prefix in ("adam_m", "adam_v"):
        optimizer |= {f"{prefix}.{name}": rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    return model, optimizer


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, *arrays(step), {"plan": {"epoch": 0, "step": step}}, MANIFEST, keep)


def assert_loads_bit_equal(path: Path, step: int) -> None:
    loaded = load_checkpoint(path, "varlen", SHAPES)
    assert (loaded.step, loaded.state) == (step, {"plan": {"epoch": 0, "step": step}, "step": step})
    for found, expected in zip((loaded.model, loaded.optimizer), arrays(step), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name].tobytes() == value.tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_child(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = CHILD.format(tests=str(Path(__file__).parents[2]), folder=str(folder)) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def config(output_dir: Path, resume: str | Path = "auto") -> CheckpointConfig:
    return CheckpointConfig(output_dir=output_dir, resume=resume)


def recipe(**changes: object) -> dict:
    """RECIPE with section__key=value set."""
    new = {key: dict(value) if isinstance(value, dict) else value for key, value in RECIPE.items()}
    for key, value in changes.items():
        section, name = key.split("__")
        new[section][name] = value
    return new


def trained(output_dir: Path, steps: tuple[int, ...] = (10, 20), **changes: object) -> Path:
    """A run that saved at `steps` and wrote metrics beyond the last of them before it was killed."""
    with open_run(config(output_dir), "varlen", recipe(**changes)) as run:
        for step in steps:
            save(run.folder, step)
        lines = [json.dumps({"step": step}) + "\n" for step in range(1, steps[-1] + 4)]
        run.metrics_path.write_text("".join(lines) + '{"step": 2')
    return run.folder


def metrics_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# The store


def test_what_is_loaded_is_bit_equal_to_what_was_saved(tmp_path):
    path = save(tmp_path / "run", 100)
    assert path == tmp_path / "run" / "step_00000100"
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert_loads_bit_equal(path, 100)


def test_manifest_holds_what_was_given_and_the_parameter_table(tmp_path):
    manifest = load_checkpoint(save(tmp_path, 7), "varlen").manifest
    assert manifest["shapes"] == {"kind": "range", "sizes": [64, 128]}
    assert (manifest["format_version"], manifest["step"]) == (1, 7)
    table = manifest["parameters"]["model.safetensors"]
    assert [(row["name"], row["shape"], row["dtype"]) for row in table] == [
        ("lm_head.weight", [5, 3], "float32"),
        ("model.embed_tokens.weight", [5, 3], "float32"),
        ("model.norm.weight", [3], "float32"),
    ]


def test_all_files_follow_the_umask(tmp_path):
    path = save(tmp_path, 1)
    plain = tmp_path / "plain"
    plain.touch()
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {stat.S_IMODE(plain.stat().st_mode)}


def test_transposed_views_are_saved_by_value(tmp_path):
    model, optimizer = arrays(1)
    model["lm_head.weight"] = np.ascontiguousarray(model["lm_head.weight"].T).T
    save_checkpoint(tmp_path, 1, model, optimizer, {}, MANIFEST, 1)
    loaded = load_checkpoint(tmp_path / "step_00000001", "varlen").model["lm_head.weight"]
    np.testing.assert_array_equal(loaded, arrays(1)[0]["lm_head.weight"])


def test_newest_are_kept_in_order_of_step(tmp_path):
    for step in (1, 2, 10, 100_000_000, 200_000_000):
        save(tmp_path, step, keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000010", "step_100000000", "step_200000000"]
    assert list_checkpoints(tmp_path / "missing") == []


def test_a_step_is_saved_once(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step_00000003 exists already"):
        save(tmp_path, 3)
    assert_loads_bit_equal(tmp_path / "step_00000003", 3)


@pytest.mark.parametrize(
    ("file", "name", "value", "message"),
    [
        (0, "lm_head.weight", np.zeros((5, 3), np.float16), r"lm_head.weight must be float32 \[5, 3\] .* float16"),
        (1, "adam_m.lm_head.weight", np.zeros((3, 5), np.float32), r"adam_m.lm_head.weight must be .* \[3, 5\]"),
        (1, "adam_v.other", np.zeros(1, np.float32), "adam_v.other must be no such parameter"),
        (1, "applied_steps", np.zeros((), np.int32), r"applied_steps must be int64 \[\] .* int32 \[\]"),
    ],
)
def test_parameters_that_could_not_be_loaded_are_not_saved(tmp_path, file, name, value, message):
    given = arrays(1)
    given[file][name] = value
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 1, *given, {}, MANIFEST, 1)
    assert names(tmp_path) == []


def test_manifest_without_a_mode_is_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match="manifest must say the mode"):
        save_checkpoint(tmp_path, 1, *arrays(1), {}, {}, 1)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {**SHAPES, "lm_head.weight": (6, 3)},
            r"lm_head.weight must be float32 \[6, 3\] .* file holds float32 \[5, 3\]",
        ),
        ({**SHAPES, "bias": (1,)}, r"parameter bias must be float32 \[1\] .* file holds no such parameter \(1 of 4"),
        ({"lm_head.weight": (5, 3)}, "embed_tokens.weight must be no such parameter .* holds float32"),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(tmp_path, shapes, message):
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(save(tmp_path, 1), "varlen", shapes)


def test_checkpoint_of_another_mode_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"must be of mode padded, which this recipe trains, got varlen; .* `ckpt-tools convert --to padded",
    ):
        load_checkpoint(save(tmp_path, 1), "padded")


def test_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be a checkpoint's folder, named like step_00000100"):
        load_checkpoint(tmp_path, "varlen")
    with pytest.raises(CheckpointError, match="must be a checkpoint's folder, found none"):
        load_checkpoint(tmp_path / "step_00000001", "varlen")


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("fault", ["missing", "empty", "half", "flipped", "longer"])
def test_damaged_file_is_named(tmp_path, file, fault):
    path = save(tmp_path, 1) / file
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        damaged = {"empty": b"", "half": content[: len(content) // 2], "flipped": flipped, "longer": content + b" "}
        path.write_bytes(damaged[fault])
    if file == "manifest.json" and fault == "longer":
        assert_loads_bit_equal(path.parent, 1)  # white space behind JSON changes nothing
        return
    cut_short = "cut short(: parameter| or no safetensors file| or altered)"
    with pytest.raises(CorruptCheckpointError, match=rf"{file} is (missing|{cut_short}|altered)"):
        load_checkpoint(path.parent, "varlen")


def test_altered_parameter_is_named(tmp_path):
    path = save(tmp_path, 1) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][1] += 1
    save_file(tensors, path)
    with pytest.raises(CorruptCheckpointError, match=r"checksum of parameter model.norm.weight does not fit"):
        load_checkpoint(path.parent, "varlen")
    save_file({name: value for name, value in tensors.items() if "lm_head" not in name}, path)
    with pytest.raises(CorruptCheckpointError, match=r"parameter lm_head.weight is not as its manifest says"):
        load_checkpoint(path.parent, "varlen")


def test_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FORMAT_VERSION", 2)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format_version must be 1 for this ms_varlen, found 2"):
        load_checkpoint(path, "varlen")


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("target", "error"),
    [("save_file", SafetensorError("I/O error: No space left on device (os error 28)")), ("fsync", FULL)],
)
def test_full_disk_keeps_the_last_good_one(tmp_path, monkeypatch, target, error):
    save(tmp_path, 10)

    def full(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(store, target, full)
    with pytest.raises(
        CheckpointError,
        match=r"No space left.*needed 0.0 MB, free \d+\.\d MB in .*; the last good one is .*step_00000010",
    ):
        save(tmp_path, 20)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_00000010"]
    save(tmp_path, 20)
    assert_loads_bit_equal(tmp_path / "step_00000020", 20)


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(0, 4), max_size=3), step=st.integers(0, 10**9))
def test_any_shape_comes_back(tmp_path_factory, shape, step):
    value = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    optimizer = {"adam_m.w": -value, "adam_v.w": value.copy(), "applied_steps": np.array(step)}
    path = save_checkpoint(tmp_path_factory.mktemp("any"), step, {"w": value}, optimizer, {}, MANIFEST, 1)
    loaded = load_checkpoint(path, "varlen", {"w": tuple(shape)})
    np.testing.assert_array_equal(loaded.model["w"], value, strict=True)
    np.testing.assert_array_equal(loaded.optimizer["adam_m.w"], -value, strict=True)


# Kills


@pytest.mark.parametrize(
    ("fault", "last_good", "left"),
    [
        ('kill_at("half_file", 30)', 20, [".tmp-step_00000030", "step_00000010", "step_00000020"]),
        ('kill_at("before_rename", 30)', 20, [".tmp-step_00000030", "step_00000010", "step_00000020"]),
        ('kill_at("after_rename", 30)', 30, ["step_00000010", "step_00000020", "step_00000030"]),
        ('kill_when("shutil:rmtree", call=2)', 30, [".tmp-old-step_00000010", "step_00000020", "step_00000030"]),
        ('kill_when("os:fsync", call=2, before=False)', 20, [".tmp-step_00000030", "step_00000010", "step_00000020"]),
    ],
    ids=["half_file", "before_rename", "after_rename", "while_pruning", "while_syncing"],
)  # fmt: skip
def test_kill_leaves_the_last_good_checkpoint_and_the_next_save_works(tmp_path, fault, last_good, left):
    save(tmp_path, 10)
    save(tmp_path, 20)
    child = run_child(tmp_path, f"with {fault}:\n    save(folder, 30)\nprint('survived')")
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, ""), child.stderr
    assert names(tmp_path) == left
    newest = list_checkpoints(tmp_path)[-1]
    assert newest.name == f"step_{last_good:08d}"
    assert_loads_bit_equal(newest, last_good)
    save(tmp_path, 40)
    assert names(tmp_path) == [newest.name, "step_00000040"]
    assert_loads_bit_equal(tmp_path / "step_00000040", 40)


def test_half_file_is_half_of_the_model_file(tmp_path):
    whole = (save(tmp_path / "whole", 30) / "model.safetensors").stat().st_size
    child = run_child(tmp_path, "with kill_at('half_file', 30):\n    save(folder, 30)")
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert (tmp_path / ".tmp-step_00000030" / "model.safetensors").stat().st_size == whole // 2


def test_kill_strikes_at_its_step_only(tmp_path):
    child = run_child(
        tmp_path,
        """
        with kill_at("half_file", 99), kill_at("before_rename", 99), kill_at("after_rename", 99):
            save(folder, 10)
        with kill_when("tests.checkpoint.test_checkpoint:save", call=2):
            from tests.checkpoint import test_checkpoint
            test_checkpoint.save(folder, 20)
            test_checkpoint.save(folder, 30)
        """,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000010", "step_00000020"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".tmp-step_00000001").mkdir()
    (tmp_path / ".tmp-metrics.jsonl").touch()
    (tmp_path / "notes").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["notes"]


# Run folders


def test_first_run_begins_at_step_0_with_its_recipe(tmp_path):
    with open_run(config(tmp_path / "out"), "varlen", RECIPE) as run:
        assert (run.folder, run.checkpoint) == (tmp_path / "out" / "varlen", None)
        assert yaml.safe_load((run.folder / "recipe.yaml").read_text()) == RECIPE


def test_auto_resumes_an_unfinished_run(tmp_path):
    folder = trained(tmp_path)
    with open_run(config(tmp_path), "varlen", RECIPE, SHAPES) as run:
        assert (run.folder, run.checkpoint.step) == (folder, 20)
        assert metrics_steps(run.folder) == list(range(1, 21))


def test_auto_gives_a_finished_run_more_steps(tmp_path):
    folder = trained(tmp_path, (10, 40))
    more = recipe(train__steps=80, checkpoint__every=5, checkpoint__output_dir="moved")
    with open_run(config(tmp_path), "varlen", more) as run:
        assert run.checkpoint.step == 40
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == more
    with pytest.raises(CheckpointError, match=r"train.steps must be >= 40, the step of .*step_00000040, got 30"):
        open_run(config(tmp_path), "varlen", recipe(train__steps=30))


def test_changed_keys_are_refused_by_name_and_nothing_is_touched(tmp_path):
    folder = trained(tmp_path)
    before = (folder / "metrics.jsonl").read_bytes()
    new = recipe(batch__token_budget=2048, train__learning_rate=2e-3, train__clip=1.0)
    with pytest.raises(
        CheckpointError,
        match=r"but train.clip: was not set, is 1.0; train.learning_rate: was 0.001, is 0.002; .*resume=never",
    ):
        open_run(config(tmp_path), "varlen", new)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE


def test_changed_keys_skips_what_may_change():
    old = {"train": {"steps": 1, "eval_every": None}, "graph": {"max_graphs": 1}, "device": {"max_memory": None}}
    new = {"train": {"steps": 2, "eval_every": 5}, "graph": {"max_graphs": 2}, "device": {"max_memory": "4GB"}}
    assert changed_keys(old, new) == ([], [])


def test_changed_keys_tells_what_is_refused_from_what_is_planned_again():
    old = {"mode": "padded", "batch": {"rows": 4}, "shapes": {"kind": "range"}, "train": {"seed": 0}}
    new = {"mode": "varlen", "batch": {"rows": None}, "shapes": {"kind": "static"}, "train": {"seed": 1}}
    assert changed_keys(old, new) == (
        ["train.seed: was 0, is 1"],
        ["batch.rows: was 4, is null", 'mode: was "padded", is "varlen"', 'shapes.kind: was "range", is "static"'],
    )


def test_changed_batch_is_reported_and_the_run_continues(tmp_path):
    folder = trained(tmp_path)
    with open_run(config(tmp_path), "varlen", recipe(batch__token_budget=2048)) as run:
        assert (run.folder, run.replanned) == (folder, ["batch.token_budget: was 4096, is 2048"])
    with open_run(config(tmp_path), "varlen", recipe(batch__token_budget=2048)) as run:
        assert run.replanned == []


def test_run_killed_before_its_first_save_restarts_at_step_0(tmp_path):
    with open_run(config(tmp_path), "varlen", RECIPE) as run:
        run.metrics_path.write_text('{"step": 1}\n')
    new = recipe(batch__token_budget=64)
    with open_run(config(tmp_path), "varlen", new) as run:
        assert (run.folder.name, run.checkpoint, run.metrics_path.exists()) == ("varlen", None, False)
        assert yaml.safe_load((run.folder / "recipe.yaml").read_text()) == new


def test_never_begins_in_a_numbered_folder_and_auto_resumes_there(tmp_path):
    trained(tmp_path)
    for name in ("varlen-2", "varlen-3"):
        with open_run(config(tmp_path, "never"), "varlen", RECIPE) as run:
            assert (run.folder.name, run.checkpoint) == (name, None)
    save(run.folder, 10)
    with open_run(config(tmp_path), "varlen", RECIPE) as run:
        assert (run.folder.name, run.checkpoint.step) == ("varlen-3", 10)
    assert [path.name for path in run_folders(tmp_path, "varlen")] == ["varlen", "varlen-2", "varlen-3"]
    assert_loads_bit_equal(tmp_path / "varlen" / "step_00000020", 20)


def test_link_of_any_name_is_the_checkpoint_that_it_means(tmp_path):
    folder = trained(tmp_path / "out")
    (tmp_path / "best").symlink_to(folder / "step_00000010")
    (tmp_path / "newest").symlink_to(folder / "step_00000020")
    (tmp_path / "run").symlink_to(folder)
    assert load_checkpoint(tmp_path / "best", "varlen").step == 10
    for newest in (tmp_path / "newest", tmp_path / "run" / "step_00000020"):
        with open_run(config(tmp_path / "out", newest), "varlen", RECIPE) as run:
            assert (run.folder, run.checkpoint.step) == (folder, 20)
    with open_run(config(tmp_path / "out", tmp_path / "best"), "varlen", RECIPE) as run:
        assert (run.folder, run.checkpoint.step) == (tmp_path / "out" / "varlen-2", 10)
        assert names(run.folder)[-1] == "step_00000010"


def test_modes_have_runs_of_their_own(tmp_path):
    trained(tmp_path)
    with open_run(config(tmp_path), "padded", RECIPE) as run:
        assert (run.folder.name, run.checkpoint) == ("padded", None)


def test_corrupt_newest_is_an_error_that_names_the_older_one(tmp_path):
    folder = trained(tmp_path)
    file = folder / "step_00000020" / "model.safetensors"
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=r"step_00000020/model.safetensors is .*resume=.*step_00000010"):
        open_run(config(tmp_path), "varlen", RECIPE)
    with open_run(config(tmp_path, folder / "step_00000010"), "varlen", RECIPE) as run:
        assert (run.folder.name, run.checkpoint.step) == ("varlen-2", 10)
        assert metrics_steps(run.folder) == list(range(1, 11))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 24
    with open_run(config(tmp_path), "varlen", RECIPE) as run:
        assert (run.folder.name, run.checkpoint.step) == ("varlen-2", 10)
        assert_loads_bit_equal(run.folder / "step_00000010", 10)


def test_corrupt_only_one_says_to_begin_again(tmp_path):
    (trained(tmp_path, (10,)) / "step_00000010" / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"state.json is missing; start from scratch with checkpoint.resume=never"
    ):
        open_run(config(tmp_path), "varlen", RECIPE)


def test_named_newest_checkpoint_resumes_in_its_own_folder(tmp_path):
    folder = trained(tmp_path)
    with open_run(config(tmp_path, folder / "step_00000020"), "varlen", RECIPE) as run:
        assert (run.folder, run.checkpoint.step) == (folder, 20)


def test_named_checkpoint_of_elsewhere_resumes_here_and_stays_there(tmp_path):
    folder = trained(tmp_path / "theirs")
    before = names(folder)
    with open_run(config(tmp_path / "ours", folder / "step_00000020"), "varlen", RECIPE) as run:
        assert (run.folder, run.checkpoint.step) == (tmp_path / "ours" / "varlen", 20)
        save(run.folder, 30, keep=1)
    assert names(folder) == before
    assert_loads_bit_equal(folder / "step_00000020", 20)


def test_named_checkpoint_is_copied_where_links_are_refused(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder = trained(tmp_path / "theirs")
    monkeypatch.setattr(os, "link", no_link)
    with open_run(config(tmp_path / "ours", folder / "step_00000020"), "varlen", RECIPE) as run:
        assert_loads_bit_equal(run.folder / "step_00000020", 20)


def test_named_checkpoint_of_another_mode_or_recipe_is_refused(tmp_path):
    folder = trained(tmp_path)
    named = config(tmp_path, folder / "step_00000010")
    with pytest.raises(
        CheckpointError,
        match=r"must be of mode padded, which this recipe trains, got varlen; .*ckpt-tools convert --to padded",
    ):
        open_run(named, "padded", RECIPE)
    with pytest.raises(CheckpointError, match=r"train.learning_rate: was 0.001, is 0.1"):
        open_run(named, "varlen", recipe(train__learning_rate=0.1))
    (folder / "recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"recipe.yaml must be next to the checkpoints, found none"):
        open_run(named, "varlen", RECIPE)


def test_second_process_is_refused_with_the_pid_and_a_kill_frees_the_folder(tmp_path):
    body = """
        run = open_run(CheckpointConfig(output_dir=folder), "varlen", RECIPE)
        print("open", flush=True)
        sys.stdin.read()
    """
    code = CHILD.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path)) + textwrap.dedent(body)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(CheckpointError, match=f"varlen must be written by one process .* pid {child.pid} holds it"):
            open_run(config(tmp_path), "varlen", RECIPE)
        with open_run(config(tmp_path, "never"), "varlen", RECIPE) as run:
            assert run.folder.name == "varlen-2"
        child.kill()
        child.wait()
    run.folder.rename(tmp_path / "away")
    with open_run(config(tmp_path), "varlen", RECIPE) as run:
        assert run.folder.name == "varlen"


def test_refused_opening_releases_the_lock(tmp_path):
    trained(tmp_path)
    with pytest.raises(CheckpointError, match="learning_rate"):
        open_run(config(tmp_path), "varlen", recipe(train__learning_rate=1.0))
    open_run(config(tmp_path), "varlen", RECIPE).close()


def test_kill_while_a_run_begins_leaves_no_run(tmp_path):
    theirs = trained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    child = run_child(
        ours,
        f"""
        with kill_when("os:rename", only=lambda source, target: target.name == "varlen"):
            open_run(CheckpointConfig(output_dir=folder, resume={str(theirs / "step_00000020")!r}), "varlen", RECIPE)
        """,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert run_folders(ours, "varlen") == []
    with open_run(config(ours, theirs / "step_00000020"), "varlen", RECIPE) as run:
        assert run.checkpoint.step == 20
    assert names(ours) == [".lock", "varlen"]


# Metrics


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', b'{"step": 1}\n{"step": 2}\n'),
        (b'{"step": 1}\n{"step": 2}', b'{"step": 1}\n{"step": 2}\n'),
        (b'{"step": 1}\n{"ste', b'{"step": 1}\n'),
        (b'{"step": 1}\n{"word": "\xc3', b'{"step": 1}\n'),
        (b'{"step": 1}\n\x00\x00\x00', b'{"step": 1}\n'),
        (b"", b""),
    ],
)
def test_metrics_are_cut_back_to_the_step(tmp_path, content, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    cut_metrics(path, 2)
    assert path.read_bytes() == kept
    assert names(tmp_path) == ["metrics.jsonl"]


def test_bad_metrics_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match="line 2 must be an object with a step, found b'oops"):
        cut_metrics(path, 2)
    assert path.read_bytes() == b'{"step": 1}\noops\n{"step": 2}\n'


def test_missing_metrics_stay_missing(tmp_path):
    cut_metrics(tmp_path / "metrics.jsonl", 5)
    assert names(tmp_path) == []


# The recipe section


def test_config_reads_what_a_recipe_says():
    assert CheckpointConfig(output_dir="out").model_dump(mode="json") == {
        "output_dir": "out",
        "every": None,
        "keep": 2,
        "on_save_error": "stop",
        "resume": "auto",
    }
    assert CheckpointConfig(output_dir="out", resume="never").resume == "never"
    assert CheckpointConfig(output_dir="out", resume="out/varlen/step_00000010").resume == Path(
        "out/varlen/step_00000010"
    )


@pytest.mark.parametrize("section", [{}, {"output_dir": "o", "keep": 0}, {"output_dir": "o", "evry": 1}])
def test_config_refuses_what_cannot_be(section):
    with pytest.raises(ValidationError, match=r"output_dir|keep|evry"):
        CheckpointConfig(**section)


@pytest.mark.parametrize("content", [b"", b"nonsense: [", b"\xff\xfe\x00"])
def test_damaged_recipe_next_to_the_checkpoints_is_named(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"recipe.yaml must hold the run's recipe, found .* checkpoint.resume=never"
    ):
        same_recipe._check_recipe(path, {})


def test_output_dir_that_cannot_be_made_is_named():
    with pytest.raises(
        CheckpointError, match=r"checkpoint.output_dir must be a folder that can be made, got /proc/nope"
    ):
        run_dir.make_output_dir(Path("/proc/nope"))
