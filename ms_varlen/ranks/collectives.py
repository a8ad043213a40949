"""The collectives of a step as cells: HCCL on Ascend, MindSpore's own on the CPU. All of them have fixed shapes."""

import numpy as np
from mindspore import Tensor, nn, ops


class SumOverRanks(nn.Cell):
    """The sum of a tensor over all ranks; every rank gets the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        """A tensor -> a tensor of its shape."""
        return self.all_reduce(x)


class GatherOverRanks(nn.Cell):
    """The words of all ranks, one rank after another."""

    def __init__(self) -> None:
        super().__init__()
        self.all_gather = ops.AllGather()

    def construct(self, words):
        """[n] int32 -> [R * n] int32."""
        return self.all_gather(words)


def gather_words(words: np.ndarray) -> np.ndarray:
    """[n] int32 (host) of this rank -> [R, n] int32 (host) of all."""
    return GatherOverRanks()(Tensor(words)).asnumpy().reshape(-1, words.size)
