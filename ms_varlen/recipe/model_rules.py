"""Rules between the decoder of a recipe and its other keys; see `ms_varlen.recipe.rules`."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ms_varlen.faults import Fault
from ms_varlen.models.config import DecoderConfig


def _heads_fit_ascend(target: str, config: DecoderConfig) -> Iterator[Fault]:
    if target != "Ascend":
        return
    if config.head_dim % 16 or config.head_dim > 512:
        yield Fault(
            "model.config.head_dim",
            f"must be a multiple of 16 and <= 512 on Ascend, got {config.head_dim}; change it or hidden_size",
        )
    if config.num_attention_heads > 256:
        yield Fault(
            "model.config.num_attention_heads", f"must be <= 256 on Ascend, got {config.num_attention_heads}; lower it"
        )


def _model_has_the_positions(config: DecoderConfig, seq_length: int) -> Iterator[Fault]:
    if config.max_position_embeddings is not None and seq_length > config.max_position_embeddings:
        yield Fault(
            "model.seq_length",
            f"must be <= model.config.max_position_embeddings ({config.max_position_embeddings}, what the model was "
            f"made for), got {seq_length}; lower it, and model.max_position_embeddings with it",
        )


def _window_holds_a_sequence(config: DecoderConfig, seq_length: int) -> Iterator[Fault]:
    if config.sliding_window is not None and seq_length > config.sliding_window:
        yield Fault(
            "model.seq_length",
            f"must be <= model.config.sliding_window ({config.sliding_window} tokens; attention here sees the whole "
            f"sequence), got {seq_length}; lower it, or choose a model without a sliding window",
        )


def _weights_exist(init_from: str | None) -> Iterator[Fault]:
    if init_from is not None and not Path(init_from).expanduser().is_dir():
        yield Fault(
            "model.init_from",
            f"must be an existing folder of safetensors files or null, got {init_from}; correct the path",
        )


MODEL_RULES: tuple[tuple[Callable[..., Iterator[Fault]], tuple[str, ...]], ...] = (
    (_heads_fit_ascend, ("device.target", "model.config")),
    (_model_has_the_positions, ("model.config", "model.seq_length")),
    (_window_holds_a_sequence, ("model.config", "model.seq_length")),
    (_weights_exist, ("model.init_from",)),
)
