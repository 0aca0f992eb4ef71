"""Number of processes that worked on a step, over time, by the measurements of their calls. Pure."""

from collections.abc import Iterable
from typing import Any

Calls = Iterable[dict[str, Any]]
"""`embedder.store.step_metrics.Measurement` values of one step."""


def spans(calls: Calls) -> list[tuple[float, float]]:
    """Find the time that each replica worked: start of its first call and end of its last, sorted by start."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for call in calls:
        start_s, stop_s = call["started_s"], call["started_s"] + call["wall_s"]
        replica = call["node"], call["pid"]
        first_s, last_s = found.get(replica, (start_s, stop_s))
        found[replica] = min(first_s, start_s), max(last_s, stop_s)
    return sorted(found.values())


def timeline(calls: Calls, begin_s: float) -> list[tuple[float, int]]:
    """Count the replicas that were at work, whenever their number changed.

    Args:
        calls: measurements of one step.
        begin_s: Unix time that counts as 0.

    Returns:
        Pairs of seconds and number; the last number is 0.
    """
    changes: dict[float, int] = {}
    for start_s, stop_s in spans(calls):
        changes[start_s] = changes.get(start_s, 0) + 1
        changes[stop_s] = changes.get(stop_s, 0) - 1
    number, line = 0, []
    for time_s, change in sorted(changes.items()):
        number += change
        line.append((round(time_s - begin_s, 2), number))
    return line


def replica_seconds(calls: Calls, window: tuple[float, float], num_at_start: int) -> float:
    """Sum the seconds that all replicas of a step had: the first ones the whole window, later ones from their start.

    Args:
        calls: measurements of one step.
        window: Unix times of the first call of all steps and of the last one's end.
        num_at_start: replicas that were started before the first call.
    """
    start_s, stop_s = window
    later = spans(calls)[num_at_start:]
    return (stop_s - start_s) * num_at_start + sum(stop_s - first_s for first_s, _ in later)
