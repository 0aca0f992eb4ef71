"""End of a run whose engine has ended: it is published, kept for the next run, or refused."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.encoders.query_tower_export import keep_query_towers
from embedder.errors import RunFailedError
from embedder.executors.job import ModelRun
from embedder.ingest.build_report import build_report, session_measurements
from embedder.ingest.comparison import ListingComparison
from embedder.ingest.execute import EngineOutcome
from embedder.ingest.guards import Verdict, refusal
from embedder.ingest.inputs import Inputs
from embedder.ingest.model_work import ModelResult, count_model, judge_model, report_models, work_to_publish
from embedder.ingest.retrieval_check import forget_pairs
from embedder.ingest.run_metrics import compute_metrics
from embedder.ingest.run_result import RunResult
from embedder.ingest.run_times import keep_times
from embedder.observability.run_observer import RunObserver
from embedder.quantities import plural
from embedder.report.report_schema import Report
from embedder.report.step_sums import split_loads
from embedder.report.timeline import TIMELINE_FILE, Timeline, timeline_of, timeline_of_calls
from embedder.retrieval.store_api import keep_row_files
from embedder.sources.selection import LeftOut
from embedder.store.journal.finished import whole_among
from embedder.store.journal.journal import stream_keys
from embedder.store.journal.runs import REPORT_FILE
from embedder.store.layout import run_file
from embedder.store.maintenance.compact import MIN_SAVED, MIN_SAVED_BY_EMBED, compact
from embedder.store.publish.interim import interim_state
from embedder.store.publish.publish import publish
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.store_errors import StoreUnwritableError
from embedder.store.tables.arrow_lookup import without_items
from embedder.store_index.keep_index import index_builder, same_index_and_words

LOG = logging.getLogger(__name__)


def end_run(
    found: ListingComparison,
    observer: RunObserver,
    outcome: EngineOutcome,
    verdicts: tuple[Verdict, ...],
    models: Sequence[ModelRun],
) -> Report:
    """Publish, keep, or refuse; the report is saved either way. `models` has each model's run, the main one's first.

    Raises `RunFailedError` if a signal came, a guard refused the publication, or another run took the store over.
    """
    run, inputs = outcome.job.run, found.inputs
    run.files.confirm_lease()  # a process that took the store over continues this run, and writes its report
    ending = _judge_end(found, outcome, verdicts, models)
    report = _report(found, observer, outcome, ending)
    if report.published:
        begun_s = time.monotonic()
        _publish(inputs, ending)
        publish_s = time.monotonic() - begun_s
        keep_times(outcome.job.compute.ray_address, inputs.model.fingerprint, report, ending.result.num_here, publish_s)
    try:
        _write_timeline(outcome, ending.result, observer.started_s)
        run.files.write(run_file(run.run_id, REPORT_FILE), report.model_dump_json(indent=2).encode())
    except StoreUnwritableError as error:
        if not report.published:
            raise
        LOG.warning(f"the run is published, and its report is not kept: {error}")
    if ending.failure is not None:
        observer.on_report(report)
        raise RunFailedError(ending.failure)
    return report


@dataclass(frozen=True)
class _Ending:
    """End of a run: what is finished, and whether it is published.

    `models` has each model's result, the main one's first; `verdicts` are those on the listing and on them. `failure`
    says why nothing is published and the run has failed, `kept` why what is finished waits for the next run.
    """

    models: tuple[ModelResult, ...]
    verdicts: tuple[Verdict, ...]
    failure: str | None = None
    kept: str | None = None

    @property
    def result(self) -> RunResult:
        """The main model's result."""
        return self.models[0].result


def _judge_end(
    found: ListingComparison,
    outcome: EngineOutcome,
    verdicts: tuple[Verdict, ...],
    models: Sequence[ModelRun],
) -> _Ending:
    """Decide whether what is finished is published; guards judge it if the run came to its end."""
    results = tuple(count_model(plan, run) for plan, run in zip(found.plans, models, strict=True))
    num_before = _num_published_before(results[0].result)
    if (failure := _describe_stop(outcome, results, num_before)) is not None:
        return _Ending(results, verdicts, failure=failure)
    if (kept := _describe_kept(results)) is not None:
        return _Ending(results, verdicts, kept=kept)
    limits, forced = found.inputs.config.limits, found.inputs.options.forced
    results = tuple(judge_model(each, limits, forced) for each in results)
    verdicts = (*verdicts, *(verdict for each in results for verdict in each.verdicts))
    beyond = f"nothing is published beyond {plural(num_before, 'item')}, published while it ran"
    failure = refusal(verdicts, beyond if num_before else "nothing is published")
    return _Ending(results, verdicts, failure=failure)


def _report(found: ListingComparison, observer: RunObserver, outcome: EngineOutcome, ending: _Ending) -> Report:
    inputs, work, result = found.inputs, found.work, ending.result
    inputs.left_out.num_json_without_caption = _num_json_without_caption(work.difference.to_embed, result)
    left_out = log_left_out(inputs, found.read_before, result)
    report = build_report(
        inputs,
        outcome,
        work,
        result,
        left_out,
        ending.verdicts,
        started_s=observer.started_s,
        wall_s=observer.elapsed_s,
        not_published=ending.failure or ending.kept,
    )
    is_gone = report.published and inputs.options.may_change
    columns = with_carryover(EMBEDDINGS, outcome.job.stamp.columns)
    added = {
        "models": report_models(ending.models[1:]),
        "removed_models": found.removed if is_gone else (),
        "metrics": compute_metrics(result, inputs.config.metric, columns),
    }
    return report.model_copy(update=added)


