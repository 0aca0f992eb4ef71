"""The training loop: batch after batch, with metrics, measurements, checkpoints and the best model kept."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
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

DRAW_EVERY_S = 20.0  # the curves take half a second
MIN_SEEN = 1000  # items, before their share of rejects means something within the first epoch

Steps = Callable[[int, int], Generator[tuple[int, StepMetrics | None], None, None]]
"""Takes the steps of an epoch, given the epoch and the number of the first batch wanted: gives each batch's number and
what its step did; None where none of its items can be trained on."""


class TrainingBackend(Protocol):
    """A trainer, or several that are one."""

    num_steps_done: int

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs."""

    def export(self, folder: str | Path, name: str, *, replace: bool = False) -> Path:
        """Write the averaged weights as a model folder."""


class OnStep(Protocol):
    """Whoever shows progress."""

    def __call__(self, num_steps_done: int, epoch: int, loss: float, r_at_10: float | None) -> None:
        """Be told after each step."""


class TrainingListener(Protocol):
    """Whoever wants to see the run."""

    def say(self, message: str) -> None:
        """One line about what happens now."""

    def steps(self, num_steps: int, num_done: int) -> AbstractContextManager[OnStep]:
        """Show progress over so many steps while the block runs; yields what to tell each step."""


class TrainingStop:
    """Asked to by a signal."""

    def __init__(self) -> None:
        self.requested = False

    def request_stop(self) -> None:
        """End after the step in flight."""
        self.requested = True


@dataclass
class Loop:
    """One run of the loop; `standing` and the trainer may come from a checkpoint."""

    config: TrainConfig
    trainer: TrainingBackend
    steps: Steps
    num_items: int
    measure: Callable[[], ValidationRecall] | None
    outputs: Outputs
    standing: TrainProgress
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
            SourceError: no item has both a picture and a caption.
            shards.ModelError: the loss is no finite number.
        """
        self._began_s = time.monotonic() - self.standing.elapsed_s
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
        standing, before = self.standing, self.trainer.num_steps_done
        is_whole = standing.next_batch == 0
        with closing(self.steps(standing.epoch, standing.next_batch)) as steps:
            for number, metrics in steps:
                if metrics is not None:
                    self._step(metrics)
                standing.next_batch = number + 1
                self._save_if_due()
                if self._is_done() or self.stop.requested:
                    return
        standing.epoch, standing.next_batch = standing.epoch + 1, 0
        if is_whole and self.trainer.num_steps_done == before:
            self._check_rejects()
            raise SourceError(
                f"none of {self.num_items:,} items has both a picture and a caption; name `columns.caption` or "
                "`texts`, or put .txt files beside the pictures"
            )

    def _step(self, metrics: StepMetrics) -> None:
        latest = self.standing.latest
        self.on_step(metrics.step, self.standing.epoch, metrics.loss, latest["r_at_10"] if latest else None)
        if metrics.step % self.config.log_every_steps == 0 or self._is_done():
            self._log({"kind": "train", **asdict(metrics)})
        if metrics.step % self.config.validation.every_steps == 0 or self._is_done():
            self._measure()

    def _log(self, values: dict[str, object]) -> None:
        elapsed_s = round(time.monotonic() - self._began_s, 3)
        self.outputs.add_metrics({**values, "epoch": self.standing.epoch, "elapsed_s": elapsed_s})

    def _measure(self) -> None:
        """Measure on held-out items, and keep the model where it is the best so far."""
        if self.standing.tally.num_seen >= MIN_SEEN:
            self._check_rejects()
        if self.measure is None:
            return
        found = {"step": self.trainer.num_steps_done, **asdict(self.measure())}
        self.standing.latest = found
        is_best = self.standing.best is None or found["r_at_10"] > self.standing.best["r_at_10"]
        self.say(f"step {found['step']:,}: {describe(found)}{', the best so far' if is_best else ''}")
        self._log({"kind": "validation", **found, "is_best": is_best})
        if is_best:
            self.standing.best = found
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
        self.standing.elapsed_s = time.monotonic() - self._began_s
        state = {"trainer": self.trainer.state_dict(), "standing": to_plain(self.standing), "identity": self.identity}
        save_checkpoint(self.outputs.checkpoint, state)
        self._write_rejects(self.standing.tally)
        self._saved_s = time.monotonic()

    def _write_rejects(self, tally: ExampleCounts) -> None:
        names = ("item_id", "step", "error_type", "error")
        rows = (dict(zip(names, (item_id, *tally.rejects[item_id]), strict=True)) for item_id in sorted(tally.rejects))
        self.outputs.write_lines(self.outputs.rejects, rows)

    def _check_rejects(self) -> None:
        tally, limit = self.standing.tally, self.config.max_reject_fraction
        if tally.reject_fraction > limit:
            self._save()
            raise RunFailedError(
                f"{len(tally.rejects):,} of {tally.num_seen:,} items were rejected, more than max_reject_fraction = "
                f"{limit:g} allows; see the reasons in {self.outputs.rejects}, then mend the files, or allow more with "
                "--set max_reject_fraction=... --resume"
            )

    def _finish(self) -> None:
        self._save()
        self.trainer.export(self.outputs.last, self.outputs.root.name, replace=True)
        if self.standing.best is None:  # nothing was measured yet, or nothing is held out
            self._export_best()
        self._draw()


def describe(found: dict[str, Any]) -> str:
    """A measurement in one line."""
    return (
        f"R@1 {found['r_at_1']:.3f}, R@5 {found['r_at_5']:.3f}, R@10 {found['r_at_10']:.3f} on "
        f"{found['num_pictures']:,} held-out pictures by {found['num_queries']:,} captions"
    )


def epochs_of(num_steps: int, num_items: int, batch_size: int) -> float:
    """Passes over the data."""
    return num_steps / num_batches(num_items, batch_size)
