"""`Sizes`: the keys of a recipe that size its micro-batches, with what follows from them alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.modes import Mode

Listed = list[int] | str | None
"""A list of sizes, "auto" or null."""

PATHS = {
    "mode": "mode",
    "token_budget": "batch.token_budget",
    "rows": "batch.rows",
    "pad_to": "batch.pad_to",
    "window": "batch.window",
    "max_segments": "batch.max_segments",
    "kind": "shapes.kind",
    "min": "shapes.min",
    "max": "shapes.max",
    "divisor": "shapes.divisor",
    "row_buckets": "shapes.row_buckets",
    "token_sizes": "shapes.token_sizes",
    "num_buckets": "shapes.num_buckets",
    "seq_length": "model.seq_length",
}
"""Field of `Sizes` -> YAML path."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The keys that size micro-batches, each named as in the recipe (`PATHS`)."""

    mode: Mode
    token_budget: int | None
    rows: int | None
    pad_to: str | None
    window: int | None
    max_segments: int
    kind: str
    min: int | None
    max: int | None
    divisor: int
    row_buckets: Listed
    token_sizes: Listed
    num_buckets: int | None
    seq_length: int

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Sizes":
        """Sizes from the valid keys of a recipe, by YAML path. A field whose key is not among them stays unset: to read
        it is an AttributeError.
        """
        sizes = object.__new__(cls)
        for name, path in PATHS.items():
            if path in values:
                object.__setattr__(sizes, name, Mode(values[path]) if path == "mode" else values[path])
        return sizes

    @property
    def smallest(self) -> int:
        """The smallest T of a range, in tokens."""
        return self.min or self.divisor

    @property
    def largest(self) -> int | None:
        """The most tokens of a micro-batch; None if the key that sizes it is missing."""
        if not self.mode.sized_by_rows:
            return self.token_budget
        return None if self.rows is None else self.rows * self.seq_length

    @property
    def has_row_buckets(self) -> bool:
        """Rows have a few lengths, those of `shapes.row_buckets`."""
        return has_row_buckets(self.mode, self.kind)

    @property
    def has_token_sizes(self) -> bool:
        """T has a few sizes, those of `shapes.token_sizes`."""
        return self.kind == "buckets" and not self.mode.in_rows

    @property
    def tail_segments(self) -> int:
        """The most segments of a padded tail. Buckets may not be picked yet: their tail is bounded by one size's."""
        assert self.token_budget is not None, "rows have no tail of their own"
        kind = "range" if self.kind == "range" else "static"
        shapes = TokenShapes(kind, self.smallest, self.token_budget, self.divisor, max_segments=1)
        return shapes.tail_segments(self.seq_length)


def has_row_buckets(mode: Mode, kind: str) -> bool:
    """Whether rows of this mode and kind of shapes have the lengths of `shapes.row_buckets`."""
    return mode.splits_rows or (mode.in_rows and kind == "buckets")
