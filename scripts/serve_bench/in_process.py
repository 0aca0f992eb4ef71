"""Searches in one process, without a service: CPU of batches and time of single queries, as JSON.

    python -m serve_bench.in_process STORE NUM_QUERIES

No text is asked twice, and none that the service is asked.
"""

import json
import sys
import time
from statistics import median

from embedder.retrieval.store_api import open_store
from serve_bench.stores import Texts

K = 10
BATCH = 32
FIRST_TEXT = 10_000_000  # those before are asked through the service
MAX_SINGLE = 300


def main(store: str, num_queries: int) -> dict:
    """Ask texts in batches, then others one by one."""
    opened, texts = open_store(store), Texts()
    opened.search([texts[FIRST_TEXT - 1 - number] for number in range(BATCH)], K)  # loads all
    batches = [
        [texts[FIRST_TEXT + start + number] for number in range(BATCH)] for start in range(0, num_queries, BATCH)
    ]
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for batch in batches:
        opened.search(batch, K)
    num_asked = BATCH * len(batches)
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / num_asked
    wall_s = time.perf_counter() - began_s
    times = []
    for number in range(min(num_queries, MAX_SINGLE)):
        text = texts[2 * FIRST_TEXT + number]
        began = time.perf_counter()
        opened.search(text, K)
        times.append(1e3 * (time.perf_counter() - began))
    return {
        "num_vectors": len(opened.searcher.snapshot.vectors),
        "cpu_ms": cpu_ms,
        "queries_per_s": num_asked / wall_s,
        "median_of_one_ms": median(times),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
