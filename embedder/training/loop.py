"""Training loop: batch after batch, with metrics, measurements, checkpoints and the best model kept."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embedder.errors import RunFailedError, SourceError
from embedder.training.batches import ExampleCounts
from embedder.training.config import TrainConfig
from embedder.training.curves import draw_curves
from embedder.training.outputs import Outputs
from embedder.training.progress import TrainProgress, to_plain
from embedder.training.sampler import num_batches
from embedder.training.validation import ValidationRecall
from shards.training.checkpoint import save_checkpoint
from shards.training.trainer import StepMetrics

LOG = logging.getLogger(__name__)
DRAW_EVERY_S = 20.0  # the curves take half a second
MIN_SEEN = 1000  # items, before their share of rejects means something within the first epoch

Steps = Callable[[int, int], Generator[tuple[int, StepMetrics | None], None, None]]
"""Takes the steps of an epoch, given the epoch and the number of the first batch wanted: gives each batch's number and
what its step did; None where none of its items can be trained on."""


class TrainingBackend(Protocol):
    """Trainer, or a group of workers that train one model."""

    num_steps_done: int

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs."""

    def export(self, folder: str | Path, name: str, *, replace: bool = False) -> Path:
        """Write the averaged weights as a model folder.

        Args:
            folder: to write.
            name: of the model.
            replace: replace a folder that is there.
        """


class OnStep(Protocol):
    """Function that shows progress."""

    def __call__(self, num_steps_done: int, epoch: int, loss: float, r_at_10: float | None) -> None:
        """Show one step.

        Args:
            num_steps_done: steps so far.
            epoch: passes over the data so far.
            loss: of the step.
            r_at_10: latest R@10 on held-out items; None before the first measurement.
        """


class TrainingListener(Protocol):
    """Receiver of a training run's messages and progress."""

    def say(self, message: str) -> None:
        """Receive one line."""

    def steps(self, num_steps: int, num_done: int) -> AbstractContextManager[OnStep]:
        """Show progress while the block runs; gives the function to call after each step.

        Args:
            num_steps: of the whole run.
            num_done: before this session.
        """


class LogListener:
    """Listener that logs messages and shows no progress."""

    def say(self, message: str) -> None:
        """Log one line."""
        LOG.info(message)

    def steps(self, num_steps: int, num_done: int) -> AbstractContextManager[OnStep]:
        """Show nothing; see `TrainingListener.steps`."""
        return nullcontext(lambda num_steps_done, epoch, loss, r_at_10: None)


class TrainingStop:
    """Request to stop, set by a signal."""

    def __init__(self) -> None:
        self.requested = False

    def request_stop(self) -> None:
        """End after the step in flight."""
        self.requested = True


