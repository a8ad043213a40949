"""The `train` and `device` sections of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_SECTION = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainConfig(BaseModel):
    """Optimizer (AdamW), learning rate and length of the run."""

    model_config = _SECTION

    steps: int = Field(ge=1, description="optimizer steps of the whole run")
    learning_rate: float = Field(gt=0, description="peak learning rate, reached after warm-up")
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="last learning rate as a share of the peak, 0 to 1"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps of linear warm-up from 0; a run of fewer steps ends within it"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="course of the learning rate after warm-up"
    )
    clip_grad_norm: float | None = Field(
        default=1.0, gt=0, description="largest global L2 norm of a step's gradient; null does not clip"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay; norms and biases have none")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of AdamW's second moment")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's term against division by zero")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seed of the initial weights and of the order of samples, below 2^32"
    )
    eval_every: int | None = Field(
        default=None, ge=1, description="steps between evaluations on the held-out documents; null evaluates never"
    )
    max_bad_steps: int = Field(
        default=10,
        ge=0,
        description="most steps of one start that are skipped because their loss or gradient is not finite; one more "
        "stops the run, saved",
    )


class DeviceConfig(BaseModel):
    """Where the run takes place."""

    model_config = _SECTION

    target: Literal["auto", "CPU", "Ascend"] = Field(
        default="auto", description="device to train on; auto is Ascend where MindSpore sees one, else the CPU"
    )
    max_memory: str | None = Field(
        default=None,
        pattern=r"^([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)GB$",
        description="most device memory of MindSpore's pool, written as 30GB; null is all there is",
    )
    deterministic: bool = Field(
        default=False, description="bit-equal results between runs, at some cost on Ascend; the CPU has them anyway"
    )
    hccl_connect_seconds: int = Field(
        default=600,
        ge=120,
        le=7200,
        description="seconds that ranks on Ascend wait for each other at the start, between 120 and 7200 "
        "(HCCL_CONNECT_TIMEOUT, which wins when it is set)",
    )
    hccl_exec_seconds: int = Field(
        default=1836,
        ge=68,
        le=17340,
        description="seconds that a rank on Ascend waits in a collective for the others (HCCL_EXEC_TIMEOUT, which "
        "wins when it is set)",
    )
    profile_steps: tuple[int, int] | None = Field(
        default=None,
        description="first and last step that MindSpore's profiler records, e.g. [10, 12], into profile/ of the run "
        "folder; null records none",
    )

    @field_validator("profile_steps")
    @classmethod
    def _first_to_last(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 1 <= value[0] <= value[1]:
            raise ValueError(
                f"profile_steps must be two steps, the first from 1 on and not after the last, got {value}"
            )
        return value
