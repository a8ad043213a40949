"""The `shapes` and `graph` sections of a recipe. Imports no MindSpore."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ShapesConfig(BaseModel):
    """Which sizes of the token axis T the graph is told; lengths are values and never need a size of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["static", "range"] = Field(
        "range",
        description="static: one graph of one size, shapes.max; range: one graph for every multiple of shapes.divisor "
        "from shapes.min to shapes.max",
    )
    min: int | None = Field(
        None, ge=1, description="tokens, smallest T, rounded up to the divisor; null means the divisor. For range only"
    )
    max: int | None = Field(
        None, ge=1, description="tokens, largest T, rounded up to the divisor; null means what the batch section needs"
    )
    divisor: int = Field(64, ge=1, description="tokens; every T is a multiple of it, the rest is padded")

    @model_validator(mode="after")
    def _consistent(self) -> "ShapesConfig":
        if self.kind == "static" and self.min is not None:
            raise ValueError(f"min must be null with kind: static, which has one size, got {self.min}; set max alone")
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
