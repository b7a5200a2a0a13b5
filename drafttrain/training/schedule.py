"""Learning rate as a pure function of the step: a resumed run has the rate of an unbroken one by construction."""

from __future__ import annotations

import math

from drafttrain.errors import RecipeError
from drafttrain.recipe.training_config import TrainingConfig


def learning_rate(step: int, total_steps: int, config: TrainingConfig) -> float:
    """The rate of optimiser step `step` (from 0) in a run of `total_steps`.

    Linear warm-up to `lr`, then by `config.schedule`: "constant"; "cosine" down to `min_lr`; "wsd" (warm-up, stable,
    decay; arXiv 2404.06395): constant, then linear down to `min_lr` over the last `decay_fraction` of the run.
    """
    warmup = config.warmup_steps(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, total_steps - warmup)
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay = config.decay_steps(total_steps)
    left = total_steps - step
    return config.lr if left > decay else config.min_lr + (config.lr - config.min_lr) * max(0, left) / max(1, decay)


def require_rest_of_warmup(config: TrainingConfig, total_steps: int) -> None:
    """Refuse a warm-up in steps that is as long as the run. Of `max_steps` the recipe tells, of `epochs` the data.

    Raises:
        RecipeError: naming both.
    """
    if config.warmup >= 1 and config.warmup >= total_steps:
        raise RecipeError(
            f"a warm-up of {config.warmup:g} steps leaves nothing of the run, which has {total_steps}",
            where="training.warmup",
            remedy="lower it, or give a share of all steps, such as 0.02",
        )
