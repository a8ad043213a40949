import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ckpt_tools.step_folder import open_step
from ckpt_tools.verify import _max_abs_diff
from ms_varlen.checkpoint import tensors as tensors_module
from ms_varlen.checkpoint.store import load_checkpoint
from ms_varlen.checkpoint.tensors import StoredTensor, cast, from_array, read_safetensors, write_safetensors
from ms_varlen.errors import CheckpointError
from tests.support.ckpt_made import (
    TINY,
    contents,
    hugging_face_folder,
    random_arrays,
    run,
    saved_step,
    tensors,
    tiny_gguf,
)

COMMANDS = ("inspect", "convert", "verify", "import-hf", "export-hf", "import-gguf", "import-mindformers",
            "export-mindformers")  # fmt: skip


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A recipe of the tiny decoder on thirty documents; its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [json.dumps({"text": f"{number} " + "ab " * (number % 9)}) for number in range(30)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    recipe = {
        "mode": "varlen",
        "data": {"source": str(tmp_path / "corpus.jsonl"), "tokenizer": "bytes"},
        "batch": {"token_budget": 128},
        "model": {
            "config": {**TINY.model_dump(include={"hidden_size", "num_hidden_layers", "num_attention_heads"}),
                       "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 300},
            "variable_seq_lengths": True, "seq_length": 64, "max_position_embeddings": 64,
        },
        "train": {"steps": 60, "learning_rate": 1e-3},
        "checkpoint": {"output_dir": str(tmp_path / "out")},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "recipe.yaml"


# Tensors


@settings(deadline=None)  # every file is fsynced
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters='"'), min_size=1, max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(["float32", "float16", "int64", "uint8"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_files_match_the_safetensors_library(tmp_path_factory, entries):
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 9, shape).astype(dtype) for name, (dtype, shape) in entries.items()}
    file = tmp_path_factory.mktemp("files") / "x.safetensors"
    write_safetensors(file, [from_array(name, value) for name, value in arrays.items()], lambda _: None)
    found = load_file(file)
    read = read_safetensors(file)
    assert found.keys() == arrays.keys() == read.keys()
    for name, value in arrays.items():
        assert found[name].tobytes() == value.tobytes() == read[name].read().tobytes()
        assert found[name].shape == value.shape == read[name].shape


def test_tensors_pass_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 64)
    value = np.arange(100, dtype=np.float32)
    write_safetensors(tmp_path / "x", [from_array("w", value)], lambda _: None)
    stored = read_safetensors(tmp_path / "x")["w"]
    assert [piece.size for piece in stored.pieces()] == [16] * 6 + [4]
    assert [piece.size for piece in cast(stored, "BF16").pieces()] == [16] * 6 + [4]
    told = []
    write_safetensors(tmp_path / "y", [stored], told.append)
    assert told == [64] * 6 + [16]
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    short = StoredTensor("w", "F32", (4,), "elsewhere", lambda: iter([np.zeros(3, np.float32)]))
    with pytest.raises(CheckpointError, match="elsewhere: parameter w must have 16 bytes, found 12"):
        write_safetensors(tmp_path / "x", [short], lambda _: None)


# What is read and written is what training reads and writes


def test_imported_weights_are_a_checkpoint_of_ours(tmp_path, capsys):
    source = hugging_face_folder(tmp_path / "hf", "qwen3", dtype="bfloat16")
    status, said, _ = run(capsys, "import-hf", source, tmp_path / "ours", "--json")
    assert (status, said["source_dtype"], said["optimizer"]) == (0, "BF16", False)
    step = tmp_path / "ours" / "step_00000000"
    assert open_step(tmp_path / "ours").config.architecture == "qwen3"
    with pytest.raises(
        CheckpointError, match="must be of mode varlen, which this recipe trains, got imported; convert it with"
    ):
        load_checkpoint(step, "varlen")
    status, said, _ = run(capsys, "inspect", step, "--json")
    assert (status, said["mode"], said["optimizer"], said["complete"]) == (0, "imported", None, True)
    status, _, error = run(capsys, "convert", "--to", "varlen", step, tmp_path / "new")
    assert status == 1
    assert f"found weights only; train from its weights with model.init_from={step}" in error


def test_imported_moments_become_a_run_of_a_recipe(tmp_path, capsys, corpus):
    config = TINY.model_copy(update={"vocab_size": 300})
    source = saved_step(tmp_path / "run", config)
    assert run(capsys, "export-mindformers", source, tmp_path / "mf")[0] == 0
    assert run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "ours")[0] == 0
    command = ["convert", "--to", "varlen", tmp_path / "ours", tmp_path / "new"]
    status, _, error = run(capsys, *command)
    assert status == 1
    assert "recipe.yaml must be there to make a varlen recipe from; give one with --recipe" in error
    status, _, error = run(capsys, *command, "--recipe", corpus)
    assert status == 0, error
    loaded = load_checkpoint(tmp_path / "new" / "step_00000030", "varlen", config.parameter_shapes())
    model, optimizer = random_arrays(config)
    assert all(loaded.model[name].tobytes() == value.tobytes() for name, value in model.items())
    assert all(loaded.optimizer[name].tobytes() == value.tobytes() for name, value in optimizer.items())
    assert (loaded.state["plan"]["epoch"], loaded.state["plan"]["step"], loaded.state["step"]) == (0, 0, 30)


