"""The training cost of a sequence, so that plans balance work instead of counting samples.

A decoder does work that grows with the tokens (its matrix products) and work that grows with their square (causal
attention). For hidden size 4096 and the usual shapes, the two are equal at a length of about 49,000 tokens.
"""

import dataclasses
from typing import Protocol

import numpy as np


class DecoderSizes(Protocol):
    """The sizes of a decoder that decide its cost, named as in a Hugging Face `config.json`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class CostModel:
    """FLOPs to train on one sequence of s tokens: ``linear * s + quadratic * s * s``.

    Attributes:
        linear: FLOPs per token.
        quadratic: FLOPs per token and token.
    """

    linear: float
    quadratic: float

    @classmethod
    def of_decoder(cls, sizes: DecoderSizes) -> "CostModel":
        """The cost of a decoder with a gated MLP.

        Forward, a weight costs 2 FLOPs a token (multiply, add), and attention 4 ND FLOPs per pair of query and key
        (scores, weighted sum of values) over s*s/2 causal pairs. Backward costs twice as much, so::

            linear    = 6 * (layers * (H * (2 N D + 2 K D) + 3 H F) + H V)
            quadratic = 6 * layers * N D

        with hidden size H, N heads and K key heads of size D, intermediate size F, vocabulary V. The output product is
        counted and the embedding is not (it is a look-up), tied or not. Norms, biases, rotary embedding, the softmax
        and any recomputation are left out, as is usual for model FLOPs.

        Args:
            sizes: a `DecoderConfig`, or anything with these fields; its `vocab_size` must be known.
        Source: Chowdhery et al. 2022 (PaLM), appendix B, with half of its attention term, which is for all pairs.
        """
        assert sizes.vocab_size is not None, "DecoderConfig.with_vocab_size comes first"
        queries, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
        layer = sizes.hidden_size * (2 * queries + 2 * keys + 3 * sizes.intermediate_size)
        weights = sizes.num_hidden_layers * layer + sizes.hidden_size * sizes.vocab_size
        return cls(linear=6.0 * weights, quadratic=6.0 * sizes.num_hidden_layers * queries)

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """FLOPs of each sequence.

        Args:
            lengths: [n] ints, tokens per sequence.
        Returns:
            [n] float64.
        """
        tokens = np.asarray(lengths, np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    @property
    def of_row(self) -> "CostModel":
        """The cost of a bucketed row without attention, which does not cross from a sample into its tail.

        Attention within the tail is left out, which changes the cost of chosen boundaries by less than 1 %.
        """
        return CostModel(self.linear, 0.0)

    def padded(self, rows: int, row_length: int) -> float:
        """FLOPs of `rows` sequences, each padded to `row_length` tokens and attended to as a whole row."""
        return rows * row_length * (self.linear + self.quadratic * row_length)


def tail_squares(padding: np.ndarray, seq_length: int) -> np.ndarray:
    """Squares of the segments of a padded tail, summed: none is longer than `seq_length`.

    Args:
        padding: [...] ints, tokens of padding at the end of a micro-batch.
        seq_length: the longest segment allowed, in tokens.
    Returns:
        [...] ints.
    """
    whole, rest = np.divmod(padding, seq_length)
    return whole * seq_length**2 + rest**2


TOKENS = CostModel(linear=1.0, quadratic=0.0)
"""The number of tokens as cost, as in `pad_ratio` and `padding_overhead`."""
