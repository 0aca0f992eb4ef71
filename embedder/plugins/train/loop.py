"""Training loop: batch after batch, with metrics, measurements, checkpoints and the best model kept."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embedder.errors import RunFailedError, SourceError
from embedder.executors.choose_engine import EngineChoice
from embedder.observability.trackers import Tracker
from embedder.plugins.train.examples import ExampleSpec
from embedder.plugins.train.items import Items
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.train_outputs import Outputs, draw_curves
from embedder.plugins.train.train_progress import TrainProgress, to_plain
from embedder.plugins.train.trainer.train_checkpoint import save_checkpoint
from embedder.plugins.train.trainer.trainer import StepMetrics, Trainer
from embedder.plugins.train.validation import ValidationRecall
from embedder.quantities import plural

LOG = logging.getLogger(__name__)
DRAW_EVERY_S = 20.0  # drawing the curves takes half a second
MIN_SEEN = 1000  # items, before their share of rejects is meaningful within the first epoch

Steps = Callable[[int, int], Generator[tuple[int, StepMetrics | None], None, None]]
"""Takes the steps of an epoch, given the epoch and the number of the first batch wanted. Yields each batch's number and
the step's metrics, None if none of its items can be trained on.
"""


class TrainingBackend(Protocol):
    """Trainer, or a group of workers that train one model."""

    num_steps_done: int

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs."""

    def export(self, folder: str | Path, name: str, *, replace: bool = False) -> Path:
        """Write the averaged weights as a model folder."""


OnStep = Callable[[int, int, float, float | None], None]
"""Shows one step: the number of steps so far, the passes over the data so far, the step's loss, and the latest R@10 on
held-out items, None before the first measurement.
"""

ShowSteps = Callable[[int, int], AbstractContextManager[OnStep]]
"""Opens a block, given the steps of the whole run and those done before; the function it yields receives each step."""


def no_steps(num_steps: int, num_done: int) -> AbstractContextManager[OnStep]:
    """Show nothing; a `ShowSteps`."""
    return nullcontext(lambda num_steps_done, epoch, loss, r_at_10: None)


@dataclass(frozen=True)
class PreparedTraining:
    """Inputs and state of a run.

    With several workers the trainer only writes files. `identity` is what a resumption must have in common with the
    run. `choice` is the engine that decodes, `spec` the settings of its tasks.
    """

    config: TrainConfig
    outputs: Outputs
    train: Items
    held_out: Items
    trainer: Trainer
    spec: ExampleSpec
    progress: TrainProgress
    identity: dict[str, Any]
    choice: EngineChoice
    tracker: Tracker = field(default_factory=Tracker)


@dataclass(frozen=True)
class TrainingSetup:
    """Backend of the loop, and its functions: `measure` is R@k on held-out items, None if there are none."""

    trainer: TrainingBackend
    steps: Steps
    measure: Callable[[], ValidationRecall] | None
    device: str


