import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ckpt_tools.cli import main
from ckpt_tools.mindformers.config import read_config
from ckpt_tools.mindformers.names import WeightLayout, check_expressible, from_mindformers, to_mindformers
from ms_varlen.checkpoint.tensors import from_array
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from tests.support.ckpt_made import (
    FAMILIES,
    TINY,
    hugging_face_folder,
    numbers,
    random_arrays,
    run,
    saved_step,
    tensors,
)

WAYS = {
    "llama separate": ("llama", []),
    "llama fused": ("llama", ["--fused"]),
    "llama in the new layout": ("llama", ["--files", "new"]),
    "qwen3": ("qwen3", []),
    "qwen3 contiguous": ("qwen3", ["--qkv", "contiguous", "--mlp", "contiguous"]),
    "qwen3 in the legacy layout": ("qwen3", ["--files", "legacy"]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_to_ours_to_mindformers_and_back_is_bit_equal(tmp_path, capsys, family, tied):
    source = hugging_face_folder(tmp_path / "hf", family, tied)
    assert run(capsys, "import-hf", source, tmp_path / "a")[0] == 0
    assert run(capsys, "export-mindformers", tmp_path / "a", tmp_path / "mf", "--fused")[0] == 0
    assert run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "b")[0] == 0
    assert run(capsys, "export-hf", tmp_path / "b", tmp_path / "back")[0] == 0
    assert tensors(tmp_path / "back") == tensors(source)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    # MindFormers has one class for Llama and Mistral, which are one net.
    same = ["hidden_size", "num_key_value_heads", "tie_word_embeddings", "vocab_size", "rms_norm_eps", "rope_theta"]
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


@pytest.mark.parametrize("way", WAYS)
def test_weights_moments_and_counter_come_back_bit_by_bit(tmp_path, capsys, way):
    family, options = WAYS[way]
    config = TINY if family == "llama" else TINY.model_copy(update={"architecture": "qwen3", "qk_norm": True})
    step = saved_step(tmp_path / "run", config)
    status, said, _ = run(capsys, "export-mindformers", step, tmp_path / "mf", *options, "--json")
    assert (status, said["optimizer"], said["step"]) == (0, True, 30)
    status, said, _ = run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "back", "--json")
    assert (status, said["step"], Path(said["destination"]).name) == (0, 30, "step_00000030")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert tensors_of(tmp_path / "back" / "step_00000030" / file) == tensors_of(step / file)
    assert run(capsys, "verify", step, tmp_path / "mf")[0] == 0
    status, said, _ = run(capsys, "inspect", tmp_path / "mf", "--json")
    kinds = {"llama": "mindformers_legacy", "qwen3": "mindformers_mcore"}
    assert (status, said["kind"], said["step"], said["faults"]) == (0, kinds[family], 30, [])


def tensors_of(file):
    return {name: value.tobytes() for name, value in numbers(file).items()}


def test_fused_rows_lie_as_mindformers_reads_them():
    # Two key heads of two query heads each, heads of 2 components; a row's value tells where it is from.
    config = DecoderConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                           intermediate_size=3, vocab_size=5)  # fmt: skip
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    hf = {
        f"model.layers.0.self_attn.{name}.weight": from_array(name, np.arange(n, dtype=np.float32)[:, None] + start)
        for (name, n), start in zip(rows.items(), (0, 100, 200), strict=True)
    }
    for name, start in (("gate_proj", 300), ("up_proj", 400)):
        hf[f"model.layers.0.mlp.{name}.weight"] = from_array(name, np.arange(3, dtype=np.float32)[:, None] + start)
    fused = to_mindformers(hf, config, WeightLayout("llama", True))
    qkv = fused["model.layers.0.attention.w_qkv.weight"].read()[:, 0]
    assert qkv.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert fused["model.layers.0.feed_forward.w_gate_hidden.weight"].read()[:, 0].tolist() == [
        *(300, 400, 301, 401, 302, 402)
    ]
    contiguous = to_mindformers(hf, config, WeightLayout("qwen3", True, "contiguous", "contiguous"))
    assert contiguous["decoder.layers.0.self_attention.linear_qkv.weight"].read()[:, 0].tolist() == [
        *range(8), *range(100, 104), *range(200, 204)
    ]  # fmt: skip
    assert contiguous["decoder.layers.0.mlp.linear_fc1.weight"].read()[:, 0].tolist() == [
        *(300, 301, 302, 400, 401, 402)
    ]


