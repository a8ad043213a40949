"""A causal decoder on flat tokens: Llama, Mistral, Qwen2 and Qwen3.

Axes: `T` tokens, `H` hidden size, `N` heads, `D` head size, `V` vocabulary. There is no batch axis: a token knows its
position, and only attention looks at lengths. Parameters are fp32 under their Hugging Face names and are cast to the
compute dtype where they are used, so a checkpoint of one is a checkpoint of the other.
"""

import functools
import zlib
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.rope import rotary_frequencies
from ms_varlen.ops.activation import swiglu
from ms_varlen.ops.loss import linear_cross_entropy
from ms_varlen.ops.norm import add_rms_norm, rms_norm
from ms_varlen.ops.rotary import rotary

Attend = Callable[[Tensor, Tensor, Tensor, tuple], Tensor]
"""attend(q_TND, k_TND, v_TND, lengths) -> out_TND; the key heads divide the query heads."""


def _parameter(*shape: int) -> Parameter:
    """A place for values that `CausalLM` fills in when all names are known."""
    return Parameter(Tensor(np.zeros(shape, np.float32)))


class RMSNorm(nn.Cell):
    """RMS normalisation of the last axis, [..., size], with a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """`x + update`, and its norm."""
        return add_rms_norm(x, update, self.weight, self.eps)


class Linear(nn.Cell):
    """x @ weight.T + bias in the dtype of x; x is [T, inputs], weight [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, has_bias: bool):
        super().__init__()
        self.weight = _parameter(outputs, inputs)
        self.bias = _parameter(outputs) if has_bias else None
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        y = self.matmul(x, ops.cast(self.weight, x.dtype))
        return y if self.bias is None else ops.bias_add(y, ops.cast(self.bias, x.dtype))


class Embedding(nn.Cell):
    """Rows of a table: ids [T] int32 -> [T, H]."""

    def __init__(self, size: int, hidden_size: int):
        super().__init__()
        self.weight = _parameter(size, hidden_size)

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class SelfAttention(nn.Cell):
    """Projections, rotary positions and `attend`: [T, H] -> [T, H]."""

    def __init__(self, config: DecoderConfig, attend: Attend):
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(hidden, heads * head_dim, bias)
        self.k_proj = Linear(hidden, key_heads * head_dim, bias)
        self.v_proj = Linear(hidden, key_heads * head_dim, bias)
        self.o_proj = Linear(heads * head_dim, hidden, config.attention_output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.q_shape, self.k_shape = (-1, heads, head_dim), (-1, key_heads, head_dim)
        self.out_shape = (-1, heads * head_dim)
        self.attend = attend

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: tuple) -> Tensor:
        q_TND = ops.reshape(self.q_proj(x), self.q_shape)
        k_TND = ops.reshape(self.k_proj(x), self.k_shape)
        v_TND = ops.reshape(self.v_proj(x), self.k_shape)
        if self.qk_norm:
            q_TND, k_TND = self.q_norm(q_TND), self.k_norm(k_TND)
        out_TND = self.attend(rotary(q_TND, cos, sin), rotary(k_TND, cos, sin), v_TND, lengths)
        return self.o_proj(ops.reshape(out_TND, self.out_shape))


