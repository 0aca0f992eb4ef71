"""A training run as a person reads it: progress on standard error, the report on standard output."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from embedder.cli.tables import MIB
from embedder.cli.terminal import TerminalWatcher
from embedder.training.loop import OnStep, describe
from embedder.training.run import TrainReport


class TrainingWatcher(TerminalWatcher):
    """Messages and progress of a training run on standard error; messages alone where that is no terminal."""

    @contextmanager
    def steps(self, num_steps: int, num_done: int) -> Iterator[OnStep]:
        """Draw a bar over the steps, with loss and last R@10; yields the function that takes them after each step."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("decoding", total=num_steps, completed=num_done)

            def on_step(num_steps_done: int, epoch: int, loss: float, r_at_10: float | None) -> None:
                held_out = "" if r_at_10 is None else f", held-out R@10 {r_at_10:.3f}"
                bar.update(task, completed=num_steps_done, description=f"epoch {epoch}, loss {loss:.3f}{held_out}")

            yield on_step


def train_parts(report: TrainReport) -> list[RenderableType]:
    """The report as a person reads it."""
    rejected = f"{report.num_rejected:,} rejected, {report.num_unpaired:,} without a picture or a caption"
    lines: list[RenderableType] = [
        f"{report.num_steps:,} steps ({report.num_epochs:.3g} epochs) over {report.num_items:,} items; {rejected}; "
        f"{report.train_s:.1f} s on {report.device}; {report.num_cached:,} decoded pictures were kept in memory "
        f"({report.cached_bytes / MIB:.0f} MiB)"
    ]
    if report.best is not None:
        lines.append(f"best at step {report.best['step']:,}: {describe(report.best)}")
    lines.append(f"model: {report.model}; the last one: {report.last}")
    if report.delta is not None:
        lines.append(f"the trained layers alone: {report.delta}; a model of them, wherever the base is:")
        lines.append(f"    embedder model apply-delta {report.base} {report.delta} --out DIR")
    return lines
