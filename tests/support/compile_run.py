"""A small run for test_compile.py: three cells, compiled in order with the compile cache, then trained.

    python tests/support/compile_run.py '{"cache": "/tmp/cache"}'

Prints one JSON object: state of the cache, number of graphs, losses as hexadecimal floats.
"""

import json
import os
import signal
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_varlen.graph.compile_cache import compile_cache, fingerprint
from ms_varlen.graph.compile_watch import CompileWatch
from ms_varlen.graph.declare import declared_inputs
from ms_varlen.graph.shapes import TokenShapes

COLUMNS = {"input_ids": "T", "actual_seq_qlen": "G", "segment_ids": "T"}


class Net(nn.Cell):
    def __init__(self, hidden, layers):
        super().__init__()
        rng = np.random.default_rng(0)
        self.embedding = Parameter(rng.standard_normal((64, hidden), np.float32), name="embedding")
        weights = rng.standard_normal((layers, hidden, hidden), np.float32) / hidden
        self.weights = ParameterTuple([Parameter(weight, name=f"w{i}") for i, weight in enumerate(weights)])

    def construct(self, input_ids, *lengths):
        hidden = ops.gather(self.embedding, input_ids, 0)
        for weight in self.weights:
            hidden = hidden + ops.tanh(ops.matmul(hidden, weight))
        scale = 1.0 / (1.0 + lengths[1].astype(ms.float32))
        return (hidden.square().mean(-1) * scale).sum() / lengths[0][-1].astype(ms.float32)


class Train(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.params = ParameterTuple(net.trainable_params())
        self.sums = self.params.clone("sum", "zeros")
        self.grad = ops.value_and_grad(net, None, self.params)

    def construct(self, *columns):
        loss, grads = self.grad(*columns)
        for total, grad in zip(self.sums, grads):  # noqa: B905 (MindSpore's compiler knows no strict=)
            ops.assign_add(total, grad)
        return loss


class Apply(nn.Cell):
    def __init__(self, train):
        super().__init__()
        self.params, self.sums = train.params, train.sums

    def construct(self, learning_rate):
        for param, total in zip(self.params, self.sums):  # noqa: B905
            ops.assign_sub(param, learning_rate * total)
            ops.assign(total, ops.zeros_like(total))
        return learning_rate


class Eval(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, *columns):
        return self.net(*columns)


def batch(shapes, tokens):
    ends = np.array([5, tokens // 2, shapes.size_for(tokens)], np.int32)
    segments = np.repeat(np.arange(3, dtype=np.int32), np.diff(ends, prepend=0))
    ids = np.random.default_rng(tokens).integers(0, 64, ends[-1], np.int32)
    return Tensor(ids), Tensor(ends), Tensor(segments)


def main(options):
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    shapes = TokenShapes(options["kind"], 64, 256, 16, max_segments=8)
    net = Net(options["hidden"], options["layers"])
    train = Train(net)
    cells = {"train": train, "apply": Apply(train), "eval": Eval(net)}
    rate = Tensor(0.1, ms.float32)
    inputs = {"train": batch(shapes, 256), "apply": (rate,), "eval": batch(shapes, 256)}
    for role in ("train", "eval"):
        cells[role].set_inputs(*declared_inputs(shapes, COLUMNS))
    watch = CompileWatch({role: (cell,) for role, cell in cells.items()}, dict.fromkeys(cells, 1), max_graphs=3)
    name = fingerprint({key: options[key] for key in ("kind", "hidden", "layers")})
    with compile_cache(options["cache"], name) as cache:
        for role, cell in cells.items():
            cell.compile(*inputs[role])
            watch.check(shapes.describe())
            if role == options["die_after"]:
                os.kill(os.getpid(), signal.SIGKILL)
    losses = []
    for tokens in (70, 256, 133):
        losses += [train(*batch(shapes, tokens)), cells["apply"](rate), cells["eval"](*batch(shapes, tokens))]
    losses_hex = [float(loss.asnumpy()).hex() for loss in losses]
    print(json.dumps({"state": cache.state, "counts": watch.check("a batch"), "losses": losses_hex}))


if __name__ == "__main__":
    main({"kind": "range", "hidden": 16, "layers": 2, "die_after": None, "cache": "off"} | json.loads(sys.argv[1]))
