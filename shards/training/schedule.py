"""Schedules of the learning rate and of weight averaging. Pure."""

import math

from shards.training.settings import TrainSettings


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Compute the learning rate: linear warm-up, then half a cosine down to the final rate, which is then kept.

    With `cooldown_steps` the rate is constant in between, so that a run can be made longer without starting again.

    Args:
        step: number of steps before this one.
        settings: rates and lengths.

    Source: of the cool-down, Hu et al. 2024 (MiniCPM), "warmup-stable-decay".
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
    """Compute the decay of the averaged weights at one step; lower at first, when they are still untrained.

    Source: the ramp (1 + t) / (10 + t) of TensorFlow's `ExponentialMovingAverage(num_updates)`.
    """
    return min(settings.ema_decay, (1 + step) / (10 + step))
