import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ckpt_tools.mindformers.checkpoints import export_mindformers
from ckpt_tools.open_any import open_weights
from ms_varlen.bridge.config import MONITOR_TYPE
from ms_varlen.bridge.feed import open_feed
from ms_varlen.bridge.recipes import Devices, mindformers_config
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import hugging_face_config
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.run import train

ROOT = Path(__file__).parents[2]
LOSS_TOLERANCE = 1e-3
"""MindFormers casts q, k and v to fp16 before its attention call; 5e-5 was seen."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict:
    """The `data` section of 160 texts of 40 to 500 bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(2, 9, 50)]
    texts = [" ".join(random.choice(words, n)) for n in random.integers(8, 80, 160)]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(source), "tokenizer": "bytes", "store_dir": str(folder), "eval_fraction": 0.0}


def core_sections(corpus: dict, output: Path) -> dict:
    config = {
        "architecture": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
    }
    return {
        "mode": "packed",
        "data": corpus,
        "batch": {"token_budget": 2048, "max_segments": 128, "micro_batches": 2},  # two rows of MindFormers
        "shapes": {"kind": "static"},
        "model": {
            "config": config,
            "variable_seq_lengths": True,
            "seq_length": 512,
            "max_position_embeddings": 512,
        },
        "train": {"steps": 20, "learning_rate": 1e-3, "schedule": "constant", "seed": 3},
        "graph": {"compile_cache": "off"},
        "checkpoint": {"output_dir": str(output), "every": 10},
        "device": {"target": "CPU"},
    }


def write_hugging_face(folder: Path, config: DecoderConfig) -> None:
    """Random weights under Hugging Face names."""
    folder.mkdir()
    weights = {}
    for name, shape in config.parameter_shapes().items():
        random = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        weights[name] = (np.float32(0.02) * random + (len(shape) == 1)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config, 512)))


def run_python(folder: Path, *command: str) -> str:
    """What a process printed; MindFormers' log goes to `folder`."""
    environment = os.environ | {"LOG_MF_PATH": str(folder / "log"), "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "0"}
    # msrun starts the `python` that it finds.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def without(kind: str, config: dict) -> list[dict]:
    """The callbacks but for one; the run adds the monitor itself."""
    return [callback for callback in config["callbacks"] if callback["type"] != kind]


@pytest.fixture(scope="module")
def core(corpus, tmp_path_factory) -> dict:
    """What `bridge_core_run.py` does with MindFormers' core Qwen3; `ours` is our own trainer's run."""
    folder = tmp_path_factory.mktemp("core")
    sections = core_sections(corpus, folder / "ours")
    config = DecoderConfig(**sections["model"]["config"], vocab_size=258)
    write_hugging_face(folder / "hf", config)
    exported = export_mindformers(
        open_weights(folder / "hf"),
        folder / "mf",
        None,
        None,
        True,
        "interleaved",
        "interleaved",
        2048,
        lambda *_: None,
    )
    made = mindformers_config(parse_recipe(sections), "qwen3", Devices())
    made["output_dir"] = str(folder / "output")
    made["checkpoint"] |= {"save_path": str(folder / "output" / "checkpoint"), "load_path": exported["load_checkpoint"]}
    (folder / "train.yaml").write_text(yaml.safe_dump(made | {"callbacks": without(MONITOR_TYPE, made)}))
    middle = str(folder / "output" / "checkpoint" / "iteration_00000010")
    made["checkpoint"] |= {"load_path": middle, "no_load_optim": False}
    (folder / "resume.yaml").write_text(yaml.safe_dump(made))
    shutil.copy(ROOT / "recipes" / "mindformers" / "qwen3_8b_8p.yaml", folder / "eight_billion.yaml")
    printed = run_python(folder, sys.executable, str(ROOT / "tests" / "support" / "bridge_core_run.py"), str(folder))
    ours: list[dict] = []
    sections["model"]["init_from"] = str(folder / "hf")
    train(parse_recipe(sections), ours.append)
    return {**json.loads(printed.splitlines()[-1]), "ours": ours}


@pytest.mark.graph
def test_mindformers_trainer_has_our_own_trainers_losses(core):
    losses = np.array([[step["loss"] for step in core[run]] for run in ("whole", "ours")])
    assert losses.shape == (2, 20)
    assert core["whole"][-1]["epoch"] > 0
    assert losses[1, 0] - losses[1, -1] > 0.5  # it learns, so equal weights are not all that is compared
    assert np.abs(losses[0] - losses[1]).max() < LOSS_TOLERANCE
    for key in ("sample_ids_sha256", "tokens_real", "tokens_supervised", "tokens_computed", "segments", "pad_ratio"):
        assert [step[key] for step in core["whole"]] == [step[key] for step in core["ours"]]


@pytest.mark.graph
def test_a_resumed_run_of_mindformers_resumes_at_the_place_in_the_plan(core):
    kept = ("step", "epoch", "place", "sample_ids_sha256")
    whole, resumed = ([[step[key] for key in kept] for step in core[run]] for run in ("whole", "resumed"))
    assert whole == resumed
    losses = np.array([[step["loss"] for step in core[run]] for run in ("whole", "resumed")])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)


