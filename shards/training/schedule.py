"""Learning rate and averaging by step. Pure."""

import math

from shards.training.settings import TrainSettings


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then half a cosine down to the final rate, which steps beyond the last keep.

    With `cooldown_steps` the rate stays between the two, so that a run may be made longer without beginning anew.

    Args:
        step: steps done before this one.
        settings: rates and lengths.

    Source: the latter, Hu et al. 2024 (MiniCPM), "warmup-stable-decay".
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    begin = settings.warmup_steps
    if settings.cooldown_steps is not None:
        begin = max(begin, settings.num_steps - settings.cooldown_steps)
    done = min(1.0, max(0.0, (step - begin) / max(1, settings.num_steps - begin)))
    share = (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_learning_rate + (1 - settings.final_learning_rate) * share)


def ema_decay_at(step: int, settings: TrainSettings) -> float:
    """How much of the average stays at one step; less at first, when it still holds the untrained weights.

    Source: the ramp (1 + t) / (10 + t) of TensorFlow's `ExponentialMovingAverage(num_updates)`.
    """
    return min(settings.ema_decay, (1 + step) / (10 + step))
