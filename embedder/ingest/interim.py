"""Interim publications: every `publish_every_s`, what a run's models have finished is judged and made visible.

Guards judge a batch by itself, like a run. A batch that is kept back is judged again next time, with what is finished
by then. Until the run ends nothing leaves the store: deleted items stay, and rows of a changed model wait for all of
them. The batches of all models form one publication, which a guard of any of them keeps back.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import carried_schema, step_schema
from embedder.encoders.query_tower_export import keep_query_towers
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.executors.job import ModelRun
from embedder.ingest.guards import Verdict, judge, refusal
from embedder.ingest.inputs import Inputs
from embedder.ingest.model_work import ModelPlan, ModelResult, judge_model
from embedder.ingest.run_result import count_run
from embedder.ingest.work import WorkPlan
from embedder.quantities import plural
from embedder.steps.further_inputs import REASON, of_model, select_for_main_model
from embedder.store.journal.part_writer import RunMetadata
from embedder.store.journal.runs import Run
from embedder.store.layout import StoreInfo, read_current
from embedder.store.lock import LeaseLostError
from embedder.store.publish.interim import NO_IDS, InterimBatch, UnpublishedWork
from embedder.store.publish.publication import PublishIntent
from embedder.store.publish.publish import InterimWork, publish_interim
from embedder.store_index.keep_index import ensure_index, model_index_builder

LOG = logging.getLogger(__name__)
PAUSE_SHARE = 10.0
"""Least pause after a publication, relative to its duration: on a large store the index takes minutes."""


@contextmanager
def interim_publications(
    inputs: Inputs,
    run: Run,
    chosen: pa.Table,
    work: WorkPlan,
    models: Sequence[tuple[ModelPlan, ModelRun]] = (),
) -> Iterator[None]:
    """Publish what is finished from time to time while the block runs, in a thread of this process.

    Does nothing without `publish_every_s`, or if `work` finds everything published outdated. `chosen` are the items
    that the session embeds. Outdated rows of a further model wait for the end.
    """
    every_s = inputs.config.publish_every_s
    if every_s is None or work.outdated is not None or not chosen.num_rows:
        yield
        return
    publisher = _Publisher(inputs, run, chosen, models)
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
    while not ended.wait(pause_s):
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
    def __init__(
        self, inputs: Inputs, run: Run, chosen: pa.Table, models: Sequence[tuple[ModelPlan, ModelRun]]
    ) -> None:
        self._inputs, self._run = inputs, run
        self._work = UnpublishedWork(run, select_for_main_model(chosen)["item_id"])
        info = run.info
        self._stamp = RunMetadata(
            run.run_id,
            run.session,
            info.model_fingerprint,
            info.preprocess_fingerprint,
            carried_schema(chosen.schema),
            step_schema(info.step_columns),
        )
        self._models = [_ModelPublisher(each, own, chosen) for each, own in models if each.work.outdated is None]

    def publish(self) -> None:
        batch = self._work.next()
        found = [(each, each.work.next(self._work.seen)) for each in self._models]
        models = [(each, own) for each, own in found if own.whole.num_rows]
        if not (batch.whole.num_rows or models):
            return
        inputs, files, config = self._inputs, self._run.files, self._inputs.config
        verdicts = self._judge_all(batch) if batch.whole.num_rows else []
        verdicts += [verdict for each, own in models for verdict in each.judge(own, inputs)]
        if (refused := refusal(verdicts, "the run goes on")) is not None:
            LOG.warning(f"what is finished so far is not published yet: {refused}")
            return
        keep_query_towers(files, inputs.info, inputs.model)
        record = publish_interim(
            InterimWork(self._run, batch, self._stamp, _intent(self._run, inputs, inputs.info)),
            lambda version: ensure_index(files, version, inputs.info, config.index),  # the run has the cluster's CPUs
            [each.to_publish(own, inputs) for each, own in models],
            model_index_builder(config.index),
        )
        if record is None:
            return
        for work, own in [(self._work, batch), *((each.work, own) for each, own in models)]:
            work.note_published(own)
        LOG.info(
            f"published so far as {record.run_id}: {plural(record.num_items, 'item')}, "
            f"{plural(record.num_vectors, 'vector')}; the run goes on"
        )

    def _judge_all(self, batch: InterimBatch) -> list[Verdict]:
        result = count_run(self._run, read_current(self._run.files), NO_IDS, batch=batch)
        return list(judge(result, self._inputs.config.limits, self._inputs.options.forced))


class _ModelPublisher:
    """A further model's share in the publications of a session."""

    def __init__(self, plan: ModelPlan, own: ModelRun, chosen: pa.Table) -> None:
        in_work = chosen.filter(pc.is_valid(chosen[of_model(REASON, plan.model.name)]))["item_id"]
        self._plan, self._own = plan, own
        self.work = UnpublishedWork(own.run, in_work)

    def judge(self, batch: InterimBatch, inputs: Inputs) -> tuple[Verdict, ...]:
        run = self._own.run
        result = count_run(run, read_current(run.files), NO_IDS, batch=batch)
        return judge_model(
            ModelResult(self._plan, self._own, result), inputs.config.limits, inputs.options.forced
        ).verdicts

    def to_publish(self, batch: InterimBatch, inputs: Inputs) -> InterimWork:
        run = self._own.run
        return InterimWork(run, batch, self._own.stamp, _intent(run, inputs, self._plan.model.info))


def _intent(run: Run, inputs: Inputs, info: StoreInfo) -> PublishIntent:
    """Return the intent of a model's part; the run as a whole is judged by the R@k published before it."""
    current = read_current(run.files)
    retrieval = None if current is None else current.retrieval
    return PublishIntent(kind=inputs.options.kind, info=info, retrieval=retrieval)
