"""Interim publications: every `publish_every_s`, what a run has finished so far is judged and made visible.

Guards judge a batch by itself, as they would a run: too many rejects, collapsed vectors, or captions that find their
images worse than in what was published before the run keep it back. The run goes on, and the batch is judged again
with what is finished by the next time; so are, at the end, the run as a whole and what it lost. Nothing leaves the
store before that: deleted items stay, and vectors of another model wait for all of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from embedder.batch_schema import carried_schema, step_schema
from embedder.engine.query_tower_export import keep_query_towers
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.ingest.guards import judge, refusal
from embedder.ingest.inputs import Inputs
from embedder.ingest.run_result import count_run
from embedder.ingest.work import WorkPlan
from embedder.quantities import counted
from embedder.store.interim import NO_IDS, UnpublishedWork
from embedder.store.layout import read_current
from embedder.store.lock import LeaseLostError
from embedder.store.part_writer import RunMetadata
from embedder.store.publication import PublishIntent
from embedder.store.publish import publish_interim
from embedder.store.runs import Run
from embedder.store_index.keep_index import keep_index

LOG = logging.getLogger(__name__)
PAUSE_SHARE = 10.0
"""Least pause after a publication, in units of the time that it took: on a large store the index takes minutes."""


@contextmanager
def interim_publications(inputs: Inputs, run: Run, chosen: pa.Table, work: WorkPlan) -> Iterator[None]:
    """Publish what is finished from time to time while the block runs, in a thread of this process.

    Args:
        inputs: configuration, store and model; without `publish_every_s` nothing is done.
        run: the run and its session.
        chosen: items that the session embeds.
        work: the decision about the listing; where all that is published is outdated, nothing is done.
    """
    every_s = inputs.config.publish_every_s
    if every_s is None or work.outdated is not None or not chosen.num_rows:
        yield
        return
    publisher = _Publisher(inputs, run, chosen)
    ended, failures = threading.Event(), list[BaseException]()
    thread = threading.Thread(
        target=_repeat, args=(publisher.publish, every_s, ended, failures), name="publisher", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # a publication that has begun comes to its end
    for failure in failures:
        raise failure


def _repeat(publish: Callable[[], None], every_s: float, ended: threading.Event, failures: list[BaseException]) -> None:
    """Publish again and again; what the store can't do now is told, and a bug is raised in the run's own thread."""
    pause_s = every_s
    while not ended.wait(pause_s):
        began_s = time.monotonic()
        try:
            publish()
        except LeaseLostError:
            return  # the run ends by that
        except (RunFailedError, OSError, *USER_MISTAKES) as error:
            LOG.warning(f"what is finished so far is not published yet: {error}")
        except BaseException as error:  # noqa: BLE001 - raised again when the run has ended
            failures.append(error)
            return
        pause_s = max(every_s, PAUSE_SHARE * (time.monotonic() - began_s))


class _Publisher:
    """Publisher of a session's finished work."""

    def __init__(self, inputs: Inputs, run: Run, chosen: pa.Table) -> None:
        self._inputs, self._run = inputs, run
        self._work = UnpublishedWork(run, chosen["item_id"])
        info = run.info
        self._stamp = RunMetadata(
            run.run_id,
            run.session,
            info.model_fingerprint,
            info.preprocess_fingerprint,
            carried_schema(chosen.schema),
            step_schema(info.step_columns),
        )

    def publish(self) -> None:
        """Publish what is new, unless a guard refuses it."""
        batch = self._work.next()
        if not batch.whole.num_rows:
            return
        inputs, files, config = self._inputs, self._run.files, self._inputs.config
        current = read_current(files)
        result = count_run(self._run, current, NO_IDS, batch=batch)
        if (refused := refusal(judge(result, config, inputs.options.forced), "the run goes on")) is not None:
            LOG.warning(f"what is finished so far is not published yet: {refused}")
            return
        intent = PublishIntent(
            kind=inputs.options.kind,
            info=inputs.info,
            retrieval=None if current is None else current.retrieval,  # the run as a whole is judged by that
        )
        keep_query_towers(files, inputs.info, inputs.model)
        record = publish_interim(
            self._run,
            batch,
            self._stamp,
            lambda version: keep_index(files, version, inputs.info, config.index),  # the run has the cluster's CPUs
            intent,
        )
        if record is None:
            return
        self._work.published(batch)
        LOG.info(
            f"published so far as {record.run_id}: {counted(record.num_items, 'item')}, "
            f"{counted(record.num_vectors, 'vector')}; the run goes on"
        )
