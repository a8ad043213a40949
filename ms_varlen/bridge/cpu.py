"""What stands in on the CPU for MindFormers' operators that have no CPU kernel; nothing of this runs on an NPU.

| MindFormers | stand-in |
|---|---|
| `FlashAttention` (`FlashAttentionScore`, TND) | `varlen_attention`, fed with the same `actual_seq_len` |
| `FusedRMSNorm` | MindFormers' own `RMSNorm` |
| `Outer` of the rotary angles | a product of reshaped tensors |
| `Embedding` of `VocabParallelEmbedding` (its gradient) | `Gather` |
| overflow flag of `MFTrainOneStepCell` | none: fp32 needs none |

MindFormers casts q, k and v to fp16 before its attention call, on the CPU too, so losses differ from fp32 by rounding.
"""

import mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding as rotary
import mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs as layer_specs
import mindformers.parallel_core.training_graph.tensor_parallel.layers as parallel_layers
import mindformers.parallel_core.training_graph.transformer.norm as norm
import mindspore as ms
from mindformers.tools.logger import logger
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import nn, ops

from ms_varlen.errors import VarlenError
from ms_varlen.ops.attention import varlen_attention
from ms_varlen.ops.kernels import load_kernels


class TndAttention(nn.Cell):
    """`varlen_attention` in the place of MindFormers' `FlashAttention` with `input_layout` TND.

    The ends of a micro-batch are filled up with T; our kernel takes such empty segments.
    """

    def __init__(self, config, layer_number, **kwargs):
        super().__init__()
        if config.input_layout != "TND" or config.attention_dropout:
            raise VarlenError(
                "attention on the CPU must be TND without dropout, got "
                f"{config.input_layout} and attention_dropout {config.attention_dropout}; set "
                "train_dataset.data_loader.create_compressed_eod_mask: True and attention_dropout: 0.0"
            )

    def construct(self, query, key, value, attention_mask, actual_seq_qlen=None, actual_seq_kvlen=None):
        """[T, N, D], [T, n, D] twice, and running ends [G] int32 -> [T, N, D]; the mask is not needed."""
        return varlen_attention(query, key, value, (actual_seq_qlen,))


class OuterProduct(nn.Cell):
    """[n] and [m] -> [n, m]."""

    def construct(self, x, y):
        """The product of each entry of `x` with each of `y`."""
        return ops.reshape(x, (-1, 1)) * ops.reshape(y, (1, -1))

    def shard(self, *strategies, **kwargs):
        """One device holds all."""
        return self


def gather_embedding(self, input_ids, weight):
    """Rows of `weight` [V, H] for ids [B, S] -> [B, S, H]; a method: MindSpore compiles it with a parameter `self`."""
    batch, length = input_ids.shape
    return ops.reshape(ops.gather(weight, ops.reshape(input_ids, (-1,)), 0), (batch, length, weight.shape[-1]))


def substitute_for_cpu() -> None:
    """Put the stand-ins in place, before MindFormers builds a network.

    Raises:
        VarlenError: the device is no CPU, or there is no compiler for our kernels.
    """
    target = ms.get_context("device_target")
    if target != "CPU":
        raise VarlenError(f"stand-ins must run on a CPU alone, got {target}; do not call substitute_for_cpu there")
    if not load_kernels():
        raise VarlenError("TND attention on the CPU must have our C++ kernels, found no compiler; install g++")
    layer_specs.FlashAttention = TndAttention
    norm.FusedRMSNorm = norm.RMSNorm
    rotary.Outer = OuterProduct
    parallel_layers.VocabParallelEmbedding.embedding_func = gather_embedding
    made = MFTrainOneStepCell.__init__

    def init_without_overflow_flag(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.ascend_910b_target, self.enable_allfinite = True, False

    if made.__name__ != init_without_overflow_flag.__name__:
        MFTrainOneStepCell.__init__ = init_without_overflow_flag
    logger.warning(
        "CPU: varlen_attention stands in for FlashAttentionScore, and RMSNorm, Outer, Embedding and the overflow flag "
        "of MindFormers have stand-ins too; an NPU uses none of them"
    )
