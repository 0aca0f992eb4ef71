"""The local engine: the same steps as on Ray, in one process; decoding runs ahead of the stages in a thread."""

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from embedder.run import machine
from embedder.run.job import Job
from embedder.steps.decode import decode
from embedder.steps.stage import Stage
from embedder.store.parts import write_part

BATCHES_AHEAD = 4  # decoded batches that may wait for the first stage


def embed_locally(listing: Iterable[pa.Table], job: Job) -> None:
    """Decode, encode and write all listed items."""
    # The stages take turns here, so each may use all cores.
    stages = [Stage(replace(spec, num_threads=machine.num_cpus())) for spec in job.stages]
    rows: list[pa.Table] = []
    task = 0
    for table in ahead(_decoded(listing, job)):
        for stage in stages:
            table = stage(table)  # noqa: PLW2901 - each stage hands its output to the next
        rows.append(table)
        if sum(part.num_rows for part in rows) >= job.config.rows_per_part:
            write_part(job.files, job.stamp, task, pa.concat_tables(rows))
            rows, task = [], task + 1
    if rows:
        write_part(job.files, job.stamp, task, pa.concat_tables(rows))


def _decoded(listing: Iterable[pa.Table], job: Job) -> Iterator[pa.Table]:
    for items in listing:
        yield from decode(items, spec=job.decode, run=job.run)


def ahead(tables: Iterator[pa.Table]) -> Generator[pa.Table, None, None]:
    """Run the iterator in a thread of its own, a few tables ahead of the consumer; its error is raised here."""
    done = object()
    ready: queue.Queue[Any] = queue.Queue(BATCHES_AHEAD)
    stopped = threading.Event()

    def produce() -> None:
        try:
            for table in tables:
                if not _put(ready, table, stopped):
                    return
            _put(ready, done, stopped)
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            _put(ready, error, stopped)

    thread = threading.Thread(target=produce, name="decode", daemon=True)
    thread.start()
    try:
        while (got := ready.get()) is not done:
            if isinstance(got, BaseException):
                raise got
            yield got
    finally:
        stopped.set()
        thread.join()


def _put(ready: "queue.Queue[Any]", item: object, stopped: threading.Event) -> bool:
    """Wait for room, but not once the consumer has gone."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False
