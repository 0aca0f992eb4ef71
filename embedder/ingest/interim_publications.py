"""Interim publications: every `publish_every_s`, what a run's models have finished is judged and made visible.

Guards judge a batch by itself, like a run. A batch that is kept back is judged again next time, with what is finished
by then. Until the run ends nothing leaves the store: deleted items stay, and rows of a changed model wait for all of
them. The batches of all models form one publication, which a guard of any of them keeps back.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from embedder.config import RunLimits
from embedder.encoders.query_tower_export import keep_query_towers
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.executors.job import ModelRun
from embedder.ingest.guards import Verdict, refusal
from embedder.ingest.inputs import Inputs
from embedder.ingest.model_work import ModelPlan, count_model, judge_model
from embedder.quantities import plural
from embedder.steps.further_inputs import select_for_model
from embedder.store.layout import Kind, read_current
from embedder.store.lock import LeaseLostError
from embedder.store.publish.interim import InterimBatch, UnpublishedWork
from embedder.store.publish.publication import MarkRows, PublishIntent
from embedder.store.publish.publish import InterimWork, publish_interim
from embedder.store_index.keep_index import index_builder

LOG = logging.getLogger(__name__)
PAUSE_SHARE = 10.0
"""Least pause after a publication, relative to its duration: on a large store the index takes minutes."""


@contextmanager
def interim_publications(
    inputs: Inputs, chosen: pa.Table, plans: Sequence[ModelPlan], models: Sequence[ModelRun]
) -> Iterator[None]:
    """Publish what is finished from time to time while the block runs, in a thread of this process.

    Does nothing without `publish_every_s`, or if all published rows of the main model are outdated; those of a further
    model wait for the end. `chosen` are the items that the session embeds; `plans` and `models` have the main model's
    first.
    """
    every_s = inputs.config.publish_every_s
    if every_s is None or plans[0].work.outdated is not None or not chosen.num_rows:
        yield
        return
    publisher = _Publisher(inputs, chosen, zip(plans, models, strict=True))
    ended, failures = threading.Event(), list[BaseException]()
    thread = threading.Thread(
        target=_repeat, args=(publisher.publish, every_s, ended, failures), name="publisher", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # a publication that has begun is finished
    for failure in failures:
        raise failure


def _repeat(publish: Callable[[], None], every_s: float, ended: threading.Event, failures: list[BaseException]) -> None:
    """Publish repeatedly; failures of the store are logged, and a bug is raised in the run's own thread."""
    pause_s = every_s
    while not ended.wait(min(pause_s, threading.TIMEOUT_MAX)):
        began_s = time.monotonic()
        try:
            publish()
        except LeaseLostError:
            return  # this ends the run
        except (RunFailedError, OSError, *USER_MISTAKES) as error:
            LOG.warning(f"what is finished so far is not published yet: {error}")
        except BaseException as error:  # noqa: BLE001 - raised again when the run has ended
            failures.append(error)
            return
        pause_s = max(every_s, PAUSE_SHARE * (time.monotonic() - began_s))


class _Publisher:
    """Publishes what the models of a session have finished; the main one is the first of `models`."""

    def __init__(self, inputs: Inputs, chosen: pa.Table, models: Iterable[tuple[ModelPlan, ModelRun]]) -> None:
        self._inputs = inputs
        self._models = [_ModelPublisher(*each, chosen) for each in models if each[0].work.outdated is None]

    def publish(self) -> None:
        main, *further = self._models
        batches = [(main, main.work.next())]
        batches += [(each, each.work.next(main.work.seen)) for each in further]
        finished = [(each, batch) for each, batch in batches if batch.whole.num_rows]
        if not finished:
            return
        inputs, options, config = self._inputs, self._inputs.options, self._inputs.config
        verdicts = [verdict for each, batch in finished for verdict in each.judge(batch, config.limits, options.forced)]
        if (refused := refusal(verdicts, "the run continues")) is not None:
            LOG.warning(f"what is finished so far is not published yet: {refused}")
            return
        keep_query_towers(inputs.files, inputs.info, inputs.model)
        published = [(each, batch) for each, batch in batches if each is main or batch.whole.num_rows]
        record = publish_interim(
            [each.to_publish(batch, options.kind, config.deletion_vectors) for each, batch in published],
            index_builder(config.index),  # without a cluster, whose CPUs the run has
        )
        if record is None:
            return
        for each, batch in published:
            each.work.note_published(batch)
        LOG.info(
            f"published so far as {record.run_id}: {plural(record.num_items, 'item')}, "
            f"{plural(record.num_vectors, 'vector')}; the run continues"
        )


class _ModelPublisher:
    """A model's share in the publications of a session."""

    def __init__(self, plan: ModelPlan, run: ModelRun, chosen: pa.Table) -> None:
        self._plan, self._run = plan, run
        self.work = UnpublishedWork(run.run, select_for_model(chosen, plan.model.name)["item_id"])

    def judge(self, batch: InterimBatch, limits: RunLimits, forced: Collection[str]) -> tuple[Verdict, ...]:
        return judge_model(count_model(self._plan, self._run, batch), limits, forced).verdicts

    def to_publish(self, batch: InterimBatch, kind: Kind, marks: MarkRows) -> InterimWork:
        """Return its part; the run as a whole is judged by the R@k published before it.

        `marks` is as in `work_to_publish`.
        """
        current = read_current(self._plan.files)
        retrieval = None if current is None else current.retrieval
        info = self._plan.model.info
        intent = PublishIntent(kind=kind, info=info, retrieval=retrieval, deletion_vectors=marks)
        return InterimWork(self._run.run, batch, self._run.part.metadata, intent)