def _write_timeline(outcome: EngineOutcome, result: RunResult, started_s: float) -> None:
    if samples := outcome.operators.samples:
        timeline: Timeline | None = timeline_of(samples, started_s)
    else:
        _, calls = split_loads(session_measurements(outcome, result))
        timeline = timeline_of_calls(calls, started_s) if calls else None
    if timeline is not None:
        run = outcome.job.run
        run.files.write(run_file(run.run_id, TIMELINE_FILE), timeline.model_dump_json().encode())


def log_left_out(inputs: Inputs, read_before: pa.Table, result: RunResult | None = None) -> LeftOut:
    """Log and count what is no item, by its name or once read, in this run (`result`) or an earlier one."""
    left_out = inputs.left_out
    if result is not None:
        left_out = left_out.with_read(result.left_out)
        read_before = without_items(read_before, whole_among(result.whole, read_before["item_id"])["item_id"])
    left_out = left_out.with_read(read_before)
    is_kept_shown = result is not None and not _has_named_kept(left_out, result)
    for line in (left_out if is_kept_shown else left_out.without_kept()).lines():
        LOG.info(line)
    return left_out


def _has_named_kept(left_out: LeftOut, result: RunResult) -> bool:
    """Whether the last published run has named the captions that stay as items: once is enough."""
    if result.published is None:
        return True
    try:
        report = json.loads(result.run.files.read(run_file(result.published.run_id, REPORT_FILE)))
    except (FileNotFoundError, ValueError):  # published by an operation, or by an older release
        return False
    return bool(report.get("num_kept_captions", 0) == left_out.num_kept_orphans)


def _num_json_without_caption(to_embed: pa.Table, result: RunResult) -> int:
    """Count the items embedded without a caption although there is a `.json` next to them."""
    is_json = pc.fill_null(pc.ends_with(to_embed["caption_uri"], ".json", ignore_case=True), False)
    ids = to_embed["item_id"].filter(is_json).combine_chunks()
    if not len(ids):
        return 0
    parts = [part for entry in result.entries for part in entry.parts]
    found = (
        rows.filter(pc.and_(pc.equal(rows["segment"], 0), pc.is_null(rows["caption"])))["item_id"]
        for rows in stream_keys(result.run.files, parts, "embeddings", ["item_id", "segment", "caption"])
    )
    chunks = [chunk for each in found for chunk in each.filter(pc.is_in(each, value_set=ids)).chunks if len(chunk)]
    if not chunks:
        return 0
    lacking = pa.chunked_array(chunks).combine_chunks()
    for rows in stream_keys(result.run.files, parts, "items", ["item_id", "error_type"]):  # rejects say why themselves
        broken = rows.filter(pc.is_valid(rows["error_type"]))["item_id"].combine_chunks()
        lacking = lacking.filter(pc.invert(pc.is_in(lacking, value_set=broken)))
    return len(lacking)


def _num_published_before(result: RunResult) -> int:
    names = interim_state(result.run.files, result.run.run_id).names
    return sum(entry.num_items for entry in result.entries if entry.name in names)


def _describe_stop(outcome: EngineOutcome, results: Sequence[ModelResult], num_before: int) -> str | None:
    """Say why the run ended early; None if nobody asked it to stop."""
    if not outcome.stopped and (outcome.out_of_time or not outcome.job.run.stop_requested()):
        return None
    num_items = max(each.result.num_items for each in results)
    if not num_items:
        return "stopped on request before any item was finished; the same command begins again"
    done = f"{plural(num_items, 'item')}, kept and "
    done += f"{num_before:,} of them published" if num_before else "not yet published"
    return f"stopped on request after {done}; the same command continues"


def _describe_kept(results: Sequence[ModelResult]) -> str | None:
    """Say why what is finished waits for the next run; None if it does not."""
    for each in results:
        if (outdated := each.plan.work.outdated) and each.num_left:
            rows = "rows" if each.plan.model.name else "vectors"
            return (
                f"{each.plan.prefix}{outdated}: {plural(each.result.num_items, 'item')} done and kept, "
                f"{each.num_left:,} left; the old {rows} are served until all are done, and the next refresh continues"
            )
    main = results[0]
    if main.num_left and not any(each.has_changes for each in results):
        return f"nothing was finished; {plural(main.num_left, 'item')} left for the next refresh"
    return None


def _publish(inputs: Inputs, ending: _Ending) -> None:
    config, options, files = inputs.config, inputs.options, inputs.files
    keep_query_towers(files, inputs.info, inputs.model)
    LOG.info("publishing")
    works = [
        work_to_publish(each, options.kind, config.deletion_vectors, is_whole=options.may_change)
        for each in ending.models
    ]
    publish(works, index_builder(config.index, config.ray_address))
    for each in ending.models:
        forget_pairs(each.result)
    min_saved = MIN_SAVED if options.kind == "refresh" else MIN_SAVED_BY_EMBED
    choose_index = same_index_and_words(files, config.index)
    compact(files, min_saved=min_saved, choose_index=choose_index, vectors=config.vectors)
    keep_row_files(files)