class Loop:
    """One run of the loop; its progress and the trainer may come from a checkpoint."""

    def __init__(
        self, prepared: PreparedTraining, setup: TrainingSetup, on_step: OnStep, is_stopped: Callable[[], bool]
    ) -> None:
        """Keep the run; `is_stopped` says whether to end after the step in flight."""
        self.config, self.outputs, self.progress = prepared.config, prepared.outputs, prepared.progress
        self.prepared, self.setup, self.trainer = prepared, setup, setup.trainer
        self.on_step, self.is_stopped = on_step, is_stopped
        self._began_s = time.monotonic() - self.progress.elapsed_s
        self._saved_s = self._drawn_s = time.monotonic()

    def run(self) -> None:
        """Train to the last step, or until asked to stop; either way models, checkpoint and curves are written.

        Raises `RunFailedError` if a signal came, or too many items were rejected; `SourceError` if no item has both an
        image and a caption; `shards.ModelError` if the loss or the gradients are not finite.
        """
        self._save()  # so that there is something to resume, whenever a crash comes
        while not self._is_done() and not self.is_stopped():
            self._epoch()
            self._check_rejects()
        self._finish()
        if self.is_stopped() and not self._is_done():
            raise RunFailedError(
                f"stopped on request after step {self.trainer.num_steps_done:,} of {self.config.train.num_steps:,}; "
                f"models are in {self.outputs.root}, and the same command with --resume continues it"
            )

    def _is_done(self) -> bool:
        return self.trainer.num_steps_done >= self.config.train.num_steps

    def _epoch(self) -> None:
        progress, before = self.progress, self.trainer.num_steps_done
        is_whole = progress.next_batch == 0
        with closing(self.setup.steps(progress.epoch, progress.next_batch)) as steps:
            for number, metrics in steps:
                progress.next_batch = number + 1  # before what may save the progress
                if metrics is not None:
                    self._step(metrics)
                if time.monotonic() - self._saved_s >= self.config.checkpoint_every_s:
                    self._save()
                if self._is_done() or self.is_stopped():
                    return
        progress.epoch, progress.next_batch = progress.epoch + 1, 0
        if is_whole and self.trainer.num_steps_done == before:
            self._check_rejects()
            if stale := self.progress.counts.stale:
                raise SourceError(
                    f"0 of {plural(len(self.prepared.train), 'item')} can be trained on: of {len(stale):,} the "
                    "teacher's vectors are of another content; embed the same sources, with the same columns, again"
                )
            raise SourceError(
                f"0 of {plural(len(self.prepared.train), 'item')} with both an image and a caption; name "
                "`columns.caption` or `texts`, or put .txt files next to the images"
            )

    def _step(self, metrics: StepMetrics) -> None:
        latest = self.progress.latest
        self.on_step(metrics.step, self.progress.epoch, metrics.loss, latest["r_at_10"] if latest else None)
        if metrics.step % self.config.log_every_steps == 0 or self._is_done():
            self._log({"kind": "train", **metrics.values()})
        if metrics.step % self.config.validation.every_steps == 0 or self._is_done():
            self._measure()

    def _log(self, values: dict[str, object]) -> None:
        elapsed_s = round(time.monotonic() - self._began_s, 3)
        self.outputs.add_metrics({**values, "epoch": self.progress.epoch, "elapsed_s": elapsed_s})
        numbers = {f"{values['kind']}/{key}": value for key, value in values.items() if isinstance(value, int | float)}
        self.prepared.tracker.log(numbers, step=self.trainer.num_steps_done)

    def _measure(self) -> None:
        """Measure on held-out items, and keep the model if it is the best so far."""
        if self.progress.counts.num_seen >= MIN_SEEN:
            self._check_rejects()
        if self.setup.measure is None:
            return
        found = {"step": self.trainer.num_steps_done, **asdict(self.setup.measure())}
        self.progress.latest = found
        is_best = self.progress.best is None or found["r_at_10"] > self.progress.best["r_at_10"]
        LOG.info(f"step {found['step']:,}: {describe(found)}{', the best so far' if is_best else ''}")
        self._log({"kind": "validation", **found, "is_best": is_best})
        if is_best:
            self.progress.best = found
            self._export_best()
        if time.monotonic() - self._drawn_s >= DRAW_EVERY_S:
            self._draw()

    def _export_best(self) -> None:
        self.trainer.export(self.outputs.model, self.outputs.root.name, replace=True)

    def _draw(self) -> None:
        train, num_items = self.config.train, len(self.prepared.train)
        title = f"{train.loss} loss, {train.what}, {plural(num_items, 'item')}, batches of {self.config.batch_size}"
        draw_curves(self.outputs.curves, self.outputs.read_metrics(), f"{self.outputs.root.name}: {title}")
        self._drawn_s = time.monotonic()

    def _save(self) -> None:
        self.progress.elapsed_s = time.monotonic() - self._began_s
        state = {"trainer": self.trainer.state_dict(), "standing": to_plain(self.progress)}
        save_checkpoint(self.outputs.checkpoint, state | {"identity": self.prepared.identity})
        rejects = sorted(self.progress.counts.rejects.items())
        names = ("item_id", "step", "error_type", "error")
        rows = (dict(zip(names, (item_id, *problem), strict=True)) for item_id, problem in rejects)
        self.outputs.write_lines(self.outputs.rejects, rows)
        self._saved_s = time.monotonic()

    def _check_rejects(self) -> None:
        counts, limit = self.progress.counts, self.config.max_reject_fraction
        if counts.reject_fraction > limit:
            self._save()
            raise RunFailedError(
                f"{len(counts.rejects):,} of {plural(counts.num_seen, 'item')} rejected, more than "
                f"max_reject_fraction = {limit:g} allows; see the reasons in {self.outputs.rejects}, then repair the "
                "files, or allow more with --set max_reject_fraction=... --resume"
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
        f"{plural(found['num_pictures'], 'held-out image')} by {plural(found['num_queries'], 'caption')}"
    )
