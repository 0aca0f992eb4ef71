"""CPU seconds of this process and all that it started, over time."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

MIN_UP_S = 1.0  # stages that were up for less say nothing
Identity = tuple[int, float]  # process id and start time: ids are used again


class CpuUse:
    """Adds up the CPU seconds of processes, those that have ended since the last look included."""

    def __init__(self) -> None:
        self._seconds: dict[Identity, float] = {}
        self._totals: list[tuple[float, float]] = []  # Unix time, seconds so far

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Read the clocks of all processes; one that lives shorter than the time between two looks may be missed."""
        for process in processes:
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._seconds[process.pid, process.create_time()] = times.user + times.system
        self._totals.append((time.time(), sum(self._seconds.values())))

    def between(self, start_s: float, stop_s: float) -> float:
        """CPU seconds between two points of time, by straight lines between the looks; 0 before two looks."""
        return max(self._total_at(stop_s) - self._total_at(start_s), 0.0)

    def _total_at(self, time_s: float) -> float:
        before = [look for look in self._totals if look[0] <= time_s]
        after = [look for look in self._totals if look[0] > time_s]
        if not before or not after:
            return before[-1][1] if before else (after[0][1] if after else 0.0)
        (start_s, start), (stop_s, stop) = before[-1], after[0]
        return start + (stop - start) * (time_s - start_s) / (stop_s - start_s)


def beside_steps(
    use: CpuUse, calls: Sequence[dict[str, Any]], all_up_s: float, stop_s: float
) -> tuple[float, float] | None:
    """CPU seconds that no step accounts for while all stages were up, and how long that was.

    Args:
        use: CPU of all processes.
        calls: `embedder.store.step_metrics.Measurement` values.
        all_up_s: Unix time when the last stage had loaded its weights; importing libraries is no running cost.
        stop_s: Unix time of the last call's end.

    Returns:
        None where they were up too briefly to tell.
    """
    start_s = max(all_up_s, min((call["started_s"] for call in calls), default=stop_s))
    if stop_s - start_s < MIN_UP_S:
        return None
    in_steps_s = sum(call["cpu_s"] for call in calls if call["started_s"] >= start_s)
    return max(use.between(start_s, stop_s) - in_steps_s, 0.0), stop_s - start_s
