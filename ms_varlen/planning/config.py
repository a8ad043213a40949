"""The `batch` section of a recipe: how large a micro-batch is."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ms_varlen.limits import MAX_SEGMENTS


def _default_budget(values: dict[str, Any]) -> int | None:
    return 4096 if values.get("rows") is None else None


def _default_pad_to(values: dict[str, Any]) -> Literal["max"] | None:
    return None if values.get("rows") is None else "max"


class BatchConfig(BaseModel):
    """Size of a micro-batch: rows in a padded recipe, a token budget in the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int | None = Field(
        default=None,
        ge=1,
        description="rows per micro-batch and rank; padded recipes need it, the others leave it out",
    )
    token_budget: int | None = Field(
        default_factory=_default_budget,
        ge=1,
        description="most tokens per micro-batch and rank, a multiple of shapes.divisor and at least model.seq_length. "
        "4096 if left out; not for padded recipes. Bucketed recipes count padded rows",
    )
    pad_to: Literal["max", "batch"] | None = Field(
        default_factory=_default_pad_to,
        description="length of a row: max is model.seq_length, batch is the longest sample of the micro-batch rounded "
        "up to shapes.divisor. max if left out; only for padded recipes",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description="samples per window of the shuffled order that are sorted by length, which saves padding and mixes "
        "lengths less; null sorts nothing. Only for padded recipes with batch.pad_to batch",
    )
    micro_batches: int = Field(
        default=1, ge=1, description="micro-batches per optimizer step and rank; their gradients are summed"
    )
    max_segments: int = Field(
        default=256,
        ge=1,
        le=MAX_SEGMENTS,
        description="most attention segments per micro-batch, those of the padded tail included; 1024 is the limit of "
        "the Ascend operator",
    )

    @property
    def size(self) -> int:
        """What sizes a micro-batch: its rows, or its token budget."""
        size = self.token_budget if self.rows is None else self.rows
        assert size is not None, "the rules of a recipe see to it"
        return size
