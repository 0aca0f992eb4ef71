"""Recall and time of searches, measured alike for every contestant."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

K = 10
NUM_ROUNDS = 5
TURN = 25  # queries

Find = Callable[[np.ndarray], np.ndarray]
"""Queries (Q, E) -> rows (Q, K)."""


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the exact rows that were found."""
    shares = [len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
    return float(np.mean(shares))


def rates(contestants: Mapping[str, Find], queries: np.ndarray) -> dict[str, float]:
    """Queries a second of a batch, median of rounds in which the contestants take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(NUM_ROUNDS + 1):  # the first touches the memory, and does not count
        for name, find in contestants.items():
            started = time.perf_counter()
            find(queries)
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: len(queries) / median(each) for name, each in seconds.items()}


def latencies_ms(contestants: Mapping[str, Find], queries: np.ndarray) -> dict[str, np.ndarray]:
    """Time of each query asked alone, in milliseconds.

    The contestants take turns of some queries: one that takes ten megabytes through the caches slows the next query.
    """
    times = {name: np.empty(len(queries)) for name in contestants}
    for first in range(0, len(queries), TURN):
        for name, find in contestants.items():
            find(queries[first : first + 1])
            for number in range(first, min(first + TURN, len(queries))):
                started = time.perf_counter()
                find(queries[number : number + 1])
                times[name][number] = (time.perf_counter() - started) * 1000
    return times