class MLP(nn.Cell):
    """The gated feed-forward block: [T, H] -> [T, H]."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def construct(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Cell):
    """Attention and feed-forward block, each after a norm, with a residual path.

    The last update is left to whoever adds it: [T, H] and its pending update -> the same. Adding goes with the norm
    that follows, in one pass over memory.
    """

    def __init__(self, config: DecoderConfig, attend: Attend):
        super().__init__()
        self.self_attn = SelfAttention(config, attend)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(
        self, x: Tensor, update: Tensor | None, cos: Tensor, sin: Tensor, *lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        # One by one: PyNative refuses to recompute a cell that is given a tuple of tensors.
        if update is None:
            normed = self.input_layernorm(x)
        else:
            x, normed = self.input_layernorm.after_adding(x, update)
        x, normed = self.post_attention_layernorm.after_adding(x, self.self_attn(normed, cos, sin, lengths))
        return x, self.mlp(normed)


def rotary_tables(config: DecoderConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [positions, D/2] fp32 (host), computed in float64."""
    frequencies = rotary_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    angles = np.outer(np.arange(positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class DecoderStack(nn.Cell):
    """Embedding, layers and final norm: what Hugging Face names `model`."""

    def __init__(self, config: DecoderConfig, positions: int, attend: Attend, compute_dtype: ms.dtype, recompute: bool):
        super().__init__()
        assert config.vocab_size is not None, "DecoderConfig.with_vocab_size comes first"
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.CellList([DecoderLayer(config, attend) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.compute_dtype = compute_dtype
        # Constants, not Parameters: a checkpoint has no array as long as the context.
        self.cos, self.sin = (Tensor(table) for table in rotary_tables(config, positions))
        if recompute:
            for layer in self.layers:
                layer.recompute()

    def construct(self, input_ids: Tensor, position_ids: Tensor, lengths: tuple) -> Tensor:
        x = ops.cast(self.embed_tokens(input_ids), self.compute_dtype)
        cos = ops.cast(ops.gather(self.cos, position_ids, 0), self.compute_dtype)
        sin = ops.cast(ops.gather(self.sin, position_ids, 0), self.compute_dtype)
        update = None
        for layer in self.layers:
            x, update = layer(x, update, cos, sin, *lengths)
        return self.norm.after_adding(x, update)[1]


def initial_value(name: str, shape: tuple[int, ...], std: float, seed: int) -> np.ndarray:
    """The first value of one parameter, fp32 (host): a function of its name, so no other parameter moves it.

    Norm weights are 1, biases 0, the rest normal(0, `std`).
    """
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return random.standard_normal(shape, np.float32) * np.float32(std)


class CausalLM(nn.Cell):
    """Hidden states of a causal language model, and the weight that turns them into logits.

    Args:
        config: the decoder, with its `vocab_size` known.
        max_position_embeddings: positions are below this.
        attend: causal attention inside each sequence, told the `lengths` that `construct` was given.
        compute_dtype: float32, float16 or bfloat16; norms and the loss compute in fp32 always.
        recompute: compute each layer again in the backward pass, which keeps only the layers' inputs in memory.
        seed: of the initial weights.
        initial: ``initial(name, shape)`` gives a parameter's first value, fp32 (host); by default random, of `seed`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        max_position_embeddings: int,
        attend: Attend,
        compute_dtype: ms.dtype = ms.float32,
        recompute: bool = False,
        seed: int = 0,
        initial: Callable[[str, tuple[int, ...]], np.ndarray] | None = None,
    ):
        super().__init__()
        self.model = DecoderStack(config, max_position_embeddings, attend, compute_dtype, recompute)
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, self.model.embed_tokens.weight.shape[0], has_bias=False)
        initial = initial or functools.partial(initial_value, std=config.initializer_range, seed=seed)
        for name, parameter in self.parameters_and_names():
            parameter.set_data(Tensor(initial(name, parameter.shape)))

    @property
    def output_weight(self) -> Parameter:
        """[V, H] fp32: `lm_head.weight`, or the embedding when they are tied."""
        return self.model.embed_tokens.weight if self.tied else self.lm_head.weight

    def construct(self, input_ids: Tensor, position_ids: Tensor, lengths: tuple) -> Tensor:
        """
        Args:
            input_ids: [T] int32, each in [0, V).
            position_ids: [T] int32, each in [0, max_position_embeddings), restarting with every sequence.
            lengths: a tuple of tensors, handed to `attend`.
        Returns:
            [T, H] in the compute dtype, after the final norm.
        """
        return self.model(input_ids, position_ids, lengths)


class CausalLMLoss(nn.Cell):
    """The summed token loss of a `CausalLM`; its parameters keep the names they have there."""

    def __init__(self, net: CausalLM):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, *lengths: Tensor) -> Tensor:
        """
        Args:
            input_ids, labels, position_ids: [T] int32; a label of -100 has no loss.
            lengths: tensors, handed to `attend` as one tuple.
        Returns:
            () fp32, the sum over supervised tokens.
        """
        hidden = self.net(input_ids, position_ids, lengths)
        return linear_cross_entropy(hidden, self.net.output_weight, labels)
