"""From when items were finished to items a second, start-up and drain left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.store.files import StoreFiles
from embedder.store.journal.journal import read_entries
from embedder.store.journal.runs import all_runs
from pipeline_bench.task import Event

FIRST_SHARE, LAST_SHARE = 0.25, 0.75  # of all items


@dataclass(frozen=True)
class Window:
    """Between two moments at which batches were finished.

    Attributes:
        start_s, stop_s: Unix times.
        num_items: finished after the first and up to the second.
    """

    start_s: float
    stop_s: float
    num_items: int

    @property
    def wall_s(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s

    @property
    def items_per_s(self) -> float:
        """The steady rate."""
        return self.num_items / self.wall_s


def steady_window(finished: Sequence[Event]) -> Window | None:
    """From a quarter of all items finished to three quarters; None where one batch was both.

    Items that were finished together count at their own moment, never as spread over the time before it.
    """
    total, done = sum(number for _, number in finished), 0
    start: Event | None = None
    for time_s, number in sorted(finished):
        done += number
        if start is None and done >= FIRST_SHARE * total:
            start = time_s, done
        if start is not None and done >= LAST_SHARE * total:
            return Window(start[0], time_s, done - start[1]) if time_s > start[0] else None
    return None


def read_calls(store: Path) -> list[dict[str, Any]]:
    """Measurements of the steps of a store's only run (`embedder.store.journal.step_metrics.Measurement`)."""
    files = StoreFiles(str(store))
    (run,) = all_runs(files)
    return [call for entry in read_entries(files, run.run_id) for call in entry.trace]


def last_stage_events(calls: Iterable[dict[str, Any]]) -> list[Event]:
    """When the last stage of a run handed on its batches, from the measurements of its steps."""
    stages = [call for call in calls if call["step"].startswith("stage ")]
    last = max((call["step"] for call in stages), key=lambda step: int(step.split()[1]))
    ends = ((call["started_s"] + call["wall_s"], call["num_rows"]) for call in stages if call["step"] == last)
    return sorted(ends)


def step_shares(calls: Iterable[dict[str, Any]], window: Window) -> dict[str, tuple[float, float]]:
    """Of each step, the share of a window's time that lay inside its calls, and CPU seconds a second of it.

    A call that reaches over an edge counts with the part that lies inside, its CPU seconds spread evenly over it.
    """
    shares: dict[str, tuple[float, float]] = {}
    for call in calls:
        stop_s = call["started_s"] + call["wall_s"]
        inside_s = min(stop_s, window.stop_s) - max(call["started_s"], window.start_s)
        if inside_s <= 0:
            continue
        wall, cpu = shares.get(call["step"], (0.0, 0.0))
        cpu_s = call["cpu_s"] * inside_s / call["wall_s"]
        shares[call["step"]] = wall + inside_s / window.wall_s, cpu + cpu_s / window.wall_s
    return dict(sorted(shares.items()))
