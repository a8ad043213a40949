import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_varlen.lengths import SeqLens
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.decoder import CausalLM, CausalLMLoss

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 19}
CONFIGS = {
    "llama": {},
    "llama with grouped key heads and tied embeddings": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama with all biases and a free head size": {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "qwen2": {"architecture": "qwen2", "num_key_value_heads": 1},
    "qwen3": {"architecture": "qwen3", "head_dim": 8, "num_key_value_heads": 2, "rope_theta": 500.0},
}


def make_config(name):
    return DecoderConfig(**SMALL, **CONFIGS[name])


def block_mask(lens):
    """[T, T] bool, True where a token may look: its own sequence, itself and before."""
    same = lens.segment_ids[:, None] == lens.segment_ids[None, :]
    return same & np.tri(lens.tokens, dtype=bool)


def dense_attend(q_TND, k_TND, v_TND, lengths):
    """Causal attention by a dense mask, with MindSpore operators."""
    group = q_TND.shape[1] // k_TND.shape[1]
    q, k, v = (
        x.transpose(1, 0, 2)
        for x in (q_TND, ops.repeat_interleave(k_TND, group, 1), ops.repeat_interleave(v_TND, group, 1))
    )
    scores = ops.matmul(q, k.transpose(0, 2, 1)) * (q_TND.shape[-1] ** -0.5)
    scores = scores + (1.0 - lengths[0].astype(q_TND.dtype)) * -1e4
    return ops.matmul(ops.softmax(scores, -1), v).transpose(1, 0, 2)


