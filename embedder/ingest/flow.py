"""The flow that `embed` and `refresh` share: list, compare, judge the listing, embed, judge the result, publish.

Whatever is light comes first: a night without a change ends after the comparison, and has loaded nothing.
"""

import time
from dataclasses import replace
from functools import partial

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.engine.int8_check import check_int8
from embedder.engine.progress import RunWatcher
from embedder.errors import RunFailedError
from embedder.ingest.build_report import idle_report
from embedder.ingest.ended import Ended
from embedder.ingest.execute import execute
from embedder.ingest.guards import check_forced, force, judge_hold
from embedder.ingest.inputs import as_of_now, open_inputs
from embedder.ingest.judging import judge_earlier, judge_start, refusal
from embedder.ingest.known_items import NOTHING_FINISHED, left_out_before, published_items
from embedder.ingest.publish_or_refuse import end_run, told_left_out
from embedder.ingest.request import Request
from embedder.ingest.takeover import RolledBackRecords, find_equal, find_held, take_over, with_held_versions
from embedder.ingest.work import IngestOptions, WorkPlan, outdated_by, plan_work, retired_ids
from embedder.observability.run_observer import operation
from embedder.report.schema import Report
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, STORE_FILE, Current, StoreInfo, read_current, read_record
from embedder.store.lock import write_lock
from embedder.store.publish import NO_IDS, finish_publication
from embedder.store.purge.tombstones import without_purged
from embedder.store.refusals import look, no_empty_folders, taken_back
from embedder.store.runs import Run, finished_items, next_session, start_run
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.store_info import bind_store, check_binding, check_writable
from embedder.store.tables import RecordTable
from embedder.store_index.keep_index import keep_index, make_first_index


def refresh(config: RunConfig, watcher: RunWatcher, options: IngestOptions) -> Report:
    """Bring the store to what the sources hold: new, changed, deleted since last time; then the index.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        watcher: is told what happens.
        options: limits, retries, overridden guards.

    Raises:
        ConfigError, SourceError, StoreError: as `embedder.ingest.embed.embed`; another model is no mistake here.
        RunFailedError: a signal came, or a guard refused the listing or what would have been published.
    """
    return run_flow(config, watcher, replace(options, kind="refresh"))


def run_flow(config: RunConfig, watcher: RunWatcher, options: IngestOptions) -> Report:
    """Do what `embed` or `refresh` promises, and tell the operators."""
    started_s = time.time()
    with operation(config, options.kind, watcher) as operators:
        check_forced(options.forced)
        if (held := _held(config, options, started_s)) is not None:  # before a listing that may take hours
            operators.reported(held)
            return held
        inputs = open_inputs(config, may_be_empty=options.may_change)
        if read_current(inputs.files) is None:
            check_int8(config, inputs.model)  # before a store is made
        check_binding(inputs.files, inputs.info, may_change=options.may_change)
        files = inputs.files
        before = look(files)
        with no_empty_folders(files.folder), write_lock(files, operators.say), taken_back(files, before):
            report = _run_locked(Request(as_of_now(inputs), options, operators, started_s))
        operators.reported(report)
        return report


def _run_locked(request: Request) -> Report:
    inputs, options = request.inputs, request.options
    config, files = inputs.config, inputs.files
    if (refused := _held(config, options, request.started_s)) is not None:
        return refused
    served = _settle(request)
    listing, num_purged = without_purged(inputs.listing, files)
    current = read_current(files)
    published = published_items(files, current)
    outdated = outdated_by(served, inputs.info) if current is not None else None
    plan = partial(plan_work, config, options, listing, published, outdated=outdated)
    work = plan(NOTHING_FINISHED)
    verdicts = judge_start(request, current, work, published)
    before = left_out_before(files, current, published, listing)
    idle = idle_report(options.kind, work.difference.num_unchanged, request.started_s)
    if any(verdict.blocks for verdict in verdicts):
        verdicts = (*verdicts, *judge_earlier(request, listing, published, work))
        reason = refusal(verdicts) or ""
        guards = tuple(verdict.model_dump() for verdict in verdicts)
        request.watcher.reported(idle.model_copy(update={"outcome": reason, "guards": guards}))
        raise RunFailedError(reason)
    if current is not None and work.is_nothing:
        return _idle_night(request, idle, before)
    run, finished = _begin(request, current)
    work = plan(finished) if finished.num_rows else work
    held = find_held(files, current, inputs.info, work.difference.to_embed)
    if held.as_listed:
        run = _take_over(request, run, held.as_listed, work.difference.to_embed)
        finished = finished_items(run)
        work = plan(finished)
    request.watcher.say(describe(work) + (f"; {num_purged:,} purged and left out" if num_purged else ""))
    chosen = with_held_versions(work.difference.first(options.limit).to_embed, held)
    outcome = execute(config, inputs.model, inputs.plan, run, chosen, request.watcher, request.stop_at_s)
    if equal := find_equal(run, held):
        _take_over(request, next_session(run), equal, chosen)
    retired = retired_ids(listing, work, finished) if options.may_change else NO_IDS
    return end_run(request, Ended(outcome, work, current, verdicts, retired, before))


