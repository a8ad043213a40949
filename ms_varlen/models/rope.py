"""Rotary frequencies and how a longer context scales them."""

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeScaling(BaseModel):
    """How the rotary frequencies of a decoder are scaled, under the names of a Hugging Face `config.json`.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is above
    `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor`, and goes from one to the other in between.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["linear", "llama3"]
    factor: float = Field(ge=1)
    low_freq_factor: float | None = Field(default=None, gt=0, description="llama3 only")
    high_freq_factor: float | None = Field(default=None, gt=0, description="llama3 only")
    original_max_position_embeddings: int | None = Field(default=None, gt=0, description="llama3 only, in tokens")

    @model_validator(mode="after")
    def _fields_belong_to_the_type(self) -> "RopeScaling":
        for name in _LLAMA3_FIELDS:
            value: Any = getattr(self, name)
            if (value is None) == (self.rope_type == "llama3"):
                rule = "given" if self.rope_type == "llama3" else "left out"
                raise ValueError(
                    f"{name} must be {rule} with rope_type {self.rope_type}, got {value}; copy the model's own"
                )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor must be < high_freq_factor ({high}), got {low}; copy the model's own")
        return self

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Scaled frequencies.

        Args:
            frequencies: [D/2] float64, radians per token.
        Returns:
            [D/2] float64.
        Source: `_compute_llama3_parameters` and `_compute_linear_scaling_rope_parameters` of transformers 4.57.
        """
        divided = frequencies / self.factor
        if self.low_freq_factor is None or self.high_freq_factor is None:
            return divided
        assert self.original_max_position_embeddings is not None, "the validator saw to it"
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - kept) * divided + kept * frequencies


def rotary_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> np.ndarray:
    """[head_dim/2] float64, radians per token.

    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies if scaling is None else scaling.scaled(frequencies)