def numpy_hidden(weights, config, input_ids, lens):
    """The forward pass in float64, one sequence at a time and one head at a time."""

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.rms_norm_eps) * weights[name + ".weight"]

    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)

    def turn(x, positions):
        half = config.head_dim // 2
        angles = positions[:, None] * config.rope_theta ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(x, prefix):
        q, k, v = (linear(x, f"{prefix}.{name}_proj").reshape(len(x), -1, config.head_dim) for name in "qkv")
        group, positions, heads = q.shape[1] // k.shape[1], np.arange(len(x)), []
        for n in range(q.shape[1]):
            one_q, one_k = q[:, n], k[:, n // group]
            if config.qk_norm:
                one_q, one_k = norm(one_q, f"{prefix}.q_norm"), norm(one_k, f"{prefix}.k_norm")
            scores = turn(one_q, positions) @ turn(one_k, positions).T / np.sqrt(config.head_dim)
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, n // group])
        return linear(np.concatenate(heads, -1), f"{prefix}.o_proj")

    outputs = []
    for ids in np.split(input_ids, lens.actual_seq_qlen[:-1]):
        x = weights["model.embed_tokens.weight"][ids]
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}"
            x = x + attention(norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            h = norm(x, f"{prefix}.post_attention_layernorm")
            gate = linear(h, f"{prefix}.mlp.gate_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
        outputs.append(norm(x, "model.norm"))
    return np.concatenate(outputs)


def numpy_loss(weights, config, input_ids, labels, lens):
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = numpy_hidden(weights, config, input_ids, lens) @ head.T
    log_sums = np.log(np.exp(logits).sum(-1))
    return sum(log_sums[t] - logits[t, label] for t, label in enumerate(labels) if label != -100)


def make_net(config, **kwargs):
    """A net whose every parameter is random, so that a bias or a norm that is not used shows."""
    net = CausalLM(config, 16, dense_attend, **kwargs)
    random = np.random.default_rng(5)
    for parameter in net.get_parameters():
        noise = random.standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(parameter.asnumpy() + np.float32(0.3) * noise))
    return net


def make_batch(seq_lens):
    lens = SeqLens.packed(seq_lens, seq_length=16)
    ids = np.random.default_rng(lens.tokens).integers(0, SMALL["vocab_size"], lens.tokens).astype(np.int32)
    labels = np.append(ids[1:], -100).astype(np.int32)
    labels[lens.actual_seq_qlen - 1] = -100
    return lens, ids, labels, (Tensor(ids), Tensor(labels), Tensor(lens.position_ids), Tensor(block_mask(lens)))


def float64_weights(net):
    return {parameter.name: parameter.asnumpy().astype(np.float64) for parameter in net.get_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_loss_and_gradients_match_plain_numpy(name):
    config = make_config(name)
    net = make_net(config)
    lens, ids, labels, batch = make_batch([5, 1, 3])
    weights = float64_weights(net)
    hidden = net(batch[0], batch[2], (batch[3],)).asnumpy()
    np.testing.assert_allclose(hidden, numpy_hidden(weights, config, ids, lens), rtol=0, atol=2e-5)

    loss_net = CausalLMLoss(net)
    parameters = loss_net.trainable_params()
    loss, gradients = ms.value_and_grad(loss_net, None, parameters)(*batch)
    np.testing.assert_allclose(loss.asnumpy(), numpy_loss(weights, config, ids, labels, lens), rtol=2e-6)
    random = np.random.default_rng(1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = random.standard_normal(parameter.shape)
        values = [
            numpy_loss(
                weights | {parameter.name: weights[parameter.name] + step * direction}, config, ids, labels, lens
            )
            for step in (1e-5, -1e-5)
        ]
        slope = (values[0] - values[1]) / 2e-5
        length = np.linalg.norm(gradient.asnumpy()) * np.linalg.norm(direction)
        assert length > 0, parameter.name
        assert abs((gradient.asnumpy() * direction).sum() - slope) < 2e-5 * length, parameter.name


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_have_the_shapes_that_their_config_says_and_are_fp32(name):
    config = make_config(name)
    parameters = CausalLM(config, 16, dense_attend, compute_dtype=ms.float16).trainable_params()
    assert {parameter.name: parameter.shape for parameter in parameters} == config.parameter_shapes()
    assert {parameter.dtype for parameter in parameters} == {ms.float32}


def test_parameters_have_their_hugging_face_names_and_shapes_in_the_loss_too():
    config = DecoderConfig(**SMALL | {"num_hidden_layers": 1, "architecture": "qwen2", "num_key_value_heads": 2})
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": (19, 16),
        layer + "self_attn.q_proj.weight": (16, 16),
        layer + "self_attn.q_proj.bias": (16,),
        layer + "self_attn.k_proj.weight": (8, 16),
        layer + "self_attn.k_proj.bias": (8,),
        layer + "self_attn.v_proj.weight": (8, 16),
        layer + "self_attn.v_proj.bias": (8,),
        layer + "self_attn.o_proj.weight": (16, 16),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
        layer + "input_layernorm.weight": (16,),
        layer + "post_attention_layernorm.weight": (16,),
        "model.norm.weight": (16,),
        "lm_head.weight": (19, 16),
    }
    loss_net = CausalLMLoss(CausalLM(config, 16, dense_attend))
    assert {parameter.name: parameter.shape for parameter in loss_net.trainable_params()} == expected


def test_a_tied_net_uses_its_embedding_as_output_weight():
    net = CausalLM(DecoderConfig(**SMALL, tie_word_embeddings=True), 16, dense_attend)
    assert net.output_weight is net.model.embed_tokens.weight
    assert "lm_head.weight" not in {parameter.name for parameter in net.get_parameters()}


def test_qwen3_has_norms_of_queries_and_keys_of_one_head():
    net = CausalLM(make_config("qwen3"), 16, dense_attend)
    assert net.model.layers[1].self_attn.q_norm.weight.name == "model.layers.1.self_attn.q_norm.weight"
    assert net.model.layers[1].self_attn.k_norm.weight.shape == (8,)


def test_initial_values_depend_on_seed_and_name_and_on_nothing_else():
    def values(seed=0, **changes):
        net = CausalLM(DecoderConfig(**SMALL | changes), 16, dense_attend, seed=seed)
        return {parameter.name: parameter.asnumpy() for parameter in net.get_parameters()}

    first, other = values(), values(num_hidden_layers=1, tie_word_embeddings=True, attention_bias=True)
    shared = first.keys() & other.keys()
    assert "model.layers.0.mlp.up_proj.weight" in shared
    assert all(np.array_equal(first[name], other[name]) for name in shared)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(first[weight], values(seed=1)[weight])
    assert not np.array_equal(first[weight], first["model.layers.1.mlp.up_proj.weight"])
    assert abs(first["model.embed_tokens.weight"].std() - 0.02) < 0.003
    assert set(first["model.norm.weight"]) == {1.0}
    assert set(other["model.layers.0.self_attn.o_proj.bias"]) == {0.0}


def test_fp16_compute_stays_near_fp32_and_gives_fp32_gradients():
    config = DecoderConfig(**SMALL | {"num_hidden_layers": 1, "architecture": "qwen3"})
    batch = make_batch([5, 3])[3]
    results = []
    for dtype in (ms.float32, ms.float16):
        net = make_net(config, compute_dtype=dtype)
        assert net(batch[0], batch[2], (batch[3],)).dtype == dtype
        loss_net = CausalLMLoss(net)
        loss, gradients = ms.value_and_grad(loss_net, None, loss_net.trainable_params())(*batch)
        assert {gradient.dtype for gradient in gradients} == {ms.float32}
        results.append(float(loss))
    assert abs(results[0] - results[1]) < 5e-3 * results[0]


def test_recompute_runs_each_layer_again_and_changes_no_bit():
    batch = make_batch([5, 3])[3]
    results, calls = [], []

    def counting_attend(*arguments):
        calls[-1] += 1
        return dense_attend(*arguments)

    for recompute in (False, True):
        calls.append(0)
        loss_net = CausalLMLoss(CausalLM(make_config("llama"), 16, counting_attend, recompute=recompute))
        loss, gradients = ms.value_and_grad(loss_net, None, loss_net.trainable_params())(*batch)
        results.append([loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)])
    assert calls == [2, 4]
    assert all(np.array_equal(plain, again) for plain, again in zip(*results, strict=True))


class GradientStep(nn.Cell):
    """Loss and gradients in one graph, as a training step takes them."""

    def __init__(self, loss_net):
        super().__init__(auto_prefix=False)
        self.loss_net = loss_net
        self.value_and_grad = ops.value_and_grad(loss_net, None, ms.ParameterTuple(loss_net.trainable_params()))

    def construct(self, input_ids, labels, position_ids, *lengths):
        return self.value_and_grad(input_ids, labels, position_ids, *lengths)


@pytest.mark.graph
@pytest.mark.parametrize("recompute", [False, True])
def test_one_graph_serves_every_number_of_tokens_and_agrees_with_pynative(recompute):
    config = DecoderConfig(**SMALL | {"num_hidden_layers": 1, "architecture": "qwen3", "num_key_value_heads": 2})
    eager, step = (
        GradientStep(CausalLMLoss(make_net(config))),
        GradientStep(CausalLMLoss(make_net(config, recompute=recompute))),
    )
    tokens = Tensor(shape=[None], dtype=ms.int32)
    step.set_inputs(tokens, tokens, tokens, Tensor(shape=[None, None], dtype=ms.bool_))
    for seq_lens in ([5, 3], [4, 6, 2]):
        batch = make_batch(seq_lens)[3]
        expected_loss, expected = eager(*batch)
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            loss, gradients = step(*batch)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)
        np.testing.assert_allclose(loss.asnumpy(), expected_loss.asnumpy(), rtol=1e-6)
        for actual, reference in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(actual.asnumpy(), reference.asnumpy(), rtol=0, atol=2e-5)
    assert len(step.compile_cache) == 1
