"""The local engine: the same steps as on Ray, in one process; decoding runs ahead of the threads that encode.

If every item may turn out to be equal to what is published, stages are loaded when the first row needs them; else
before the first item, so that start-up and steady work are measured separately.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.light_imports import is_command, sparing_imports
from embedder.executors.carried import detach_carried_columns
from embedder.executors.executor import Executor, OnSample
from embedder.executors.job import Job
from embedder.executors.local_threads import encode_all
from embedder.executors.signals import StopRequest
from embedder.models.model_actor import ModelStage
from embedder.placement import hardware
from embedder.placement.fleet import Available
from embedder.steps.decode import VERSIONS, decode, forget_reader
from embedder.steps.further_inputs import MAIN_INPUTS, select_for_model, without_vectors
from embedder.store.journal.model_parts import write_parts
from embedder.store.journal.part_writer import gather_rows
from embedder.user_steps.written_rows import forget_calls

if TYPE_CHECKING:
    from embedder.steps.stage import TowerStage

BATCHES_AHEAD = 4  # decoded batches that may wait for the first stage
POLL_S = 0.1  # between two checks for whether the other side has stopped
PATIENCE_S = 1.0  # for an item being decoded when a stop is requested; most take less, some never end


class LocalExecutor(Executor):
    """This process: all steps in threads."""

    def __enter__(self) -> Self:
        """Count the CPUs."""
        self.available = Available(num_cpus=hardware.num_cpus())
        return self

    def run(self, listing: list[pa.Table], job: Job, stop: StopRequest, on_sample: OnSample) -> None:
        """Run a job over a listing; there are no operators to sample."""
        embed_locally(listing, job, stop)


def embed_locally(listing: Iterable[pa.Table], job: Job, stop: StopRequest | None = None) -> None:
    """Decode, encode and write all listed items, or those that are finished when a stop is requested."""
    listing, carried = detach_carried_columns(listing, job.carried_inputs)
    stop = stop or StopRequest(job.run.request_stop, timeout_s=math.inf)
    stages = _Stages(job, stop)
    if not all(may_be_equal(select_for_model(table)) for table in listing):
        with stop.breakable():
            stages.load()
    if job.groups:
        with stop.breakable():
            stages.load_models()
    try:
        with closing(stages), closing(ahead(_decode_listing(listing, job), lambda: stop.asked)) as decoded:
            encoded = encode_all(decoded, stages.encode, hardware.num_cpus())
            for task, rows in enumerate(gather_rows(encoded, job.compute.rows_per_part)):
                write_parts(job.parts, task, job.before_write(carried.join(rows)))
    finally:
        forget_calls()
    if stop.asked:
        forget_reader()  # an abandoned thread may still use it


def may_be_equal(listing: pa.Table) -> bool:
    """Whether all of a listing's items have rows that may stay or be taken over."""
    known = [pc.is_valid(listing[name]) for name in VERSIONS if name in listing.schema.names]
    return bool(known) and bool(pc.all(reduce(pc.or_, known), min_count=0).as_py())


class _Stages:
    """All stages of a job, in sequence; several threads may use them at once."""

    def __init__(self, job: Job, stop: StopRequest) -> None:
        self._job, self._stop = job, stop
        self._loaded: list[TowerStage] = []
        self._models: list[ModelStage] = []
        self._loading, self._turn = threading.Lock(), threading.Lock()

    def load(self) -> "list[TowerStage]":
        with self._loading:
            if not self._loaded:
                with self._imports():
                    from embedder.steps.stage import TowerStage

                    specs = [replace(spec, num_threads=1) for spec in self._job.stages]
                    self._loaded = [TowerStage(spec).load() for spec in specs]
        return self._loaded

    def _imports(self) -> AbstractContextManager[None]:
        """Import only what towers need, unless other code of this process uses the same libraries."""
        if self._job.groups or not is_command():
            return nullcontext()
        return sparing_imports(with_text=any(spec.shard.text for spec in self._job.stages))

    def load_models(self) -> list[ModelStage]:
        with self._loading:
            limits = self._job.decode.limits
            self._models = self._models or [ModelStage(group, limits).load() for group in self._job.groups]
        return self._models

    def close(self) -> None:
        for models in self._models:
            models.close()

    def encode(self, table: pa.Table) -> pa.Table:
        """Replace the towers' inputs by embeddings; rows without any need no stage.

        A table that is not begun when a stop is requested, or not finished in time, gives no row.
        """
        if self._stop.asked:
            return table.slice(0, 0)
        if self._job.groups and table.num_rows:
            with self._turn:
                for models in self.load_models():
                    table = models(table)
        if all(table[name].null_count == table.num_rows for name in MAIN_INPUTS):
            return without_vectors(table)
        for stage in self.load():
            if self._stop.is_overdue:
                return table.slice(0, 0)
            table = stage(table)
        return table


def _decode_listing(listing: Iterable[pa.Table], job: Job) -> Iterator[pa.Table]:
    for items in listing:
        yield from decode(items, spec=job.decode, run=job.run)


def ahead(
    tables: Iterator[pa.Table], should_stop: Callable[[], bool] = lambda: False
) -> Generator[pa.Table, None, None]:
    """Run the iterator in its own thread, a few tables ahead of the consumer; its error is raised here.

    `should_stop` is checked before each table, and while there is none; a table being made then is abandoned.
    """
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
        while not should_stop() and (table := _get(ready, should_stop)) not in (done, None):
            if isinstance(table, BaseException):
                raise table
            yield table
    finally:
        stopped.set()
        given_up_s = time.monotonic() + PATIENCE_S
        while thread.is_alive() and not (should_stop() and time.monotonic() > given_up_s):
            thread.join(POLL_S)


def _put(ready: "queue.Queue[Any]", item: object, stopped: threading.Event) -> bool:
    """Wait for room, but not once the consumer has gone."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False


def _get(ready: "queue.Queue[Any]", should_stop: Callable[[], bool]) -> Any:
    """Wait for a table; None once the consumer should stop."""
    while True:
        try:
            return ready.get(timeout=POLL_S)
        except queue.Empty:
            if should_stop():
                return None
