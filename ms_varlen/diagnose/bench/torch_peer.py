"""PyTorch and transformers as a contender of the bench: the same net, weights and samples, in four ways.

    padded      rows padded to the longest of the micro-batch, causal SDPA
    packed      one row, SDPA with a dense block-diagonal mask
    segments    one row, causal SDPA called for each segment
    each        one sequence at a time, gradients summed

AdamW (fused), clipping and the learning rate are those of the recipe; losses show that the nets are the same. Padded
rows need no mask: causal attention keeps real tokens from the pads at the right, and pads have no label.
"""

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from ms_varlen.diagnose.bench.contenders import Sample, bench_workload, num_targets, samples_of, step_parts
from ms_varlen.diagnose.bench.process import Answer, Reply, peak_rss_mb
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import hugging_face_config
from ms_varlen.recipe.recipe import parse_recipe

Inputs = dict[str, Any]

_segment_lengths: list[int] = []


def segments_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Causal SDPA for each segment of `_segment_lengths`; query [1, N, T, D], returns [1, T, N, D]."""
    parts = zip(*(tensor.split(_segment_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def build_model(config: DecoderConfig, positions: int, attention: str) -> torch.nn.Module:
    """The decoder as transformers has it."""
    values = hugging_face_config(config, positions)
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    return AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention)


class TorchContender:
    """Runs steps in one of the four ways."""

    def __init__(self, settings: Mapping[str, Any]):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        AttentionInterface.register("segments", segments_attention)
        recipe = parse_recipe(settings["recipe"])
        workload = bench_workload(recipe)
        self.table, self.pad_id = workload.store.train, workload.store.pad_id
        self.parts = step_parts(workload, settings["steps"])
        self.train = recipe.train
        self.inputs = {
            "padded": padded_inputs,
            "packed": packed_inputs,
            "segments": segments_inputs,
            "each": each_inputs,
        }[settings["variant"]]
        attention = "segments" if settings["variant"] == "segments" else "sdpa"
        self.model = build_model(workload.model_config, recipe.model.seq_length, attention)
        weights = load_file(settings["weights"])
        tied = {"lm_head.weight"} if workload.model_config.tie_word_embeddings else set()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - tied:
            raise RuntimeError(f"weights must fit transformers' names, got {missing} missing, {unexpected} unknown")
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.train.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (self.train.beta1, self.train.beta2)
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=self.train.eps, fused=True)

    def ready(self) -> Reply:
        """Versions and threads."""
        return {"versions": {"torch": torch.__version__}, "threads": torch.get_num_threads()}

    def step(self, index: int, rate: float) -> Reply:
        """Train on a step, its inputs at hand: seconds and loss per token."""
        samples = [samples_of(self.table, ids) for ids in self.parts[index]]
        supervised = num_targets(itertools.chain.from_iterable(samples))
        micro_batches = [inputs for part in samples for inputs in self.inputs(part, self.pad_id)]
        begin = time.perf_counter()
        loss = 0.0
        for inputs in micro_batches:
            _segment_lengths[:] = inputs.pop("segment_lengths", [])
            output = self.model(**inputs, num_items_in_batch=supervised)
            output.loss.backward()
            loss += float(output.loss.detach())
        if self.train.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - begin, "loss": loss}

    def finish(self) -> Reply:
        """The most memory held."""
        return {"peak_rss_mb": peak_rss_mb()}


def padded_inputs(samples: list[Sample], pad_id: int) -> list[Inputs]:
    """One batch of rows; labels are not shifted, transformers does that."""
    shape = (len(samples), max(tokens.size for tokens, _ in samples))
    ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    for row, (tokens, targets) in enumerate(samples):
        ids[row, : tokens.size], labels[row, : tokens.size] = tokens, targets
    return [{"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}]


def segments_inputs(samples: list[Sample], pad_id: int) -> list[Inputs]:
    """One row of all samples, and their lengths."""
    lengths = [tokens.size for tokens, _ in samples]
    ids, labels = (torch.from_numpy(np.concatenate(rows).astype(np.int64))[None] for rows in zip(*samples, strict=True))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return [{"input_ids": ids, "labels": labels, "position_ids": positions, "segment_lengths": lengths}]


def packed_inputs(samples: list[Sample], pad_id: int) -> list[Inputs]:
    """One row of all samples, and a mask [1, 1, T, T] that is true where a query sees a key."""
    (inputs,) = segments_inputs(samples, pad_id)
    lengths = torch.tensor(inputs.pop("segment_lengths"))
    segment = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    mask = (segment[:, None] == segment[None, :]).tril_()
    return [inputs | {"attention_mask": mask[None, None]}]


def each_inputs(samples: list[Sample], pad_id: int) -> list[Inputs]:
    """A batch for each sample."""
    return [inputs for sample in samples for inputs in padded_inputs([sample], pad_id)]


def start(settings: dict[str, Any]) -> dict[str, Answer]:
    """The commands of a PyTorch contender."""
    contender = TorchContender(settings)
    return {"ready": contender.ready, "step": contender.step, "finish": contender.finish}
