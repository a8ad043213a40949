"""`Mode`: how samples become micro-batches. Nothing else in the project compares a mode's name."""

import enum
from typing import Annotated, Literal, NamedTuple

from pydantic import WithJsonSchema

Policy = Literal["rows", "bucketed", "packed", "token_budget"]
"""How a plan chooses the samples of a micro-batch; see `ms_varlen.planning.plan`."""


class _Traits(NamedTuple):
    policy: Policy
    in_rows: bool
    follows_lengths: bool


class Mode(str, enum.Enum):
    """A mode. It is also the text of its name, so it can be written to JSON and YAML."""

    PADDED = "padded"
    BUCKETED = "bucketed"
    PACKED = "packed"
    VARLEN = "varlen"

    def __str__(self) -> str:
        return self.value

    @property
    def policy(self) -> Policy:
        """How a plan chooses the samples of a micro-batch."""
        return _TRAITS[self].policy

    @property
    def in_rows(self) -> bool:
        """Each sample has a row of its own, padded at the right; otherwise samples lie one after another."""
        return _TRAITS[self].in_rows

    @property
    def follows_lengths(self) -> bool:
        """Attention sees real tokens only (`variable_seq_lengths`); otherwise it runs over whole rows."""
        return _TRAITS[self].follows_lengths

    @property
    def sized_by_rows(self) -> bool:
        """`batch.rows` sizes a micro-batch; otherwise `batch.token_budget` does."""
        return self.policy == "rows"

    @property
    def size_key(self) -> str:
        """The recipe key that sizes a micro-batch."""
        return "batch.rows" if self.sized_by_rows else "batch.token_budget"

    @property
    def splits_rows(self) -> bool:
        """A row is two segments, its sample and its padded tail."""
        return self.in_rows and self.follows_lengths

    @property
    def deals_samples(self) -> bool:
        """Ranks are balanced by dealing them samples; otherwise they are dealt whole micro-batches."""
        return self.policy == "token_budget"


_TRAITS = {
    # mode          policy          in_rows  follows_lengths
    Mode.PADDED: _Traits("rows", True, False),
    Mode.BUCKETED: _Traits("bucketed", True, True),
    Mode.PACKED: _Traits("packed", False, True),
    Mode.VARLEN: _Traits("token_budget", False, True),
}

MODES = tuple(Mode)
"""All modes, in the order in which tables list them."""

ModeKey = Annotated[Mode, WithJsonSchema({"enum": [mode.value for mode in MODES], "type": "string"})]
"""The type of a recipe key that names a mode."""
