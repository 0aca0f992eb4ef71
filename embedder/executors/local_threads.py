"""Threads that encode tables: one per core with one torch thread each, or one with all cores; the faster is measured.

Workers with one torch thread never wait for each other, while an operation's torch threads wait for the slowest of
them, and decoding always slows one down. But each worker holds its own activations, and many share Python's lock.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice

import pyarrow as pa

Encode = Callable[[pa.Table], pa.Table]

NUM_TRIALS = 3  # tables for each worker; the first one loads kernels and fills the caches
MIN_GAIN = 0.05  # less is noise


def encode_with(
    tables: Iterable[pa.Table], encode: Encode, num_workers: int, num_threads: int
) -> Generator[pa.Table, None, None]:
    """Encode tables in threads and yield them in their order; at most one for each worker is taken in advance."""

    def work(table: pa.Table) -> pa.Table:
        if _has_torch():
            import torch

            torch.set_num_threads(num_threads)  # a setting of the calling thread
        return encode(table)

    with ThreadPoolExecutor(num_workers, "encode") as pool:
        under_way: deque[Future[pa.Table]] = deque()
        try:
            for table in tables:
                under_way.append(pool.submit(work, table))
                if len(under_way) > num_workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _has_torch() -> bool:
    """Whether torch is imported; if all rows stay as published, it never is."""
    return "torch" in sys.modules


def encode_all(tables: Iterator[pa.Table], encode: Encode, num_cpus: int) -> Iterator[pa.Table]:
    """Encode tables in their order, with the threads that measure faster on the first of them."""
    single_threaded, multi_threaded = (num_cpus, 1), (1, num_cpus)  # workers, and threads of each
    if num_cpus == 1:
        yield from encode_with(tables, encode, *single_threaded)
        return
    rows_per_s = []
    for threads in (single_threaded, multi_threaded):
        warm_up = list(islice(tables, num_cpus))
        yield from encode_with(warm_up, encode, *threads)
        trial = list(islice(tables, (NUM_TRIALS - 1) * num_cpus))
        if not _has_torch():
            yield from encode_with(chain(trial, tables), encode, *single_threaded)
            return
        started_s = time.perf_counter()
        done = list(encode_with(trial, encode, *threads))
        rows_per_s.append(sum(table.num_rows for table in done) / (time.perf_counter() - started_s))
        yield from done
    best = multi_threaded if rows_per_s[1] > (1 + MIN_GAIN) * rows_per_s[0] else single_threaded
    yield from encode_with(tables, encode, *best)
