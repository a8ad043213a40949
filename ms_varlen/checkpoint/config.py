"""The `checkpoint` section of a recipe."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """Where a run writes, how often it saves, and from where it resumes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output_dir: Path = Field(description="folder of all runs of this recipe; a run writes below <output_dir>/<mode>")
    every: int | None = Field(default=None, ge=1, description="steps between two checkpoints; null: only at the end")
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints that are kept")
    on_save_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="when a checkpoint cannot be written, on a full disk say: stop, or continue and try again at the "
        "next one; the last good one stays. The last save of a run must succeed",
    )
    resume: Literal["auto", "never"] | Path = Field(
        default="auto",
        description="auto: resume the newest run; never: start from scratch in a numbered folder; "
        "a folder step_NNNNNNNN: resume from exactly this checkpoint",
    )
