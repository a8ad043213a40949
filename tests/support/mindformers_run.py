"""MindFormers' own models on the CPU, as a program: `python mindformers_run.py llama|qwen3 JOBS.json`.

A job has a `yaml` (`mindformers_model.yaml`), a `checkpoint`, token `ids` and an `output` for the logits and the
optimizer's moments after loading. With `save`, both are also saved to that folder as MindFormers does.
"""

import json
import logging
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import yaml
from mindspore import nn, ops

KIND, JOBS = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
FLOATS = dict.fromkeys(("compute_dtype", "rotary_dtype"), "float32")

ms.set_device("CPU")
from mindformers.core.context.build_context import build_context  # noqa: E402

build_context(
    {
        "use_legacy": KIND == "llama",
        "run_mode": "train",
        "use_parallel": False,
        "context": {"mode": 1 if KIND == "llama" else 0, "device_target": "CPU"},
        "parallel": {},
        "parallel_config": {},
    }
)
from mindformers.core.optim import AdamW  # noqa: E402


def llama(section):
    from mindformers.models.llama import LlamaConfig, LlamaForCausalLM

    section.pop("type")
    dtypes = dict.fromkeys(("param_init_type", "softmax_compute_type", "layernorm_compute_type"), "float32")
    return LlamaForCausalLM(
        LlamaConfig(
            **section,
            **FLOATS,
            **dtypes,
            pad_token_id=0,
            use_flash_attention=False,
            fused_rms_norm=False,
            use_rope_slice=True,
            input_sliced_sig=True,
            use_past=False,
        )
    )


class PlainAttention(nn.Cell):
    """FlashAttentionScore has no CPU kernel; inputs are [S, B, N, D]."""

    def __init__(self, config, layer_number, **_):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.repeats = config.num_attention_heads // (config.num_query_groups or config.num_attention_heads)

    def construct(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                  packed_seq_params=None, alibi_mask=None, prefix=None, padding_mask=None, actual_seq_qlen=None,
                  actual_seq_kvlen=None):  # fmt: skip
        s, b, n, d = query.shape
        q = query.transpose(1, 2, 0, 3).astype(ms.float32)
        k = ops.repeat_interleave(key.transpose(1, 2, 0, 3).astype(ms.float32), self.repeats, 1)
        v = ops.repeat_interleave(value.transpose(1, 2, 0, 3).astype(ms.float32), self.repeats, 1)
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) * self.scale + attention_mask.astype(ms.float32) * -1e9
        return ops.matmul(ops.softmax(scores, -1), v).transpose(2, 0, 1, 3).reshape(s, b, n * d)


class NoHalf(nn.Cell):
    """Attention casts to fp16 whatever the config says; in fp32 the numbers can be compared."""

    def construct(self, x, dtype):
        return x if dtype == ms.float16 else ops.cast(x, dtype)


class PlainOuter(nn.Cell):
    """Outer has no CPU kernel."""

    def construct(self, x, y):
        return ops.mul(ops.reshape(x, (-1, 1)), ops.reshape(y, (1, -1)))

    def shard(self, *_, **__):
        return self


def plain_embedding(self, ids, weight):
    """Embedding has no CPU kernel for its gradient."""
    batch, length = ids.shape
    return ops.reshape(ops.gather(weight, ops.reshape(ids, (-1,)), 0), (batch, length, weight.shape[-1]))


def qwen3(section):
    import mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding as rotary
    import mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs as specs
    import mindformers.parallel_core.training_graph.tensor_parallel.layers as layers
    import mindformers.parallel_core.training_graph.transformer.norm as norm

    norm.FusedRMSNorm = norm.RMSNorm  # RmsNorm has no CPU kernel
    specs.FlashAttention, rotary.Outer = PlainAttention, PlainOuter
    layers.VocabParallelEmbedding.embedding_func = plain_embedding
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM

    dtypes = dict.fromkeys(("params_dtype", "softmax_compute_dtype", "layernorm_compute_dtype"), "float32")
    section.pop("model_type", None)
    config = Qwen3Config(**section, **FLOATS, **dtypes, pad_token_id=0, hidden_dropout=0.0, attention_dropout=0.0)
    net = TrainingQwen3ForCausalLM(config)
    for layer in net.model.decoder.layers:
        layer.self_attention.cast = NoHalf()
    return net


def run(job):
    section = yaml.safe_load(Path(job["yaml"]).read_text())["model"]["model_config"]
    net = {"llama": llama, "qwen3": qwen3}[KIND](section)
    optimizer = AdamW(net.trainable_params(), learning_rate=1e-3)
    if KIND == "llama":
        values = ms.load_checkpoint(job["checkpoint"], format="safetensors")
        missing, _ = ms.load_param_into_net(net, values, strict_load=True)
        assert not missing, missing
        if "global_step" in values:
            missing, _ = ms.load_param_into_net(optimizer, values, strict_load=True)
            assert not [name for name in missing if name.startswith("adam")], missing
    else:
        from mindformers.checkpoint.checkpoint import load_checkpoint

        load_checkpoint(job["checkpoint"], net, optimizer)
    net.set_train(False)
    found = net(ms.Tensor(np.array([job["ids"]], np.int32)))
    logits = (found[0] if isinstance(found, tuple) else found).asnumpy()
    moments = {p.name: p.asnumpy() for p in (*optimizer.exp_avg, *optimizer.exp_avg_sq)}
    moments["global_step"] = optimizer.global_step.asnumpy()
    np.savez(job["output"], logits=logits.reshape(len(job["ids"]), -1), **moments)
    if "save" in job:
        save(net, optimizer, Path(job["save"]))


def save(net, optimizer, folder):
    if KIND == "llama":
        values = {p.name: p for p in (*net.get_parameters(), *optimizer.get_parameters())}
        values |= {"epoch_num": ms.Parameter(ms.Tensor(1), name="epoch_num")}
        (folder / "rank_0").mkdir(parents=True)
        for kind in ("safetensors", "ckpt"):
            ms.save_checkpoint(values, str(folder / "rank_0" / f"tiny_rank_0-1_30.{kind}"), format=kind)
        return
    from mindformers.checkpoint.checkpoint import CommonInfo, save_checkpoint

    common = CommonInfo(epoch_num=1, step_num=30, global_step=30, loss_scale=1.0, global_batch_size=1)
    save_checkpoint(30, net, optimizer, common_info=common, user_prefix="tiny", save_checkpoint_path=str(folder))


logging.disable(logging.INFO)
for each in JOBS:
    run(each)
