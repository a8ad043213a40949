"""MindFormers 1.9's Llama as a contender of the bench: padded rows in graph mode.

    padded      rows of seq_length, one static graph
    batch       rows as long as the longest of the step, rounded up to the divisor, one dynamic graph

The net and its loss are MindFormers'; gradients are summed over micro-batches and applied by our own cells, so that the
losses can be compared, and because its scores are dense: 2 rows of 2,048 take 8.8 GB.
"""

import importlib.metadata
import logging
import time
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

ms.set_device("CPU")  # before MindFormers makes its context

from mindformers.core.context.build_context import build_context  # noqa: E402

build_context(
    {
        "use_legacy": True,
        "run_mode": "train",
        "use_parallel": False,
        "context": {"mode": 0, "device_target": "CPU"},
        "parallel": {},
        "parallel_config": {},
    }
)

from mindformers.models.llama import LlamaConfig, LlamaForCausalLM  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from ms_varlen.diagnose.bench.contenders import (  # noqa: E402
    Sample,
    bench_workload,
    num_targets,
    samples_of,
    step_parts,
)
from ms_varlen.diagnose.bench.process import Answer, Reply, peak_rss_mb  # noqa: E402
from ms_varlen.errors import RecipeError  # noqa: E402
from ms_varlen.graph.shapes import round_up  # noqa: E402
from ms_varlen.limits import IGNORE_INDEX  # noqa: E402
from ms_varlen.models.config import DecoderConfig  # noqa: E402
from ms_varlen.recipe.recipe import Recipe, parse_recipe  # noqa: E402
from ms_varlen.train.step import AccumulateGradients, ApplyGradients  # noqa: E402

ROWS = 2
"""Rows of a micro-batch."""

NAMES = (
    ("model.embed_tokens.weight", "model.tok_embeddings.embedding_weight"),
    ("model.norm.weight", "model.norm_out.weight"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)
"""Parts of Hugging Face's parameter names and what MindFormers' legacy Llama calls them."""


def legacy_name(name: str) -> str:
    """MindFormers' name of a parameter."""
    for theirs, legacy in NAMES:
        name = name.replace(theirs, legacy)
    return name


class SummedLoss(nn.Cell):
    """MindFormers' mean loss times the number of tokens that it is the mean of."""

    def __init__(self, net: nn.Cell):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, input_ids, labels, position_ids):
        return self.net(input_ids, labels) * (labels != IGNORE_INDEX).astype(ms.float32).sum()


def build_net(recipe: Recipe, config: DecoderConfig, dynamic: bool, weights: str) -> nn.Cell:
    """Their net, with our initial weights."""
    biases = config.attention_bias or config.mlp_bias
    if config.architecture != "llama" or config.tie_word_embeddings or biases or config.rope_scaling:
        raise RecipeError(
            ["model.config: must be a plain llama for MindFormers (no biases, tied embeddings or rotary scaling)"]
        )
    f32 = "float32"
    net = LlamaForCausalLM(
        LlamaConfig(
            batch_size=ROWS,
            seq_length=recipe.model.seq_length,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            max_position_embedding=recipe.model.seq_length,
            rms_norm_eps=config.rms_norm_eps,
            theta=config.rope_theta,
            # No id at all: it hides every token that has it, also real ones (an end-of-text that pads, too), from
            # attention and loss. Pads stand at the right and have no label, so that nothing sees them.
            pad_token_id=-1,
            ignore_token_id=IGNORE_INDEX,
            use_flash_attention=False,  # it and the fused norm have no CPU kernel
            fused_rms_norm=False,
            use_rope_slice=True,
            input_sliced_sig=True,
            use_past=False,
            is_dynamic=dynamic,
            compute_dtype=f32,
            param_init_type=f32,
            softmax_compute_type=f32,
            layernorm_compute_type=f32,
            rotary_dtype=f32,
        )
    )
    values = {legacy_name(name): value for name, value in load_file(weights).items()}
    for name, parameter in net.parameters_and_names():
        parameter.set_data(Tensor(values[name]))
    return net


class MindFormersContender:
    """Runs steps of padded rows."""

    def __init__(self, settings: Mapping[str, Any]):
        logging.disable(logging.INFO)
        recipe = parse_recipe(settings["recipe"])
        workload = bench_workload(recipe)
        self.table, self.pad_id = workload.store.train, workload.store.pad_id
        self.steps = [np.concatenate(step) for step in step_parts(workload, settings["steps"])]
        self.dynamic, self.seq_length = settings["variant"] == "batch", recipe.model.seq_length
        self.divisor = recipe.shapes.divisor
        net = build_net(recipe, workload.model_config, self.dynamic, settings["weights"])
        self.accumulate = AccumulateGradients(SummedLoss(net))
        self.apply = ApplyGradients(self.accumulate.weights, self.accumulate.accumulated, recipe.train)
        self.accumulate.set_train()
        if self.dynamic:
            rows = Tensor(shape=(None, None), dtype=ms.int32)
            self.accumulate.set_inputs(rows, rows, Tensor(shape=(1,), dtype=ms.int32))

    def ready(self) -> Reply:
        """Versions."""
        return {"versions": {"mindspore": ms.__version__, "mindformers": importlib.metadata.version("mindformers")}}

    def step(self, index: int, rate: float) -> Reply:
        """Train on a step, its micro-batches at hand: seconds and loss per token."""
        ids = self.steps[index]
        samples = samples_of(self.table, ids)
        longest = int(self.table.lengths[ids].max())
        length = round_up(longest, self.divisor) if self.dynamic else self.seq_length
        batches = [padded_rows(samples[at : at + ROWS], length, self.pad_id) for at in range(0, ids.size, ROWS)]
        supervised = num_targets(samples)
        unused = Tensor(np.zeros(1, np.int32))
        begin = time.perf_counter()
        losses = [self.accumulate(*map(Tensor, batch), unused) for batch in batches]
        loss_sum = sum(float(loss.asnumpy()) for loss in losses)
        norm, _ = self.apply(*(Tensor(value, ms.float32) for value in (rate, supervised, loss_sum, 0.0)))
        norm.asnumpy()
        return {"seconds": time.perf_counter() - begin, "loss": loss_sum / supervised}

    def finish(self) -> Reply:
        """The most memory held."""
        return {"peak_rss_mb": peak_rss_mb()}


def padded_rows(samples: list[Sample], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and shifted labels, [ROWS, length] int32 each."""
    inputs = np.full((ROWS, length), pad_id, np.int32)
    labels = np.full((ROWS, length), IGNORE_INDEX, np.int32)
    for row, (tokens, targets) in enumerate(samples):
        inputs[row, : tokens.size] = tokens
        labels[row, : tokens.size - 1] = targets[1:]
    return inputs, labels


def start(settings: dict[str, Any]) -> dict[str, Answer]:
    """The commands of a MindFormers contender."""
    contender = MindFormersContender(settings)
    return {"ready": contender.ready, "step": contender.step, "finish": contender.finish}