def test_conversion_without_lengths_asks_for_a_recipe(tmp_path, capsys, corpus):
    step = saved_step(tmp_path / "run", TINY.model_copy(update={"vocab_size": 300}), "varlen")
    (tmp_path / "run" / "recipe.yaml").write_text(corpus.read_text())
    status, _, error = run(capsys, "convert", "--to", "varlen", step, tmp_path / "new")
    assert (status, "is a varlen checkpoint already" in error) == (1, True)
    status, _, error = run(capsys, "convert", "--to", "padded", step, tmp_path / "new")
    assert status == 1
    assert "metrics.jsonl must tell the samples' lengths" in error
    assert "give a recipe of the new mode with --recipe" in error


# Verify


def test_verify_names_what_differs(tmp_path, capsys):
    a, b = saved_step(tmp_path / "a"), saved_step(tmp_path / "b", mode="varlen")
    assert run(capsys, "verify", a, b)[0] == 0
    other = saved_step(tmp_path / "c", seed=1)
    status, said, _ = run(capsys, "verify", a, other, "--json")
    assert (status, said["passed"], said["tensors"]) == (1, False, 3 * len(TINY.parameter_shapes()) + 1)
    # The counter alone is the same.
    assert {row["name"] for row in said["differences"]} == tensors(a).keys() - {"applied_steps"}
    assert min(row["max_abs_diff"] for row in said["differences"]) > 0.01


def test_verify_compares_values_of_other_dtypes_and_kinds(tmp_path, capsys):
    a = saved_step(tmp_path / "a")
    run(capsys, "export-hf", a, tmp_path / "fp32")
    run(capsys, "export-hf", a, tmp_path / "bf16", "--dtype", "bf16")
    status, said, _ = run(capsys, "verify", a, tmp_path / "fp32", "--json")
    assert (status, said["differences"], said["optimizer_only_in"], said["equal"]) == (1, [], "a", False)
    status, _, error = run(capsys, "verify", tmp_path / "fp32", a)
    assert (status, "only B has optimizer moments; --weights-only leaves them out" in error) == (1, True)
    status, said, _ = run(capsys, "verify", a, tmp_path / "fp32", "--json", "--weights-only")
    assert (status, said["differences"], said["optimizer_only_in"], said["equal"]) == (0, [], None, True)
    status, said, _ = run(capsys, "verify", a, tmp_path / "bf16", "--json", "--weights-only")
    assert status == 1
    assert {(row["a"][:3], row["b"][:4]) for row in said["differences"]} == {("F32", "BF16")}
    assert 0 < max(row["max_abs_diff"] for row in said["differences"]) < 0.01


def test_difference_of_numbers_infinities_and_nan():
    def difference(a, b):
        return _max_abs_diff(from_array("a", np.array(a, np.float32)), from_array("b", np.array(b, np.float32)))

    inf, nan = np.inf, np.nan
    assert difference([1, 2, inf, nan], [1, 2.5, inf, nan]) == 0.5
    assert difference([1, 2], [1, 2]) == 0
    assert difference([1, nan], [1, 2]) is None
    assert difference([1, inf], [1, -inf]) is None


def test_verify_says_what_is_missing(tmp_path, capsys):
    a = saved_step(tmp_path / "a")
    b = saved_step(tmp_path / "b", TINY.model_copy(update={"num_hidden_layers": 1, "intermediate_size": 8}))
    with pytest.raises(CheckpointError, match=r"\(42 of 42 parameters differ: .*, \.\.\.\); use the model.config"):
        load_checkpoint(a, "padded", {f"other.{name}": shape for name, shape in list(TINY.parameter_shapes().items())})
    status, said, _ = run(capsys, "verify", a, b, "--json")
    rows = {row["name"]: row for row in said["differences"]}
    assert (status, said["equal"]) == (1, False)
    assert rows["model.layers.1.mlp.up_proj.weight"]["b"] == "missing"
    up = rows["model.layers.0.mlp.up_proj.weight"]
    assert (up["a"], up["b"], up["max_abs_diff"]) == ("F32 [24, 16]", "F32 [8, 16]", None)


# Inspect


