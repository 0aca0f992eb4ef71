"""Operators of a run over time, saved next to its report and drawn by `embedder report --plot`."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from embedder.batch_schema import Measurement
from embedder.report.report_schema import EventReport, ReportSection
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
    """Rows output so far."""


class Timeline(ReportSection):
    """`runs/<run_id>/operators.json`."""

    times_s: tuple[float, ...]
    """Seconds since the command's start."""
    operators: tuple[OperatorLine, ...]


def timeline_of(samples: "Sequence[Sample]", started_s: float) -> Timeline:
    """Return the timeline of samples, thinned to a few hundred points including the first and the last.

    `started_s` is the Unix time of the command's start.
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


def timeline_of_calls(calls: Sequence[Measurement], started_s: float) -> Timeline:
    """Return the timeline of a run without operator samples, from the begin and end of each call of its steps.

    `calls` are without those of the steps' starts; `started_s` is the Unix time of the command's start.
    """
    ends_s = {each.started_s + each.wall_s for each in calls}
    times_s = sorted({each.started_s for each in calls} | ends_s)
    step = -(-len(times_s) // MAX_POINTS) or 1
    chosen = [*times_s[:-1:step], *times_s[-1:]]
    names = dict.fromkeys(each.step for each in sorted(calls, key=lambda each: each.started_s))
    steps = [_Calls([each for each in calls if each.step == name]) for name in names]
    befores = [_Calls([]), *steps[:-1]]
    lines = [
        OperatorLine(
            name=name,
            queued_blocks=tuple(own.num_waiting(before, time_s) for time_s in chosen),
            num_tasks=tuple(own.num_begun(time_s)[0] - own.num_ended(time_s)[0] for time_s in chosen),
            num_rows=tuple(own.num_ended(time_s)[1] for time_s in chosen),
        )
        for name, own, before in zip(names, steps, befores, strict=True)
    ]
    return Timeline(times_s=tuple(round(time_s - started_s, 3) for time_s in chosen), operators=tuple(lines))


class _Calls:
    """Calls of one step, counted up to any time."""

    def __init__(self, calls: Sequence[Measurement]) -> None:
        self._num_calls, self._num_rows = len(calls), sum(each.num_rows for each in calls)
        self._begun = _sums((each.started_s, each.num_rows) for each in calls)
        self._ended = _sums((each.started_s + each.wall_s, each.num_rows) for each in calls)

    def num_begun(self, time_s: float) -> tuple[int, int]:
        """Return the number of calls begun by then, and of their rows."""
        return _until(self._begun, time_s)

    def num_ended(self, time_s: float) -> tuple[int, int]:
        """Return the number of calls ended by then, and of their rows."""
        return _until(self._ended, time_s)

    def num_waiting(self, before: "_Calls", time_s: float) -> int:
        """Return the number of blocks that the step before has output and this one hasn't begun, judged by rows."""
        num_rows = max(0, before.num_ended(time_s)[1] - self.num_begun(time_s)[1])
        return round(num_rows * before._num_calls / before._num_rows) if before._num_rows else 0


def _sums(events: Iterable[tuple[float, int]]) -> tuple[list[float], list[int]]:
    ordered = sorted(events)
    return [time_s for time_s, _ in ordered], [0, *accumulate(num_rows for _, num_rows in ordered)]


def _until(events: tuple[list[float], list[int]], time_s: float) -> tuple[int, int]:
    number = bisect_right(events[0], time_s)
    return number, events[1][number]


def draw_timeline(path: Path, timeline: Timeline, events: Sequence[EventReport], title: str) -> None:
    """Write a PNG atomically: queue, tasks and rows per second of each operator, and the events."""
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
    spans_s = [max(later - earlier, 0.1) for earlier, later in pairwise(times_s)]
    return [(later - earlier) / span_s for (earlier, later), span_s in zip(pairwise(counts), spans_s, strict=True)]
