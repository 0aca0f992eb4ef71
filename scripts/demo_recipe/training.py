"""The loop that both phases share: steps, lines about them, checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path

from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.checkpoint import load_checkpoint, save_checkpoint
from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer

LOG_STEPS = 50


def log(text: str) -> None:
    """Print a line with the time at once, for those who watch a run of hours."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def scaled(settings: TrainSettings, num_concepts: int, seed: int, share: float) -> TrainSettings:
    """The settings for this data and seed, and for a share of the steps.

    Args:
        settings: of the recipe.
        num_concepts: in the data.
        seed: that everything follows from.
        share: of the steps.
    """
    num_steps = max(1, round(settings.num_steps * share))
    warmup_steps = min(settings.warmup_steps, num_steps)
    changes = {"num_concepts": num_concepts, "seed": seed, "num_steps": num_steps, "warmup_steps": warmup_steps}
    return settings.model_copy(update=changes)


def train(
    trainer: Trainer,
    checkpoint: Path,
    checkpoint_steps: int,
    batch: Callable[[int], TrainBatch],
    judge: Callable[[], str],
) -> None:
    """Take all steps, from the last checkpoint on where there is one.

    Args:
        trainer: what learns.
        checkpoint: file of it.
        checkpoint_steps: steps between two checkpoints.
        batch: gives the batch of a step.
        judge: says how good the model is, at each checkpoint.
    """
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"{checkpoint.name}: going on at step {trainer.num_steps_done}")
    began_s, num_steps = time.monotonic(), trainer.settings.num_steps
    while trainer.num_steps_done < num_steps:
        metrics = trainer.step(batch(trainer.num_steps_done))
        if metrics.step % LOG_STEPS == 0:
            log(
                f"{checkpoint.stem} {metrics.step}/{num_steps} loss {metrics.loss:.3f} lr {metrics.learning_rate:.5f} "
                f"grad {metrics.grad_norm:.2f} {time.monotonic() - began_s:.0f} s"
            )
        if metrics.step % checkpoint_steps == 0 or metrics.step == num_steps:
            save_checkpoint(checkpoint, trainer.state_dict())
            log(f"  {judge()}")
