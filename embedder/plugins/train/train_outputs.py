"""Files of a training run, below its folder; each appears whole or not at all.

model/            the best model by R@10 on held-out items, as a model folder, with its card
last/             the model at the end, or where training was stopped
delta/            with what = "layers": only those layers, over the untouched base
checkpoint.pt     everything that `--resume` needs
metrics.jsonl     a line for each logged step and each measurement
curves.png        the same as a plot, from time to time
rejects.jsonl     items that could not be trained on, and why
tokenizer.json    of a fresh model
report.json       figures of the run
start/            with `layers`: the pruned model that training began with
teacher/          with teacher.model: store of its vectors
tracker.json      with [tracker]: the id that the tracker has given the run
"""

import fcntl
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedder.errors import USER_MISTAKES, ConfigError, RunFailedError
from embedder.storage.atomic_write import atomic_write
from embedder.storage.printable import printable
from embedder.store.journal.refusals import remove_empty_folders
from shards.saving import FULL

Metrics = Sequence[dict[str, Any]]

CARD_FILE = "MODEL_CARD.md"
"""Name of the card in a model folder."""

SIZE_INCH = (8, 7)
DOTS_PER_INCH = 110
SMOOTHING = 0.9  # weight of the previous point in the bold line


class Outputs:
    """Paths of a run's files, and how they are written."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.model, self.last, self.delta = self.root / "model", self.root / "last", self.root / "delta"
        self.checkpoint = self.root / "checkpoint.pt"
        self.metrics = self.root / "metrics.jsonl"
        self.curves = self.root / "curves.png"
        self.rejects = self.root / "rejects.jsonl"
        self.tokenizer = self.root / "tokenizer.json"
        self.report = self.root / "report.json"
        self.tracker = self.root / "tracker.json"
        self.start, self.teacher = self.root / "start", self.root / "teacher"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder and lock it for this process; a new folder is removed if the run is refused before it trains.

        Raises `ConfigError` if another process trains into it, or it can't be written; `RunFailedError` if the disk
        becomes full.
        """
        is_new = not self.root.exists()
        with remove_empty_folders(self.root), self._lock():
            try:
                yield
            except USER_MISTAKES:
                if is_new and not any(path.exists() for path in (self.checkpoint, self.model, self.last, self.teacher)):
                    shutil.rmtree(self.root, ignore_errors=True)
                raise
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise RunFailedError(
                    f"out {self.root}: {error.filename or 'a file'} can't be written ({error.strerror}); free some "
                    "space, and the same command with --resume continues from the last checkpoint"
                ) from None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle = (self.root / ".lock").open("a")
        except OSError as error:
            raise ConfigError(f"out {self.root}: can't be written ({error.strerror}); name another folder") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"out {self.root}: another run trains into it; wait for it, or name another"
                ) from None
            self._remove_left()
            yield

    def _remove_left(self) -> None:
        """Remove what a killed run left half-written; each of its models and checkpoints takes as much as a whole one.

        An old model that was to be replaced stays, as it may be the only one.
        """
        names = "|".join(re.escape(path.name) for path in vars(self).values() if path != self.root)
        for path in self.root.iterdir():
            if re.fullmatch(rf"\.+({names})\.[-.\w]+\.(tmp|new)", path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write_text(self, path: Path, text: str) -> None:
        """Write or replace one file."""
        with atomic_write(path) as file:
            file.write(text.encode())

    def write_tracker(self, tracker_id: str) -> None:
        """Write the id that the tracker has given the run."""
        self.write_text(self.tracker, json.dumps({"id": tracker_id}) + "\n")

    def tracked_files(self) -> dict[str, bytes]:
        """Read the files that a tracker gets, as far as they exist."""
        paths = [self.report, self.curves, self.metrics, self.model / "config.json", self.model / CARD_FILE]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def write_card(self, text: str) -> None:
        """Write the card of the best model and of the last one, as far as these exist."""
        for folder in (self.model, self.last):
            if folder.is_dir():
                self.write_text(folder / CARD_FILE, text)

    def write_lines(self, path: Path, values: Iterable[dict[str, Any]]) -> None:
        """Write or replace a file of JSON lines."""
        self.write_text(path, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))

    def add_metrics(self, values: dict[str, Any]) -> None:
        """Append one line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read all lines so far; a line that a crash cut short is left out."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def rewind_metrics(self, num_steps_done: int) -> None:
        """Drop the lines of steps after a checkpoint, since those steps will run again."""
        kept = [line for line in self.read_metrics() if line["step"] <= num_steps_done]
        self.write_lines(self.metrics, kept)


def draw_curves(path: Path, metrics: Metrics, title: str) -> None:
    """Write a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCH, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title), parse_math=False)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_loss(above, [line for line in metrics if line["kind"] == "train"])
    _draw_retrieval(below, [line for line in metrics if line["kind"] == "validation"])
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def _draw_loss(axes: Any, lines: Metrics) -> None:
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.5)
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)


def _draw_retrieval(axes: Any, lines: Metrics) -> None:
    steps = [line["step"] for line in lines]
    for k in (1, 5, 10):
        axes.plot(steps, [line[f"r_at_{k}"] for line in lines], marker=".", label=f"R@{k}")
    if lines:
        axes.axhline(min(1, 10 / lines[-1]["num_pictures"]), color="grey", linestyle=":", label="R@10 by chance")
        axes.legend(loc="upper left")
    axes.set(ylabel="held-out text to image", xlabel="step", ylim=(0, 1))
    axes.grid(alpha=0.3)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean that starts at the first value."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else SMOOTHING * result[-1] + (1 - SMOOTHING) * value)
    return result
