"""`TokenShapes`, the one declaration of sizes that the batcher and `set_inputs` both use.

Axis letters: `T` tokens of a micro-batch on one axis, `G` attention segments on T (sequences, and what padding forms)::

    divisor 16, 13 real tokens        static, max 64        T 64, a tail of 51
                                      buckets 32 64         T 32, a tail of 19
                                      range, 16 to 64       T 16, a tail of 3
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from ms_varlen.errors import ShapesError
from ms_varlen.graph.config import ShapesConfig


def round_up(tokens: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that holds `tokens`."""
    return -(-tokens // divisor) * divisor


@dataclasses.dataclass(frozen=True)
class TokenShapes:
    """The sizes that T and G may have.

    Attributes:
        kind: "static" (T is always `max`), "buckets" (one of a few sizes) or "range" (any multiple of `divisor` from
            `min` to `max`).
        min: smallest T, in tokens. `min` and `max` are rounded up to the divisor.
        max: largest T, in tokens.
        divisor: every T is a multiple of it, in tokens.
        max_segments: largest G, padded tails included.
        buckets: the sizes of kind "buckets", increasing; the first is `min`, the last `max`.
    """

    kind: str
    min: int
    max: int
    divisor: int
    max_segments: int
    buckets: tuple[int, ...] = ()

    def __post_init__(self):
        smallest, largest = (self.buckets[0], self.buckets[-1]) if self.kind == "buckets" else (self.min, self.max)
        object.__setattr__(self, "max", round_up(largest, self.divisor))
        object.__setattr__(self, "min", self.max if self.kind == "static" else round_up(smallest, self.divisor))
        if self.min > self.max:
            raise ShapesError(
                f"shapes.min must be <= shapes.max ({self.max}), got {self.min}; lower shapes.min", "SHAPE-RANGE"
            )

    @classmethod
    def from_config(
        cls, config: ShapesConfig, tokens: int, max_segments: int, sizes: Sequence[int] = ()
    ) -> "TokenShapes":
        """The declaration that a recipe asks for.

        Args:
            config: the `shapes` section.
            tokens: the most tokens that a micro-batch can hold: the token budget, or rows x `seq_length`.
            max_segments: the most attention segments of a micro-batch, padded tails included.
            sizes: the sizes of kind "buckets", in any order.
        Raises:
            ShapesError: the largest size cannot hold `tokens`, or lies below `shapes.min`.
        """
        largest = tokens if config.max is None else config.max
        buckets = tuple(sorted({int(size) for size in sizes})) if config.kind == "buckets" else ()
        shapes = cls(config.kind, config.min or config.divisor, largest, config.divisor, max_segments, buckets)
        if shapes.max < tokens:
            raise ShapesError(
                f"the largest size must be >= {tokens}, the tokens of a full micro-batch, got {shapes.max}; raise it "
                "under shapes, or lower batch.token_budget (padded: batch.rows)",
                "SHAPE-RANGE",
            )
        return shapes

    def of_size(self, size: int) -> "TokenShapes":
        """The declaration of one graph: one of the static sizes alone."""
        return TokenShapes("static", size, size, self.divisor, self.max_segments)

    def as_range(self) -> "TokenShapes":
        """Every multiple of the divisor up to the largest size: one graph for all sizes."""
        if self.divisor == self.max:
            return TokenShapes("static", self.max, self.max, self.divisor, self.max_segments)
        return TokenShapes("range", self.divisor, self.max, self.divisor, self.max_segments)

    def size_for(self, tokens: int) -> int:
        """The T that a micro-batch of `tokens` tokens is laid out on.

        Raises:
            ShapesError: more tokens than the largest size.
        """
        if tokens > self.max:
            raise ShapesError(
                f"T must be <= {self.max}, the largest size declared (shapes.max), got {tokens}; raise shapes.max or "
                "lower batch.token_budget",
                "SHAPE-RANGE",
            )
        if self.kind == "buckets":
            return self.buckets[bisect.bisect_left(self.buckets, tokens)]
        return max(self.min, round_up(tokens, self.divisor))

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Every static T that a graph is compiled for, in order; None when one graph serves a range."""
        return {"static": (self.max,), "buckets": self.buckets, "range": None}[self.kind]

    @property
    def predicted_graphs(self) -> int:
        """The number of graphs of a cell that takes T."""
        return 1 if self.sizes is None else len(self.sizes)

    def tail_segments(self, seq_length: int) -> int:
        """The most attention segments that a padded tail can form.

        Args:
            seq_length: the longest segment allowed, in tokens.
        """
        # A lone token on the smallest T. Above it a tail is shorter than the step to the next size, and in a range that
        # step, the divisor, is at most the smallest T.
        steps = [self.min, *(above - below for below, above in itertools.pairwise(self.buckets))]
        return -(-(max(steps) - 1) // seq_length)

    def describe(self) -> str:
        """The declaration in words, for logs: ``T=4096``, ``T=1024,2048,4096`` or ``T=64..4096 by 64``."""
        if self.sizes is None:
            return f"T={self.min}..{self.max} by {self.divisor}"
        return f"T={','.join(map(str, self.sizes))}"
