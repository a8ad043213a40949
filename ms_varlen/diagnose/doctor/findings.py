"""What a check found, and how bad it is."""

import dataclasses
from collections.abc import Sequence
from typing import Any

GREEN, YELLOW, RED = "green", "yellow", "red"
LEVELS = (GREEN, YELLOW, RED)


@dataclasses.dataclass(frozen=True)
class Check:
    """The answer of one check.

    Attributes:
        area: what was looked at.
        level: "green" (well), "yellow" (works, but look at it) or "red" (will fail or compute something wrong).
        text: what was found; where it is not green: name, rule, value found, where, next step.
        code: of the catalogue; None where all is well.
    """

    area: str
    level: str
    text: str
    code: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def worst(checks: Sequence[Check]) -> str:
    """The worst level of some checks; green without any."""
    return max((check.level for check in checks), key=LEVELS.index, default=GREEN)
