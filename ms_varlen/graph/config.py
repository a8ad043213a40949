"""The `shapes` and `graph` sections of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ShapesConfig(BaseModel):
    """The sizes of the token axis T that the graph accepts. Lengths are values and never need a size of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["static", "buckets", "range"] = Field(
        default="range",
        description="static: one graph of one size, shapes.max; buckets: one static graph for each of a few sizes; "
        "range: one graph for every multiple of shapes.divisor from shapes.min to shapes.max",
    )
    min: int | None = Field(
        default=None, ge=1, description="tokens, smallest T, a multiple of the divisor; the divisor if null; range only"
    )
    max: int | None = Field(
        default=None, ge=1, description="tokens, largest T; what the batch section needs if null; not for buckets"
    )
    divisor: int = Field(default=64, ge=1, description="tokens; every T is a multiple of it, the rest is padded")
    row_buckets: list[int] | Literal["auto"] | None = Field(
        default=None,
        description="tokens, lengths of rows: an increasing list of multiples of the divisor that ends with "
        "model.seq_length, or auto: those that cost least on this corpus; for bucketed recipes, and padded ones "
        "with buckets",
    )
    token_sizes: list[int] | Literal["auto"] | None = Field(
        default=None,
        description="tokens, sizes of T: an increasing list of multiples of the divisor that ends with "
        "batch.token_budget, or auto: those that waste least on this corpus; for varlen and packed recipes "
        "with buckets",
    )
    num_buckets: int | None = Field(
        default=None,
        ge=1,
        description="the most sizes that auto picks; if left out, as many as save 1 % of the real work each",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ShapesConfig":
        if self.kind != "range" and self.min is not None:
            raise ValueError(f"min must be null with kind: {self.kind}, got {self.min}; it is for kind: range")
        if self.kind == "buckets" and self.max is not None:
            raise ValueError(f"max must be null with kind: buckets, got {self.max}; the list of sizes says it")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min must be <= max ({self.max}), got {self.min}")
        return self


class GraphConfig(BaseModel):
    """How MindSpore runs the network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["graph", "pynative"] = Field(
        "graph", description="graph: compiled as a whole; pynative: operator by operator, for looking into a network"
    )
    jit_level: Literal["O0", "O1"] = Field(
        "O0", description="MindSpore's optimisation level; both run dynamic sizes (O2 does not, so it is not offered)"
    )
    compile_cache: str = Field(
        "auto",
        min_length=1,
        description="auto: ms_varlen/compile_cache in the user's cache folder; off; or the path of a folder",
    )
    max_graphs: int = Field(
        16,
        ge=1,
        description="graphs, all roles together; a recipe that needs more is refused, a run that compiles more stops",
    )