def test_names_match_mindformers_own_converter():
    """The table of `Qwen3PreTrainedModel.weight_mapping` (mindformers 1.9, models/qwen3/utils.py), q, k, v fused."""
    config = TINY.model_copy(update={"architecture": "qwen3", "qk_norm": True, "num_hidden_layers": 1})
    hf = {name: from_array(name, np.zeros(shape, np.float32)) for name, shape in config.parameter_shapes().items()}
    layout = WeightLayout("qwen3", True)
    found = to_mindformers(hf, config, layout)
    assert sorted(found) == [
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]
    assert from_mindformers(found, config, layout).keys() == hf.keys()


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ({"architecture": "qwen3", "qk_norm": True}, "llama", "does not have norms of query and key heads"),
        ({}, "qwen3", "does not have a decoder without norms of query and key heads"),
        ({"mlp_bias": True}, "llama", "biases in the feed-forward block"),
        ({"head_dim": 6}, "llama", r"a head_dim \(6\) other than hidden_size / num_attention_heads"),
        ({"qk_norm": True, "attention_bias": True}, "qwen3", "a bias of o_proj"),
    ],
)
def test_what_a_class_cannot_express_is_refused_by_name(change, model, message):
    with pytest.raises(CheckpointError, match=message):
        check_expressible(TINY.model_copy(update=change), model)


def test_contiguous_rows_are_refused_for_llama_and_read_from_older_files(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    status, _, error = run(capsys, "export-mindformers", step, tmp_path / "mf", "--fused", "--qkv", "contiguous")
    assert (status, (tmp_path / "mf").exists()) == (1, False)
    assert "must be interleaved for LlamaForCausalLM" in error
    run(capsys, "export-mindformers", step, tmp_path / "mf", "--fused")
    layout = WeightLayout("llama", True, "contiguous", "contiguous")
    model, _ = random_arrays()
    older = to_mindformers({name: from_array(name, value) for name, value in model.items()}, TINY, layout)
    file = next((tmp_path / "mf").rglob("*.safetensors"))
    file.chmod(0o600)
    save_file({name: tensor.read() for name, tensor in older.items()}, file)
    options = ["--qkv", "contiguous", "--mlp", "contiguous"]
    assert run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "back", *options)[0] == 0
    assert tensors_of(tmp_path / "back" / "step_00000000" / "model.safetensors") == {
        name: value.tobytes() for name, value in model.items()
    }


def test_training_yaml_of_mindformers_gives_the_config(tmp_path):
    section = {
        "type": "LlamaConfig", "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "hidden_size": 16, "vocab_size": 34,
        "multiple_of": 8, "ffn_dim_multiplier": 1.3, "rms_norm_eps": 1e-6, "qkv_concat": True, "qkv_has_bias": True,
    }  # fmt: skip
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({"model": {"model_config": section}}))
    config, layout = read_config(path)
    assert layout == WeightLayout("llama", True)
    assert (config.architecture, config.num_key_value_heads, config.attention_bias) == ("qwen2", 2, True)
    # int(1.31 * 64) = 83, int(2 * 83 / 3) = 55, rounded up to a multiple of 8
    assert config.intermediate_size == 56


def test_checkpoint_without_a_config_says_what_to_give(tmp_path, capsys):
    step = saved_step(tmp_path / "run")
    run(capsys, "export-mindformers", step, tmp_path / "mf")
    for name in ("mindformers_model.yaml", "config.json"):
        (tmp_path / "mf" / name).unlink()
    status, _, error = run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "back")
    assert status == 1
    assert "MindFormers' checkpoints do not say their model; give --config" in error
    wrong = hugging_face_folder(tmp_path / "hf", "llama")
    status, _, error = run(capsys, "import-mindformers", tmp_path / "mf", tmp_path / "back", "--config", wrong)
    assert status == 1
    assert "parameter lm_head.weight must have shape [67, 32] for this model, found F32 [34, 16]" in error


