"""CPU seconds of this process and all that it started, over time."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

MIN_UP_S = 1.0  # a shorter time is no measurement
Identity = tuple[int, float]  # process id and start time: ids are used again


class CpuUse:
    """Sum of the CPU seconds of processes, those that have ended since the last reading included.

    Args:
        totals: earlier readings: Unix time, and CPU seconds up to then.
    """

    def __init__(self, totals: Iterable[tuple[float, float]] = ()) -> None:
        self._seconds: dict[Identity, float] = {}
        self._totals = list(totals)

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Read the clocks of all processes; one that lives shorter than the time between two readings may be missed."""
        for process in processes:
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._seconds[process.pid, process.create_time()] = times.user + times.system
        self._totals.append((time.time(), sum(self._seconds.values())))

    def between(self, start_s: float, stop_s: float) -> float:
        """Return the CPU seconds between two Unix times, interpolated between the readings; 0 before two readings."""
        return max(self._total_at(stop_s) - self._total_at(start_s), 0.0)

    def _total_at(self, time_s: float) -> float:
        before = [reading for reading in self._totals if reading[0] <= time_s]
        after = [reading for reading in self._totals if reading[0] > time_s]
        if not before or not after:
            return before[-1][1] if before else (after[0][1] if after else 0.0)
        (start_s, start), (stop_s, stop) = before[-1], after[0]
        return start + (stop - start) * (time_s - start_s) / (stop_s - start_s)


def beside_steps(
    use: CpuUse, calls: Sequence[dict[str, Any]], all_up_s: float, stop_s: float
) -> tuple[float, float] | None:
    """Return the CPU seconds that no step accounts for while all stages were up, and the length of that time.

    Args:
        use: CPU seconds of all processes.
        calls: values of `embedder.store.step_metrics.Measurement`.
        all_up_s: Unix time when the last stage had loaded its weights; importing libraries is no running cost.
        stop_s: Unix time of the last call's end.

    Returns:
        None where they were up for less than `MIN_UP_S`.
    """
    start_s = max(all_up_s, min((call["started_s"] for call in calls), default=stop_s))
    if stop_s - start_s < MIN_UP_S:
        return None
    in_steps_s = sum(call["cpu_s"] for call in calls if call["started_s"] >= start_s)
    return max(use.between(start_s, stop_s) - in_steps_s, 0.0), stop_s - start_s
