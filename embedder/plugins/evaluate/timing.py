"""Latency and throughput of queries by the wall clock, after a warm-up."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from embedder.plugins.evaluate.evaluate_report import Latency, Throughput
from index.vectors import Floats

NUM_WARM_UP = 3
MAX_SINGLE = 1000  # their p99 is the tenth slowest
NUM_RUNS = 3
BUDGET_S = 2.0  # of each measurement


def time_each(
    answer: Callable[[Any], object],
    queries: list[Any],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Ask one query after another, each once, until the budget is spent; at least one is timed."""
    for query in queries[:NUM_WARM_UP]:
        answer(query)
    seconds: list[float] = []
    started = clock()
    for query in queries[:MAX_SINGLE]:
        before = clock()
        answer(query)
        after = clock()
        seconds.append(after - before)
        if after - started > budget_s:
            break
    return latency_of(seconds)


def latency_of(seconds: list[float]) -> Latency:
    """Latency of queries asked one after another, given the seconds of each; at least one."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99), method="higher")
    return Latency(
        p50_ms=1e3 * float(p50),
        p99_ms=1e3 * float(p99),
        queries_per_s=len(seconds) / max(sum(seconds), 1e-9),
        num_queries=len(seconds),
    )


def time_throughput(search: Callable[[Floats, int], object], queries: Floats, num_threads: int) -> Throughput:
    """Measure queries per second; `search(queries, num_threads)` answers all of them."""

    def ask_one(number: int) -> None:
        search(queries[number : number + 1], 1)

    numbers = range(min(MAX_SINGLE, len(queries)))
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(ask_one, numbers[: NUM_WARM_UP * num_threads]))
        single_s = _seconds(lambda: list(pool.map(ask_one, numbers)))
    search(queries[:NUM_WARM_UP], num_threads)
    batch_s = _seconds(lambda: search(queries, num_threads))
    return Throughput(
        num_threads=num_threads,
        single_queries_per_s=len(numbers) / single_s,
        batch_queries_per_s=len(queries) / batch_s,
    )


def _seconds(run: Callable[[], object]) -> float:
    """Median of a few runs, or of fewer if they take long."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < NUM_RUNS and sum(seconds) < BUDGET_S):
        started = time.perf_counter()
        run()
        seconds.append(max(time.perf_counter() - started, 1e-9))
    return statistics.median(seconds)