def _held(config: RunConfig, options: IngestOptions, started_s: float) -> Report | None:
    """Report on a run that does nothing, as a rollback holds the store; None where it may go on."""
    files = StoreFiles(config.store) if config.store is not None else None
    if files is None or not files.exists(CURRENT_FILE):
        return None
    verdict = judge_hold(files.address, read_current(files))
    if verdict is None or not force(verdict, options.forced).blocks:
        return None
    idle = idle_report(options.kind, 0, started_s)
    return idle.model_copy(update={"outcome": verdict.message, "held": True, "guards": (verdict.model_dump(),)})


def _begin(request: Request, current: Current | None) -> tuple[Run, pa.Table]:
    """Start a run, or go on with the last one; and what its earlier sessions finished."""
    carryover = _check_columns(request, is_first=current is None)
    run = start_run(request.inputs.files, request.inputs.info, carryover)
    request.watcher.begun(run)
    return run, finished_items(run)


def _take_over(request: Request, run: Run, held: tuple[RolledBackRecords, ...], listed: pa.Table) -> Run:
    """Copy what rolled back publications hold into the run's session; gives the run in its next one."""
    for each in held:
        num_items = each.records.num_rows
        request.watcher.say(f"{num_items:,} items are taken over from run {each.version.run_id}, not computed again")
    take_over(run, held, listed, request.inputs.config.rows_per_part)
    return next_session(run)


def _idle_night(request: Request, idle: Report, before: pa.Table) -> Report:
    """End a night without a change; a store from before each publication made an index gets its first.

    Args:
        request: what is asked.
        idle: the report so far.
        before: items that earlier runs left out.
    """
    config = request.inputs.config
    counts = told_left_out(request, before).as_counts()
    number = make_first_index(request.inputs.files, request.watcher.say, config.index, config.ray_address)
    outcome = idle.outcome if number is None else f"nothing to embed; index {number} is made"
    return idle.model_copy(update={**counts, "num_unchanged": idle.num_unchanged - before.num_rows, "outcome": outcome})


def _settle(request: Request) -> StoreInfo:
    """Bring a publication that was cut off to its end; then say whose vectors the store serves."""
    files, wishes, say = request.inputs.files, request.inputs.config.index, request.watcher.say
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is not None:
        check_writable(files, bound)
        if finish_publication(files, lambda version, info: keep_index(files, version, info, say, wishes)):
            say("the last publication was cut off; now it is whole")
    return bind_store(files, request.inputs.info, may_change=request.options.may_change)


def _check_columns(request: Request, *, is_first: bool) -> pa.Schema:
    """The carried columns, which must be the table's; an empty listing has none and is left alone."""
    inputs = request.inputs
    if not is_first:
        check_int8(inputs.config, inputs.model)
    carryover = carried_schema(inputs.listing.schema)
    if inputs.listing.num_rows:
        RecordTable(inputs.files, "embeddings").check_schema(with_carryover(EMBEDDINGS, carryover))
    return carryover


def describe(work: WorkPlan) -> str:
    """What is to be done, in one line."""
    difference = work.difference
    parts = [f"{num:,} {reason}" for reason, num in difference.reasons.items()]
    if work.retired.num_rows:
        parts.append(f"{work.retired.num_rows:,} gone")
    return ", ".join([*parts, f"{difference.num_unchanged:,} unchanged or finished before"])
