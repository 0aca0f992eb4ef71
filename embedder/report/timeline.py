"""Operators of a run over time: saved beside its report, and drawn by `embedder report --plot`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from embedder.report.schema import EventReport, ReportSection
from embedder.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample

TIMELINE_FILE = "operators.json"
MAX_POINTS = 500
SIZE_INCH = (9, 8)
DOTS_PER_INCH = 110


class OperatorLine(ReportSection):
    """One operator at the times of the timeline."""

    name: str
    queued_blocks: tuple[int, ...]
    num_tasks: tuple[int, ...]
    num_rows: tuple[int, ...]
    """Rows that had come out."""


class Timeline(ReportSection):
    """`runs/<run_id>/operators.json`."""

    times_s: tuple[float, ...]
    """Seconds since the command's start."""
    operators: tuple[OperatorLine, ...]


def timeline_of(samples: "Sequence[Sample]", started_s: float) -> Timeline:
    """Return the timeline of samples, at most some hundred points of it, the first and the last among them.

    Args:
        samples: of the operators.
        started_s: Unix time of the command's start.
    """
    step = -(-len(samples) // MAX_POINTS) or 1
    chosen = [*samples[:-1:step], *samples[-1:]]
    lines = zip(*(sample.operators for sample in chosen), strict=True)
    return Timeline(
        times_s=tuple(round(sample.time_s - started_s, 1) for sample in chosen),
        operators=tuple(
            OperatorLine(
                name=line[0].name,
                queued_blocks=tuple(state.queued_blocks for state in line),
                num_tasks=tuple(state.num_tasks for state in line),
                num_rows=tuple(state.num_rows for state in line),
            )
            for line in lines
        ),
    )


def draw_timeline(path: Path, timeline: Timeline, events: Sequence[EventReport], title: str) -> None:
    """Write a PNG, whole or not at all: queue, tasks and rows a second of each operator, and the events.

    Args:
        path: the file.
        timeline: of a run.
        events: of the same run.
        title: above the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCH, dpi=DOTS_PER_INCH, layout="constrained")
    queue, tasks, rate = figure.subplots(3, 1, sharex=True)
    times_s = timeline.times_s
    for line in timeline.operators:
        queue.plot(times_s, line.queued_blocks, drawstyle="steps-post", label=line.name)
        tasks.plot(times_s, line.num_tasks, drawstyle="steps-post")
        rate.plot(times_s[1:], _per_second(times_s, line.num_rows), drawstyle="steps-pre")
    for axes, label in ((queue, "blocks that wait"), (tasks, "tasks under way"), (rate, "rows/s that came out")):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for event in events:
            axes.axvline(event.at_s, color="tab:red", linewidth=0.8, linestyle=":")
    queue.set_title(title)
    queue.legend(loc="upper right", fontsize=8)
    rate.set_xlabel("seconds since the command's start; dotted: events")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def _per_second(times_s: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Differences of counts over those of times."""
    spans_s = [max(later - earlier, 0.1) for earlier, later in pairwise(times_s)]
    return [(later - earlier) / span_s for (earlier, later), span_s in zip(pairwise(counts), spans_s, strict=True)]