# MindFormers itself


def our_logits(step, ids):
    """What our decoder computes from a checkpoint's weights: [T, V]."""
    from mindspore import Tensor

    from ckpt_tools.step_folder import open_step
    from ms_varlen.lengths import SeqLens
    from ms_varlen.models.decoder import CausalLM
    from tests.models.test_decoder import block_mask, dense_attend

    folder = open_step(step)
    net = CausalLM(folder.config, len(ids), dense_attend)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(folder.model[parameter.name].read()))
    lens = SeqLens.packed([len(ids)], seq_length=len(ids))
    hidden = net(Tensor(np.array(ids, np.int32)), Tensor(lens.position_ids), (Tensor(block_mask(lens)),))
    return hidden.asnumpy() @ net.output_weight.asnumpy().T


OWN = {
    "llama": [
        (TINY.model_copy(update={"architecture": "llama"}), []),
        (TINY.model_copy(update={"architecture": "mistral", "tie_word_embeddings": True}), ["--fused"]),
        (TINY.model_copy(update={"architecture": "qwen2", "attention_bias": True}), ["--fused"]),
    ],
    "qwen3": [
        (TINY.model_copy(update={"architecture": "qwen3", "qk_norm": True}), []),
        (
            TINY.model_copy(
                update={"architecture": "qwen3", "qk_norm": True, "tie_word_embeddings": True, "head_dim": 8}
            ),
            ["--qkv", "contiguous", "--mlp", "contiguous"],
        ),
    ],
}


IDS = np.random.default_rng(0).integers(1, 34, 64).tolist()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Kind -> folder, checkpoints and process of MindFormers, which takes its time: both kinds run side by side."""
    started = {}
    for kind, cases in OWN.items():
        folder = tmp_path_factory.mktemp(kind)
        jobs, steps = [], []
        for number, (config, options) in enumerate(cases):
            steps.append(saved_step(folder / f"run{number}", config, seed=number))
            target = folder / f"mf{number}"
            assert main(["export-mindformers", str(steps[-1]), str(target), *options]) == 0
            file = next(target.rglob("*.safetensors")) if kind == "llama" else target
            jobs.append({
                "yaml": str(target / "mindformers_model.yaml"), "checkpoint": str(file), "ids": IDS,
                "output": str(folder / f"{number}.npz"), "save": str(folder / f"saved{number}"),
            })  # fmt: skip
        (folder / "jobs.json").write_text(json.dumps(jobs))
        script = Path(__file__).parents[1] / "support" / "mindformers_run.py"
        with (folder / "log").open("w") as log:
            command = [sys.executable, str(script), kind, str(folder / "jobs.json")]
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        started[kind] = folder, steps, process
    yield started
    for _, _, process in started.values():
        process.kill()
        process.wait()


@pytest.mark.graph
@pytest.mark.parametrize("kind", OWN)
def test_mindformers_computes_our_logits_holds_our_moments_and_its_own_files_come_back(started, tmp_path, capsys, kind):
    folder, steps, process = started[kind]
    assert process.wait(timeout=600) == 0, (folder / "log").read_text()[-3000:]
    for number, step in enumerate(steps):
        found = np.load(folder / f"{number}.npz")
        assert np.abs(found["logits"] - our_logits(step, IDS)).max() < 1e-4
        assert int(found["global_step"]) == 30
        exported = {n: v for n, (_, _, v) in tensors(folder / f"mf{number}").items() if n.startswith("adam_")}
        assert {name: found[name].tobytes() for name in exported} == exported
        options = ["--config", folder / f"mf{number}" / "mindformers_model.yaml"]
        sources = [folder / f"saved{number}"]
        if kind == "llama":
            sources += list((sources[0] / "rank_0").iterdir())
        for place, source in enumerate(sources):
            back = tmp_path / f"back{number}-{place}"
            status, said, error = run(capsys, "import-mindformers", source, back, *options, "--json")
            assert status == 0, error
            assert said["step"] == 30
            for file in ("model.safetensors", "optimizer.safetensors"):
                assert tensors_of(back / "step_00000030" / file) == tensors_of(step / file)
