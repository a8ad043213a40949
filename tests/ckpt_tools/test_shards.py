import json

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.mindformers.shards import merged_tensors, read_file
from ms_varlen.errors import CheckpointError
from tests.support.ckpt_made import numbers, random_arrays, run, saved_step


def strategy_file(path, cuts, ranks=2):
    """A strategy of `ranks` devices; `cuts` has the axis on which a parameter is cut, None where it is not.

    It is what MindSpore's semi-automatic parallel training saves: ParallelStrategyMap of node_strategy.proto.
    """
    strategy = ms.train.node_strategy_pb2.ParallelStrategyMap()
    strategy.current_stage = 1
    node = strategy.parallel_strategy_item.add()
    node.node_name = "MatMul"
    node.parallel_strategys.stage = 0
    node.parallel_strategys.parallel_strategy.add().dim.extend([1])
    for name, (axis, axes) in cuts.items():
        item = strategy.parallel_layout_item.add()
        item.param_name = f"0-{name}"
        layout = item.parallel_layouts
        layout.dev_matrix.add().dim.extend([ranks])
        layout.tensor_map.add().dim.extend([0 if place == axis else -1 for place in range(axes)])
        layout.param_split_shape.add()
        layout.indices_offset.add()
        layout.field, layout.opt_weight_shard_step, layout.opt_weight_shard_size = 0, 0, 0
    path.write_bytes(strategy.SerializeToString())
    return path


@pytest.fixture
def exported(tmp_path, capsys):
    """A checkpoint as a legacy one of MindFormers: its folder and its tensors."""
    step = saved_step(tmp_path / "run")
    assert run(capsys, "export-mindformers", step, tmp_path / "whole")[0] == 0
    file = next((tmp_path / "whole").rglob("*.safetensors"))
    return tmp_path / "whole", numbers(file)


def axis_of(name, value):
    """Where tensor parallelism cuts: rows of what widens, columns of what narrows, norms and counters not."""
    if value.ndim < 2:
        return None
    return 1 if name.endswith(("wo.weight", "w2.weight")) else 0


def cut_over_ranks(folder, arrays, kind):
    cuts = {name: (axis_of(name, value), value.ndim) for name, value in arrays.items() if value.ndim}
    for rank in range(2):
        (folder / "checkpoint" / f"rank_{rank}").mkdir(parents=True)
        part = {}
        for name, value in arrays.items():
            axis = axis_of(name, value)
            part[name] = np.ascontiguousarray(value if axis is None else np.split(value, 2, axis)[rank])
        file = folder / "checkpoint" / f"rank_{rank}" / f"tiny_rank_{rank}-1_30.{kind}"
        if kind == "safetensors":
            save_file(part, file, {"remove_redundancy": "False", "format": "ms"})
        else:
            ms.save_checkpoint([{"name": name, "data": ms.Tensor(v)} for name, v in part.items()], str(file))
    return strategy_file(folder / "strategy.ckpt", cuts)


@pytest.mark.parametrize("kind", ["safetensors", "ckpt"])
def test_ranks_are_merged_by_their_strategy(exported, tmp_path, capsys, kind):
    whole, arrays = exported
    cut = tmp_path / "cut"
    strategy = cut_over_ranks(cut, arrays, kind)
    config = ["--config", whole / "mindformers_model.yaml"]
    status, _, error = run(capsys, "import-mindformers", cut / "checkpoint", tmp_path / "back", *config)
    assert status == 1
    assert "so tensors were cut over ranks; give the training's strategy file" in error
    command = ["import-mindformers", cut / "checkpoint", tmp_path / "back", *config, "--strategy", strategy, "--json"]
    status, said, error = run(capsys, *command)
    assert status == 0, error
    assert (said["step"], said["optimizer"]) == (30, True)
    back = tmp_path / "back" / "step_00000030"
    model, optimizer = random_arrays()
    for file, expected in (("model.safetensors", model), ("optimizer.safetensors", optimizer)):
        found = numbers(back / file)
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def test_wrong_strategy_is_an_error(exported, tmp_path, capsys):
    _, arrays = exported
    cut_over_ranks(tmp_path / "cut", arrays, "safetensors")
    (tmp_path / "broken.ckpt").write_bytes(b"no strategy")
    with pytest.raises(CheckpointError, match="MindSpore could not merge 2 ranks with"):
        merged_tensors(tmp_path / "cut" / "checkpoint", tmp_path / "broken.ckpt")


def test_equal_ranks_are_one_checkpoint(exported, tmp_path):
    _, arrays = exported
    for rank in range(2):
        (tmp_path / "same" / f"rank_{rank}").mkdir(parents=True)
        save_file(arrays, tmp_path / "same" / f"rank_{rank}" / "tiny-1_30.safetensors")
    found, _ = merged_tensors(tmp_path / "same", None)
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name].read(), value) for name, value in arrays.items())


def test_chunks_of_the_new_layout_are_put_together(tmp_path):
    folder = tmp_path / "iteration_00000016"
    folder.mkdir()
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    chunks = {(row, column): value[row : row + 2, column : column + 3] for row in (0, 2) for column in (0, 3)}
    storage, described = {}, []
    for number, (offset, chunk) in enumerate(chunks.items()):
        file = f"tiny-model-{number:07d}-0000004.safetensors"
        save_file({"w": np.ascontiguousarray(chunk)}, folder / file)
        storage[str(("w", offset))] = [{"file_name": file, "storage_rank": number, "rank_group": [number]}]
        described.append({"global_offset": offset, "local_shape": [2, 3]})
    metadata = {"state_dict_metadata": {"w": {"global_shape": [4, 6], "chunk": described}}, "storage_data": storage}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    found, _ = merged_tensors(folder, None)
    assert np.array_equal(found["w"].read(), value)
    described.pop()
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(
        CheckpointError, match=r"w must have shape \[4, 6\] as metadata.json says, its 3 chunks have 18"
    ):
        merged_tensors(folder, None)


def test_files_without_a_description_must_not_overlap(tmp_path):
    folder = tmp_path / "iteration_00000016"
    folder.mkdir()
    for number in range(2):
        save_file({"w": np.zeros(2, np.float32)}, folder / f"tiny-model-{number:07d}-0000002.safetensors")
    with pytest.raises(CheckpointError, match=r"parameter w is in .* too, and no metadata.json says how"):
        merged_tensors(folder, None)


def test_newest_file_of_a_rank_is_taken(tmp_path):
    folder = tmp_path / "rank_0"
    folder.mkdir()
    for epoch, step, value in ((1, 8, 1.0), (2, 2, 3.0), (1, 16, 2.0)):
        save_file({"w": np.full(1, value, np.float32)}, folder / f"tiny_rank_0-{epoch}_{step}.safetensors")
    assert merged_tensors(tmp_path, None)[0]["w"].read().tolist() == [3.0]
    (folder / "meta.json").write_text('{"last_ckpt_file": "tiny_rank_0-1_8.safetensors"}')
    assert merged_tensors(folder, None)[0]["w"].read().tolist() == [1.0]


def test_damaged_ckpt_file_is_named(tmp_path):
    (tmp_path / "bad.ckpt").write_bytes(b"\x00 no checkpoint")
    with pytest.raises(CheckpointError, match=r"bad.ckpt is no whole MindSpore checkpoint"):
        read_file(tmp_path / "bad.ckpt")