@dataclass
class Loop:
    """One run of the loop; `progress` and the trainer may come from a checkpoint.

    Attributes:
        config: the run.
        trainer: this process's, or a group of workers.
        steps: takes the steps of an epoch.
        num_items: items to train on.
        measure: R@k on held-out items; None where there are none.
        outputs: files of the run.
        progress: so far.
        identity: what a resumption must have in common with it.
        on_step: called after each step.
        say: receives progress messages.
        stop: whether the run should end.
    """

    config: TrainConfig
    trainer: TrainingBackend
    steps: Steps
    num_items: int
    measure: Callable[[], ValidationRecall] | None
    outputs: Outputs
    progress: TrainProgress
    identity: dict[str, object]
    on_step: OnStep
    say: Callable[[str], None]
    stop: TrainingStop
    _began_s: float = field(init=False, default=0.0)
    _saved_s: float = field(init=False, default=0.0)
    _drawn_s: float = field(init=False, default=0.0)

    def run(self) -> None:
        """Train to the last step, or until asked to stop; either way models, checkpoint and curves are there.

        Raises:
            RunFailedError: a signal came, or too many items were rejected.
            SourceError: no item has both an image and a caption.
            shards.ModelError: the loss is no finite number.
        """
        self._began_s = time.monotonic() - self.progress.elapsed_s
        self._drawn_s = time.monotonic()
        self._save()  # so that there is something to resume, whenever a crash comes
        while not self._is_done() and not self.stop.requested:
            self._epoch()
            self._check_rejects()
        self._finish()
        if self.stop.requested and not self._is_done():
            raise RunFailedError(
                f"stopped on request after step {self.trainer.num_steps_done:,} of {self.config.train.num_steps:,}; "
                f"models are in {self.outputs.root}, and the same command with --resume goes on"
            )

    def _is_done(self) -> bool:
        return self.trainer.num_steps_done >= self.config.train.num_steps

    def _epoch(self) -> None:
        progress, before = self.progress, self.trainer.num_steps_done
        is_whole = progress.next_batch == 0
        with closing(self.steps(progress.epoch, progress.next_batch)) as steps:
            for number, metrics in steps:
                if metrics is not None:
                    self._step(metrics)
                progress.next_batch = number + 1
                self._save_if_due()
                if self._is_done() or self.stop.requested:
                    return
        progress.epoch, progress.next_batch = progress.epoch + 1, 0
        if is_whole and self.trainer.num_steps_done == before:
            self._check_rejects()
            raise SourceError(
                f"none of {self.num_items:,} items has both an image and a caption; name `columns.caption` or "
                "`texts`, or put .txt files beside the images"
            )

    def _step(self, metrics: StepMetrics) -> None:
        latest = self.progress.latest
        self.on_step(metrics.step, self.progress.epoch, metrics.loss, latest["r_at_10"] if latest else None)
        if metrics.step % self.config.log_every_steps == 0 or self._is_done():
            self._log({"kind": "train", **asdict(metrics)})
        if metrics.step % self.config.validation.every_steps == 0 or self._is_done():
            self._measure()

    def _log(self, values: dict[str, object]) -> None:
        elapsed_s = round(time.monotonic() - self._began_s, 3)
        self.outputs.add_metrics({**values, "epoch": self.progress.epoch, "elapsed_s": elapsed_s})

    def _measure(self) -> None:
        """Measure on held-out items, and keep the model where it is the best so far."""
        if self.progress.counts.num_seen >= MIN_SEEN:
            self._check_rejects()
        if self.measure is None:
            return
        found = {"step": self.trainer.num_steps_done, **asdict(self.measure())}
        self.progress.latest = found
        is_best = self.progress.best is None or found["r_at_10"] > self.progress.best["r_at_10"]
        self.say(f"step {found['step']:,}: {describe(found)}{', the best so far' if is_best else ''}")
        self._log({"kind": "validation", **found, "is_best": is_best})
        if is_best:
            self.progress.best = found
            self._export_best()
        if time.monotonic() - self._drawn_s >= DRAW_EVERY_S:
            self._draw()

    def _export_best(self) -> None:
        self.trainer.export(self.outputs.model, self.outputs.root.name, replace=True)

    def _draw(self) -> None:
        draw_curves(self.outputs.curves, self.outputs.read_metrics(), f"{self.outputs.root.name}: {self._what()}")
        self._drawn_s = time.monotonic()

    def _what(self) -> str:
        train = self.config.train
        return f"{train.loss} loss, {train.what}, {self.num_items:,} items, batches of {self.config.batch_size}"

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved_s >= self.config.checkpoint_every_s:
            self._save()

    def _save(self) -> None:
        self.progress.elapsed_s = time.monotonic() - self._began_s
        state = {"trainer": self.trainer.state_dict(), "standing": to_plain(self.progress), "identity": self.identity}
        save_checkpoint(self.outputs.checkpoint, state)
        self._write_rejects(self.progress.counts)
        self._saved_s = time.monotonic()

    def _write_rejects(self, counts: ExampleCounts) -> None:
        names = ("item_id", "step", "error_type", "error")
        rows = (
            dict(zip(names, (item_id, *counts.rejects[item_id]), strict=True)) for item_id in sorted(counts.rejects)
        )
        self.outputs.write_lines(self.outputs.rejects, rows)

    def _check_rejects(self) -> None:
        counts, limit = self.progress.counts, self.config.max_reject_fraction
        if counts.reject_fraction > limit:
            self._save()
            raise RunFailedError(
                f"{len(counts.rejects):,} of {counts.num_seen:,} items were rejected, more than max_reject_fraction = "
                f"{limit:g} allows; see the reasons in {self.outputs.rejects}, then repair the files, or allow more "
                "with --set max_reject_fraction=... --resume"
            )

    def _finish(self) -> None:
        self._save()
        self.trainer.export(self.outputs.last, self.outputs.root.name, replace=True)
        if self.progress.best is None:  # nothing was measured yet, or nothing is held out
            self._export_best()
        self._draw()


def describe(found: dict[str, Any]) -> str:
    """Describe a measurement in one line."""
    return (
        f"R@1 {found['r_at_1']:.3f}, R@5 {found['r_at_5']:.3f}, R@10 {found['r_at_10']:.3f} on "
        f"{found['num_pictures']:,} held-out images by {found['num_queries']:,} captions"
    )


def epochs_of(num_steps: int, num_items: int, batch_size: int) -> float:
    """Passes over the data.

    Args:
        num_steps: steps taken.
        num_items: items to train on.
        batch_size: items of a step.
    """
    return num_steps / num_batches(num_items, batch_size)
