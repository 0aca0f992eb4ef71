"""What a person sees on the terminal: progress on standard error, results on standard output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from embedder.run.report import Report

MIB = 1 << 20


class TerminalWatcher:
    """Shows a run on standard error; lines where that is no terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def say(self, message: str) -> None:
        """Print one line."""
        self.console.print(message, style="dim", soft_wrap=True)

    @contextmanager
    def progress(self, num_items: int) -> Iterator[Callable[[int], None]]:
        """Draw a bar over `num_items` items."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=num_items or None, rate="")

            def on_progress(num_done: int) -> None:
                seconds = bar.tasks[0].elapsed or 0
                rate = f"{num_done / seconds:.0f} items/s" if seconds else ""
                bar.update(task, completed=num_done, description="embedding", rate=rate)

            yield on_progress


def step_table(report: Report) -> Table:
    """The steps of a run as a table: how busy each was, and what it handed on."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("step", "rows", "wall share", "CPU share", "out, KiB/row", "peak RSS, MiB"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in report.steps:
        table.add_row(
            step.step,
            f"{step.num_rows:,}",
            f"{step.wall_share:.2f}",
            f"{step.cpu_share:.2f}",
            f"{step.bytes_per_row / 1024:.1f}",
            f"{step.peak_rss_bytes / MIB:.0f}",
        )
    return table


def report_parts(report: Report) -> list[RenderableType]:
    """The report as a person reads it."""
    embedded = report.num_items - report.num_rejected
    summary = (
        f"{embedded:,} items embedded, {report.num_rejected:,} rejected; {report.num_vectors:,} rows; "
        f"{report.items_per_s:.3g} items/s; {report.wall_s:.1f} s in all, {report.startup_s:.1f} s of it start-up; "
        f"peak memory {report.peak_memory_bytes / MIB:,.0f} MiB; run {report.run_id}"
    )
    return [step_table(report), summary] if report.steps else [summary]
