"""What a store takes that is opened as a service opens it, and asked one hybrid query after the other.

    python -m growth.asking STORE QUERIES    # a file of queries as JSON; the last line has the figures

Imports nothing of the other scripts, so that the memory of its process is that of a search.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import psutil

import embedder


def ask(address: str, queries: list[str]) -> dict[str, float]:
    """Open a store, and ask it."""
    started = time.perf_counter()
    store = embedder.open_store(address)
    store.prepare()
    opened_s = time.perf_counter() - started
    first, *times = [timed(lambda query=query: store.search(query, hybrid=True)) for query in queries]
    held, status = psutil.Process().memory_info(), Path("/proc/self/status").read_text()
    return {
        "open_s": opened_s,
        "first_ms": first,
        "p50_ms": median(times),
        "p99_ms": quantiles(times, n=100, method="inclusive")[-1],
        "rss_bytes": held.rss,
        "mapped_bytes": held.shared,
        "peak_bytes": int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024,  # `ru_maxrss` knows the parent, too
    }


def timed(ask_once: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    started = time.perf_counter()
    ask_once()
    return 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