def test_inspect_tells_what_a_path_is(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    status, said, _ = run(capsys, "inspect", tmp_path / "run", "--json")
    assert (status, said["kind"], said["mode"], said["step"], said["faults"]) == (0, "ms_varlen", "padded", 30, [])
    assert said["plan"] == {"epoch": 0, "step": 30, "fingerprint": "f00"}
    assert said["optimizer"]["tensors"] == 2 * len(said["parameters"]) + 1
    assert said["parameters"][0] == {"name": "lm_head.weight", "shape": [34, 16], "dtype": "F32", "bytes": 2176}
    source = hugging_face_folder(tmp_path / "hf", "mistral")
    status, said, _ = run(capsys, "inspect", source, "--json")
    assert (status, said["kind"], said["model"]["architecture"]) == (0, "hugging_face", "mistral")
    (tmp_path / "plain.safetensors").write_bytes((step / "model.safetensors").read_bytes())
    status, said, _ = run(capsys, "inspect", tmp_path / "plain.safetensors", "--json")
    assert (status, said["kind"], said["names"], len(said["parameters"])) == (0, "file", "hugging_face", 21)


def test_inspect_lists_what_a_gguf_file_holds_and_what_is_wrong_with_it(tmp_path, capsys):
    file = tiny_gguf(tmp_path / "tiny.gguf")
    status, said, _ = run(capsys, "inspect", file, "--json")
    assert (status, said["kind"], said["faults"], said["complete"]) == (0, "gguf", [], True)
    assert said["model"]["architecture"] == "llama"
    assert said["parameter_count"] == sum(np.prod(shape) for shape in TINY.parameter_shapes().values())
    rows = {row["name"]: (row["shape"], row["dtype"], row["bytes"]) for row in said["parameters"]}
    assert rows.keys() == TINY.parameter_shapes().keys()
    assert rows["model.embed_tokens.weight"] == ([34, 16], "F16", 34 * 16 * 2)
    assert rows["model.norm.weight"] == ([16], "F32", 64)
    whole = file.read_bytes()
    for content in (b"GGUF", b"GGUF" + np.random.default_rng(0).bytes(300), whole[:40], whole[:2000], whole[:-9]):
        file.write_bytes(content)
        status, said, _ = run(capsys, "inspect", file, "--json")
        assert (status, said["complete"], len(said["faults"])) == (1, False, 1)
        assert "must be a whole GGUF file, but is cut short or altered" in said["faults"][0]


def test_file_that_is_no_gguf_says_so(tmp_path, capsys):
    (tmp_path / "x.ckpt").write_bytes(b"something")
    status, _, error = run(capsys, "import-gguf", tmp_path / "x.ckpt", tmp_path / "new")
    assert status == 1
    assert "x.ckpt must be a GGUF file, which begins with b'GGUF', found b'some'; `ckpt-tools inspect" in error
    status, _, error = run(capsys, "import-gguf", tmp_path / "none.gguf", tmp_path / "new")
    assert (status, "none.gguf must be a GGUF file, found none there; correct the path" in error) == (1, True)


def test_step_folder_through_a_link_or_a_dot(tmp_path, capsys, monkeypatch):
    step = saved_step(tmp_path / "run")
    (tmp_path / "latest").symlink_to(step)
    monkeypatch.chdir(step)
    for path in (tmp_path / "latest", ".", "../step_00000030/"):
        status, said, error = run(capsys, "inspect", path, "--json")
        assert (status, said["step"], said["faults"]) == (0, 30, []), error
        assert run(capsys, "verify", path, step)[0] == 0


def test_plain_file_is_exported_with_a_config(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    run(capsys, "export-hf", step, tmp_path / "hf")
    file = tmp_path / "plain.safetensors"
    file.write_bytes((step / "model.safetensors").read_bytes())
    status, _, error = run(capsys, "export-hf", file, tmp_path / "new")
    assert (status, "does not say its model" in error) == (1, True)
    assert run(capsys, "export-hf", file, tmp_path / "new", "--config", tmp_path / "hf")[0] == 0
    assert tensors(tmp_path / "new") == tensors(tmp_path / "hf")


# The command line


def test_help_of_every_command(capsys):
    from ckpt_tools.cli import main

    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert command in capsys.readouterr().out


def test_wrong_command_line_is_status_2(tmp_path, capsys):
    assert run(capsys, "convert", "--to", "other", tmp_path, tmp_path / "new")[0] == 2
    assert run(capsys, "convert", tmp_path)[0] == 2


def test_debug_shows_the_traceback(tmp_path):
    from ckpt_tools.cli import main

    with pytest.raises(CheckpointError, match="must be a file or folder that is there"):
        main(["inspect", str(tmp_path / "none"), "--debug"])


def test_tables_are_for_people_and_sources_stay(tmp_path, capsys):
    from ckpt_tools.cli import main

    step = saved_step(tmp_path / "run")
    before = contents(step)
    assert main(["inspect", str(step)]) == 0
    out = capsys.readouterr().out
    assert "model.norm.weight" in out
    assert main(["export-hf", str(step), str(tmp_path / "hf")]) == 0
    assert "architecture" in capsys.readouterr().out
    assert contents(step) == before


def test_looking_imports_no_mindspore(tmp_path):
    step = saved_step(tmp_path / "run")
    code = (
        "import sys; from ckpt_tools.cli import main; "
        f"status = main(['inspect', {str(step)!r}, '--json']); status += main(['export-hf', {str(step)!r}, "
        f"{str(tmp_path / 'hf')!r}, '--json']); sys.exit(status or 'mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
