"""Learning rate by step."""

import math

from ms_varlen.recipe.sections import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step.

    It rises in a straight line over the warm-up and reaches `learning_rate` at its last step; then falls to
    `min_lr_ratio` of it at the last step of training, along half a cosine or a straight line, or stays constant.

    Args:
        config: steps, warmup_steps, schedule, learning_rate and min_lr_ratio.
        step: number of the step, the first is 1.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return config.learning_rate * (1 - progress * (1 - config.min_lr_ratio))
