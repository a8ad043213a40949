"""Sources from elsewhere that are damaged or odd, and places that a destination must not be in."""

import json
import shutil
import sys

import numpy as np
import pytest
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ckpt_tools.cli import main
from ckpt_tools.mindformers.shards import merged_tensors
from ms_varlen.checkpoint.store import CorruptCheckpointError
from ms_varlen.checkpoint.tensors import read_safetensors
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from tests.support.ckpt_made import TINY, contents, numbers, run, saved_step, tiny_gguf

QWEN3 = DecoderConfig.model_validate({**TINY.model_dump(), "architecture": "qwen3", "qk_norm": True})
NAME = "model.layers.0.mlp.down_proj.weight"
FILE = "model.safetensors"
MODEL_YAML = "mindformers_model.yaml"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One model as Hugging Face and as MindFormers (both layouts) have it."""
    folder = tmp_path_factory.mktemp("sources")
    for name, config in (("hf", TINY), ("hf3", QWEN3)):
        step = saved_step(folder / "runs" / name, config)
        assert main(["export-hf", str(step), str(folder / name), "--json"]) == 0
    assert main(["export-mindformers", str(folder / "hf"), str(folder / "legacy"), "--json"]) == 0
    assert main(["export-mindformers", str(folder / "hf3"), str(folder / "new"), "--json"]) == 0
    return folder


def edited(file, edit):
    """A safetensors file with another header before the same data."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def set_row(**values):
    return lambda header: header[NAME].update(values)


def onto_another(header):
    """Two parameters of one shape in the same bytes."""
    header[NAME]["data_offsets"] = header[NAME.replace("layers.0", "layers.1")]["data_offsets"]