@pytest.mark.graph
def test_editing_one_sample_leaves_the_logits_of_all_others_bit_equal(core):
    edit = core["edit"]
    assert edit["tokens"] == 2 * 2048
    assert (edit["first_changed"], edit["last_changed"]) == (edit["edited"], edit["end"] - 1)


@pytest.mark.graph
def test_the_monitor_knows_that_a_cpu_takes_each_sink_for_a_pass_over_all_samples(core):
    assert core["planned_with_a_sink"] == 20 * 20


@pytest.mark.graph
def test_the_monitor_finds_what_is_wrong_in_a_network_that_was_built(core):
    assert core["edit"]["faults"] == ["model.model_config.seq_length", "train_dataset.construct_args_key"]


@pytest.mark.graph
def test_mindformers_own_configuration_classes_accept_the_recipe_for_8_devices(core):
    assert core["eight_billion"] == {
        "model": "Qwen3Config",
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "input_layout": "TND",
        "sparse_mode": 3,
        "num_layers": 36,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


@pytest.mark.ranks
def test_two_ranks_of_mindformers_trainer_see_each_sample_once_in_equal_steps(corpus, tmp_path):
    sections = core_sections(corpus, tmp_path / "output") | {
        "mode": "padded",
        "batch": {"rows": 4, "pad_to": "batch"},
        "shapes": {"kind": "range", "divisor": 128},
    }
    sections["model"] |= {
        "variable_seq_lengths": False,
        "config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    }
    sections["train"]["steps"] = 8
    made = mindformers_config(parse_recipe(sections), "llama", Devices())
    made["use_parallel"] = True
    made["callbacks"] = [{"type": "KeepBatches"}, *without("CheckpointMonitor", made)]
    made["train_dataset"]["data_loader"]["steps"] = None  # one epoch
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(made))
    worker = str(ROOT / "tests" / "support" / "bridge_ranks_run.py")
    ranks = (
        "--worker_num=2",
        "--local_worker_num=2",
        f"--master_port={free_port()}",
        f"--log_dir={tmp_path / 'msrun'}",
    )
    run_python(
        tmp_path, sys.executable, "-m", "mindspore.parallel.cluster.run", *ranks, "--join=True", worker, str(tmp_path)
    )
    loader = {k: v for k, v in made["train_dataset"]["data_loader"].items() if k not in ("type", "auto_register")}
    feed = open_feed(loader, made["train_dataset"]["input_columns"], 4, 0, 2)
    fed = [np.load(tmp_path / f"fed_{rank}.npz") for rank in range(2)]
    assert [len(steps.files) // 2 for steps in fed] == [feed.steps, feed.steps]
    table, seen = feed.workload.store.train, []
    for steps in fed:
        for name in [name for name in steps.files if name.startswith("ids_")]:
            for ids, mask in zip(steps[name], steps[name.replace("ids", "mask")], strict=True):
                seen += [tuple(ids[: mask.sum() + 1])] if mask.any() else []
    planned = np.concatenate([feed.sample_ids(step) for step in range(feed.steps)])
    assert sorted(seen) == sorted(tuple(table.tokens(int(sample))) for sample in planned)
    metrics = [json.loads(line) for line in (tmp_path / "output/ms_varlen/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, feed.steps + 1))
    computed = [sum(steps[f"ids_{line['step']}"].size for steps in fed) for line in metrics]
    assert [line["tokens_computed"] for line in metrics] == computed


@pytest.mark.graph
def test_the_defects_of_mindformers_packing_are_shown_by_its_code(tmp_path):
    script = str(ROOT / "scripts" / "measure" / "compare_mindformers_packing.py")
    result = json.loads(run_python(tmp_path, sys.executable, script, "--documents", "200", "--seed", "1", "--json"))
    assert result["ours"]["wrong"] == result["ours_dropped_tokens"] == 0
    assert result["pack"]["wrong"] == result["pack"]["samples"] == 200 - result["overlong"]
    assert result["alpaca_then_pack"]["wrong"] > 0.9 * result["alpaca_then_pack"]["targets"]
    assert result["pack_dropped_tokens"] > 0
    assert result["truncate_rows_without_running_ends"] > 0.5 * result["truncate_rows"]
    assert result["last_end_with_128_samples"] == 1280
    assert result["error_of_a_small_data_set"].startswith("dataset is empty after packing")
    assert result["columns_of_four"] == ["input_ids", "labels", "loss_mask", "position_ids"]
    assert result["pairs_across_samples"] > 0.5
    filled = {name: result[name]["tokens"] / result[name]["places"] for name in ("pack", "ours")}
    assert filled["ours"] > filled["pack"] + 0.05
