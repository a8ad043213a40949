"""Our decoder against transformers' own, from the folder that `save_pretrained` writes: a recipe reads both."""

import dataclasses
import functools
import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.graphs import TrainingGraphs
from ms_varlen.workload.workload import prepare

torch = pytest.importorskip("torch", reason="parity needs torch, which the test extra brings")
transformers = pytest.importorskip("transformers", reason="parity needs transformers, which the test extra brings")

TEXTS = ["to be, or not", "x", "that is the question", "whether 'tis nobler in the mind to suffer"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": 260,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama, tied, all biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3 scaling, heads of 10": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 10}),
    "llama, linear scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral, heads of 18": ("mistral", {"sliding_window": 64, "head_dim": 18}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3, heads of 10": ("qwen3", {"head_dim": 10, "num_key_value_heads": 4}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "head_dim": 8, "attention_bias": True}),
}
TOLERANCE = 1e-4
"""Relative, of fp32 sums in another order."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What transformers computes: logits [sum of lengths, V], the summed loss, gradients by name; and its folder."""

    folder: Path
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """By name, a random model of transformers run on each text alone, in fp32."""
    torch.set_num_threads(1)  # tiny matrices; more threads only wait for each other

    @functools.cache
    def run(name):
        family, fields = MODELS[name]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**SIZES, **fields})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():  # noisy, so that a bias or a norm that is not used shows
                parameter.add_(0.1 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder, max_shard_size="20KB")
        logits, loss = [], 0.0
        for text in TEXTS:
            tokens = torch.tensor([*text.encode(), 256])  # 256 is the byte tokenizer's end-of-text
            output = model(input_ids=tokens[None]).logits[0]
            summed = torch.nn.functional.cross_entropy(output[:-1], tokens[1:], reduction="sum")
            summed.backward()
            logits.append(output.detach().numpy())
            loss += float(summed.detach())
        gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
        return Theirs(folder, np.concatenate(logits), loss, gradients)

    return run


def our_graphs(folder, source, mode):
    recipe = {
        "mode": mode,
        "data": {"source": str(source), "tokenizer": "bytes", "eval_fraction": 0.0, "store_dir": str(source.parent)},
        "batch": {"rows": 4} if mode == "padded" else {"token_budget": 128},
        "shapes": {"divisor": 16},
        "model": {
            "config": str(folder),
            "init_from": str(folder),
            "variable_seq_lengths": mode != "padded",
            "seq_length": 64,
            "max_position_embeddings": 64,
        },
        "train": {"steps": 1, "learning_rate": 1e-3},
        "graph": {"mode": "pynative"},
        "checkpoint": {"output_dir": str(folder / "output")},
    }
    workload = prepare(parse_recipe(recipe))
    return workload, TrainingGraphs(workload, "CPU")


def assert_close(actual, expected, name):
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max(), name


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_match_transformers(name, theirs, body, source):
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    expected = theirs(name)
    for mode in ("varlen", "padded"):
        workload, graphs = our_graphs(expected.folder, source, mode)
        table, ids = workload.store.train, np.arange(len(TEXTS))
        batches = MicroBatches(table, workload.layout, workload.store.pad_id, graphs.attention.columns)
        columns = batches.micro_batch(ids)
        assert float(graphs.accumulate(columns).asnumpy()) == pytest.approx(expected.loss, rel=TOLERANCE)
        net = graphs.accumulate_cell.net.net
        lengths = tuple(ms.Tensor(columns[key]) for key in graphs.attention.declared(workload.shapes))
        hidden = net(ms.Tensor(columns["input_ids"]), ms.Tensor(columns["position_ids"]), lengths).asnumpy()
        slots = workload.layout.place(table.lengths[ids]).token_slots
        assert_close(hidden[slots] @ net.output_weight.asnumpy().T, expected.logits, "logits")
        gradients = graphs.gradients()
        assert gradients.keys() == expected.gradients.keys()
        for key, gradient in expected.gradients.items():
            assert np.abs(gradient).max() > 0, key
            assert_close(gradients[key], gradient, key)