HEADERS = {
    "two parameters in the same bytes": (onto_another, "is altered: parameter .* must lie in bytes"),
    "a hole": (lambda header: header.pop(NAME), "is altered: parameter .* must lie in bytes"),
    "a shape in floating point": (set_row(shape=[16.0, 24.0]), f"{NAME} must have a dtype of .*, a shape and two offs"),
    "a negative shape": (set_row(shape=[-16, -24]), f"{NAME} must have a dtype of .*, a shape and two offsets"),
    "a dtype that is not read": (set_row(dtype="F8_E4M3"), f'{NAME} must have a dtype of F64, .*"F8_E4M3"'),
    "offsets in words": (set_row(data_offsets=["0", "4"]), f"{NAME} must have a dtype of .*, a shape and two offsets"),
    "no row": (lambda header: header.update({NAME: None}), f"{NAME} must have a dtype of .*found null"),
    "a shape of other bytes": (set_row(shape=[9, 9]), rf"{NAME}, F32 \[9, 9\], must lie in bytes"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_header_that_does_not_describe_the_data_is_refused_as_safetensors_does(sources, tmp_path, fault):
    edit, message = HEADERS[fault]
    file = shutil.copy(sources / "hf" / FILE, tmp_path)
    edited(tmp_path / FILE, edit)
    with pytest.raises(CorruptCheckpointError, match=message):
        read_safetensors(tmp_path / FILE)
    if "F8" not in message:
        with pytest.raises(SafetensorError):
            safe_open(file, "np").__enter__()


@pytest.mark.parametrize("size", [0, 3, 8, 200])
def test_file_that_is_cut_in_its_header_or_has_bytes_too_many_is_refused(sources, tmp_path, size):
    whole = (sources / "hf" / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:size])
    with pytest.raises(CorruptCheckpointError, match="cut short or no safetensors file: its header is not whole"):
        read_safetensors(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(whole + b"more")
    with pytest.raises(CorruptCheckpointError, match=r"its parameters end at byte \d+, the file has"):
        read_safetensors(tmp_path / FILE)


def test_folder_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be a file that can be read, got Is a directory; bring it again"):
        read_safetensors(tmp_path)


def write(path, text):
    path.write_text(text)


def model_key(folder, **values):
    file = folder / MODEL_YAML
    content = yaml.safe_load(file.read_text())
    content["model"]["model_config"] |= values
    file.write_text(yaml.safe_dump(content))


DAMAGE = {
    "a number for a shard": (
        "hf",
        lambda f: write(f / f"{FILE}.index.json", json.dumps({"weight_map": {"a": 3}})),
        "must name a file for parameter a, got 3",
    ),
    "an index of a file that is gone": (
        "hf",
        lambda f: write(f / f"{FILE}.index.json", json.dumps({"weight_map": {"a": "gone.safetensors"}})),
        "gone.safetensors is missing; copy all files of the checkpoint",
    ),
    "no config.json": (
        "hf",
        lambda f: (f / "config.json").unlink(),
        "are read with the config.json of the model beside; bring",
    ),
    "a missing parameter": (
        "legacy",
        lambda f: shrunk(next((f / "rank_0").glob("*.safetensors"))),
        "parameter model.norm.weight is missing",
    ),
    "scaling without its factor": (
        "legacy",
        lambda f: model_key(f, extend_method="LINEAR"),
        "must be that of a training of MindFormers, got KeyError",
    ),
    "scaling that is no mapping": (
        "legacy",
        lambda f: model_key(f, extend_method="LLAMA3", scaling_factor=4),
        "must be that of a training of MindFormers, got TypeError",
    ),
    "scaling of another kind": (
        "legacy",
        lambda f: model_key(f, extend_method="YARN"),
        f"{MODEL_YAML}: model.model_config.extend_method must be None, LINEAR or LLAMA3, got YARN",
    ),
    "a word for a multiplier": (
        "legacy",
        lambda f: model_key(f, intermediate_size=None, ffn_dim_multiplier="a"),
        "must be that of a training of MindFormers, got TypeError",
    ),
    "an empty file name": (
        "legacy",
        lambda f: write(f / "rank_0" / "meta.json", '{"last_ckpt_file": ""}'),
        "rank_0 must be a file that can be read",
    ),
    "an empty tracker": ("new", lambda f: write(f / TRACKER, ""), "must hold the number of an iteration, found b''"),
    "a word in the tracker": ("new", lambda f: write(f / TRACKER, "release"), "number of an iteration, found b'rele"),
    "metadata that is a list": ("new", lambda f: metadata(f, "[]"), "metadata.json must say where each parameter's ch"),
    "metadata that is cut short": ("new", lambda f: metadata(f, '{"a"'), "metadata.json must say where each paramete"),
    "metadata without files": (
        "new",
        lambda f: metadata(
            f,
            '{"state_dict_metadata": {"a": {"global_shape": [2], "chunk": [{"global_offset": [0]}]}}, '
            '"storage_data": {}}',
        ),
        "metadata.json must say where each parameter's chunks lie",
    ),
    "metadata without chunks": (
        "new",
        lambda f: metadata(f, '{"state_dict_metadata": {"a": {"global_shape": [2], "chunk": []}}, "storage_data": {}}'),
        "metadata.json must say where each parameter's chunks lie",
    ),
    "metadata of nothing": (
        "new",
        lambda f: metadata(f, '{"state_dict_metadata": {}, "storage_data": {}}'),
        "must hold parameters, found none",
    ),
}
TRACKER = "latest_checkpointed_iteration.txt"


def metadata(folder, text):
    write(next(folder.glob("iteration_*")) / "metadata.json", text)


def shrunk(file):
    arrays = numbers(file)
    del arrays["model.norm_out.weight"]
    file.chmod(0o644)
    save_file(arrays, file)


@pytest.mark.parametrize("fault", DAMAGE)
def test_odd_source_is_reported_by_inspect_and_refused_by_import(sources, tmp_path, capsys, fault):
    kind, damage, message = DAMAGE[fault]
    source = shutil.copytree(sources / kind, tmp_path / "source")
    damage(source)
    before = contents(source)
    status, said, error = run(capsys, "inspect", source, "--json")
    assert (status, said["complete"]) == (1, False), error
    assert message in " ".join(said["faults"][0].split())
    command = "import-hf" if kind == "hf" else "import-mindformers"
    status, said, error = run(capsys, command, source, tmp_path / "new", "--json")
    assert (status, said, message in error) == (1, None, True), error
    assert contents(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_gguf_file_without_its_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    file = tmp_path / "tiny.gguf"
    tiny_gguf(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    status, said, _ = run(capsys, "inspect", file, "--json")
    assert status == 1
    assert said["faults"][0].startswith("a GGUF file must be read by the package gguf (0.10 or later), found none;")
    for command in ("import-hf", "import-gguf", "export-hf"):
        status, _, error = run(capsys, command, file, tmp_path / "new")
        assert (status, error.startswith("error: a GGUF file must be read by the package gguf")) == (1, True)


def test_codes_of_the_catalogue_are_reported(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    (step / "optimizer.safetensors").unlink()
    error = run(capsys, "export-hf", step, tmp_path / "hf")[2]
    assert error.endswith("[CKPT-CORRUPT] ms-varlen doctor --explain CKPT-CORRUPT")
    error = run(capsys, "export-hf", tmp_path / "gone", tmp_path / "hf")[2]
    assert "[" not in error, "a path that is nothing is no fault of the catalogue"


@pytest.mark.parametrize("place", ["run/a/../../new", "run/../new", "a/b/../../new"])
def test_two_dots_in_the_destination_make_no_folder_on_the_way(tmp_path, capsys, monkeypatch, place):
    step = saved_step(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path / "run")
    status, said, error = run(capsys, "export-hf", step, place, "--json")
    assert status == 0, error
    assert said["destination"] == str(tmp_path / "new")
    assert contents(tmp_path / "run") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_00000030"]


@pytest.mark.parametrize("named", ["run", "link", "run/step_00000030"])
@pytest.mark.parametrize("place", ["run/b", "run/a/../b", "a/../run/step_00000030/b", "link/b", "link/../run/b"])
def test_destination_in_the_source_by_any_road_is_refused(tmp_path, capsys, monkeypatch, named, place):
    step = saved_step(tmp_path / "run")
    (tmp_path / "link").symlink_to(step)
    (tmp_path / "run" / "recipe.yaml").write_text("model: {}")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for command in ("export-hf", "export-mindformers", "import-hf"):
        status, _, error = run(capsys, command, named, place)
        assert (status, "must not lie in the source" in error) == (1, True), error
    assert contents(tmp_path) == before


def test_step_that_lies_alone_may_have_neighbours(tmp_path, capsys):
    step = saved_step(tmp_path)
    assert run(capsys, "export-hf", step, tmp_path / "hf")[0] == 0
    assert "must not lie in the source" in run(capsys, "export-hf", tmp_path, tmp_path / "hf2")[2]


def test_destination_that_cannot_be_made_is_reported(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    (tmp_path / "file").write_text("")
    status, _, error = run(capsys, "export-hf", step, tmp_path / "file" / "a" / "new")
    assert (status, "must be a folder that can be made, got Not a directory; choose another" in error) == (1, True)


def test_run_is_exported_where_its_data_is_not(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    recipe = {"mode": "padded", "data": {"source": "gone.jsonl", "tokenizer": str(tmp_path / "gone.json")}}
    recipe["model"] = {"max_position_embeddings": 77}
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, _, error = run(capsys, "export-hf", step, tmp_path / "hf")
    assert status == 0, error
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 77
    assert run(capsys, "export-mindformers", step, tmp_path / "mf")[0] == 0
    # A conversion needs a recipe that can be run, and says that another may be given.
    status, _, error = run(capsys, "convert", "--to", "varlen", step, tmp_path / "new")
    assert status == 1
    assert "of which a varlen recipe is made unless --recipe gives one" in error
    assert "data.source: must be an existing file or folder, got gone.jsonl" in error
    (tmp_path / "run" / "recipe.yaml").write_text("- list")
    assert "must hold the run's recipe, found ['list']" in run(capsys, "export-hf", step, tmp_path / "hf2")[2]


def test_config_given_is_what_inspect_compares_with(sources, tmp_path, capsys):
    folder = sources / "legacy" / "rank_0"
    file = tmp_path / "plain.safetensors"
    file.write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    status, said, _ = run(capsys, "inspect", file, "--json")
    assert (status, said["kind"], said["model"]) == (0, "mindformers_legacy", None)
    status, said, _ = run(capsys, "inspect", file, "--config", sources / "legacy" / MODEL_YAML, "--json")
    assert (status, said["model"]["hidden_size"]) == (0, TINY.hidden_size)
    (tmp_path / "config.json").write_text(json.dumps(other_config(sources)))
    status, said, _ = run(capsys, "inspect", file, "--config", tmp_path / "config.json", "--json")
    assert status == 1
    assert "for this model, found F32" in said["faults"][0]


def other_config(sources):
    return json.loads((sources / "hf" / "config.json").read_text()) | {"vocab_size": 99}


def test_parts_of_a_parameter_that_reach_beyond_it_are_refused(tmp_path):
    folder = tmp_path / "iteration_00000016"
    folder.mkdir()
    save_file({"w": np.zeros((2, 6), np.float32)}, folder / "a.safetensors")
    described = {"w": {"global_shape": [3, 4], "chunk": [{"global_offset": [0, 0]}]}}
    stored = {str(("w", (0, 0))): [{"file_name": "a.safetensors"}]}
    text = json.dumps({"state_dict_metadata": described, "storage_data": stored})
    (folder / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"w must have shape \[3, 4\] .* have 12 values, some beyond it"):
        merged_tensors(folder, None)


def test_ranks_of_different_steps_or_with_one_missing_are_refused(sources, tmp_path):
    whole = next((sources / "legacy" / "rank_0").glob("*.safetensors"))
    for rank, step in ((0, 20), (1, 20), (2, 10)):
        (tmp_path / f"rank_{rank}").mkdir()
        shutil.copy(whole, tmp_path / f"rank_{rank}" / f"a_rank_{rank}-1_{step}.safetensors")
    with pytest.raises(
        CheckpointError, match=r"a_rank_2-1_10\.safetensors and .*-1_20\.safetensors must be of one step"
    ):
        merged_tensors(tmp_path, None)
    shutil.copy(whole, tmp_path / "rank_2" / "a_rank_2-1_20.safetensors")
    assert merged_tensors(tmp_path, None)[0].keys() == read_safetensors(whole).keys()
    shutil.rmtree(tmp_path / "rank_1")
    with pytest.raises(CheckpointError, match="must hold the folders of all ranks, found no rank_1"):
        merged_tensors(tmp_path, tmp_path / "strategy.ckpt")


def test_a_file_cut_short_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(8, np.float32)}, path)
    tensor = read_safetensors(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="parameter a must have 8 values, found 7; the file changed while it was"):
        tensor.read()
