"""The `train` and `device` sections of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
