"""`TokenShapes`, the one declaration of sizes that the batcher and `set_inputs` both use. Imports no MindSpore.

Axis letters: `T` tokens of a micro-batch on one axis, `G` attention segments on T (sequences, and what padding forms)::

    divisor 16, 13 real tokens        static, max 64        T 64, a tail of 51
                                      range, 16 to 64       T 16, a tail of 3
"""

import dataclasses

from ms_varlen.errors import ShapesError
from ms_varlen.graph.config import ShapesConfig


def round_up(tokens: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that holds `tokens`."""
    return -(-tokens // divisor) * divisor


@dataclasses.dataclass(frozen=True)
class TokenShapes:
    """The sizes that T and G may have.

    Attributes:
        kind: "static" (T is always `max`) or "range" (any multiple of `divisor` from `min` to `max`).
        min: smallest T, in tokens. `min` and `max` are rounded up to the divisor.
        max: largest T, in tokens.
        divisor: every T is a multiple of it, in tokens.
        max_segments: largest G, padded tails included.
    """

    kind: str
    min: int
    max: int
    divisor: int
    max_segments: int

    def __post_init__(self):
        object.__setattr__(self, "max", round_up(self.max, self.divisor))
        lowest = self.max if self.kind == "static" else round_up(self.min, self.divisor)
        object.__setattr__(self, "min", lowest)
        if self.min > self.max:
            raise ShapesError(f"shapes.min must be <= shapes.max ({self.max}), got {self.min}; lower shapes.min")

    @classmethod
    def from_config(cls, config: ShapesConfig, tokens: int, max_segments: int) -> "TokenShapes":
        """The declaration that a recipe asks for.

        Args:
            config: the `shapes` section.
            tokens: the most tokens that a micro-batch can hold: the token budget, or rows x `seq_length`.
            max_segments: the most attention segments of a micro-batch, padded tails included.
        Raises:
            ShapesError: `shapes.max` cannot hold `tokens`, or lies below `shapes.min`.
        """
        largest = tokens if config.max is None else config.max
        shapes = cls(config.kind, config.min or config.divisor, largest, config.divisor, max_segments)
        if shapes.max < tokens:
            raise ShapesError(
                f"shapes.max must be >= {tokens}, the tokens of a full micro-batch, got {config.max}; "
                "raise shapes.max, leave it out, or lower batch.token_budget (padded: batch.rows)"
            )
        return shapes

    def size_for(self, tokens: int) -> int:
        """The T that a micro-batch of `tokens` tokens is laid out on.

        Raises:
            ShapesError: more tokens than the largest size.
        """
        if tokens > self.max:
            raise ShapesError(
                f"T must be <= {self.max}, the largest size declared (shapes.max), got {tokens}; raise shapes.max or "
                "lower batch.token_budget"
            )
        return max(self.min, round_up(tokens, self.divisor))

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Every static T that a graph is compiled for, in order; None when one graph serves a range."""
        return (self.max,) if self.kind == "static" else None

    @property
    def predicted_graphs(self) -> int:
        """The number of graphs of a cell that takes T."""
        return 1 if self.sizes is None else len(self.sizes)

    def tail_segments(self, seq_length: int) -> int:
        """The most attention segments that a padded tail can form.

        Args:
            seq_length: the longest segment allowed, in tokens.
        """
        longest_tail = (
            self.min - 1
        )  # a lone token on the smallest T; above it a tail is shorter than the divisor <= min
        return -(-longest_tail // seq_length)

    def describe(self) -> str:
        """The declaration in words, for logs: ``T=4096`` or ``T=64..4096 by 64``."""
        return f"T={self.max}" if self.kind == "static" else f"T={self.min}..{self.max} by {self.divisor}"
