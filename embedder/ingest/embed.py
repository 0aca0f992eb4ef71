"""The main job, `embed` and `refresh`: list, compare, judge the listing, embed, judge the result, publish.

Cheap steps come first: a run without changes ends after the comparison and has loaded nothing. The journal of an
unfinished run is read before the only decision about the work. Once the engine has ended, it is read again from the
store (`embedder.ingest.run_result`), as the record of what any process finished.
"""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig, with_fast_start
from embedder.errors import RunFailedError
from embedder.executors.cluster_address import find_cluster
from embedder.executors.find_gpus import find_gpus
from embedder.executors.job import ModelRun, check_int8
from embedder.executors.progress import ShowProgress, no_progress
from embedder.ingest.build_report import idle_report
from embedder.ingest.comparison import ListingComparison, compare_listing
from embedder.ingest.execute import EngineOutcome, execute
from embedder.ingest.guards import Verdict, check_forced, judge_earlier, judge_hold, judge_listing, refusal
from embedder.ingest.inputs import Inputs, list_again_if_published, open_inputs, supply_contents
from embedder.ingest.interim_publications import interim_publications
from embedder.ingest.model_work import begin_models, check_models, items_of_any_model, report_removed
from embedder.ingest.new_copies import NEW_COPIES, find_new_copies
from embedder.ingest.publish_or_refuse import end_run, log_left_out
from embedder.ingest.takeover import (
    HeldItems,
    HeldRecords,
    find_equal,
    find_finished_copies,
    find_held,
    find_taken,
    take_over,
    with_held_versions,
)
from embedder.ingest.work import IngestOptions, WorkPlan
from embedder.installation import require
from embedder.observability.run_observer import RunObserver, observe_run
from embedder.placement.compute_dtype import check_dtype, describe_dtype
from embedder.quantities import plural
from embedder.report.report_schema import Report
from embedder.store.files import StoreFiles
from embedder.store.journal.refusals import remove_empty_folders, rollback_on_mistake, snapshot_files
from embedder.store.journal.runs import Run, finished_items, next_session, start_run
from embedder.store.layout import RAW, STORE_FILE, Current, StoreInfo, read_current, read_record
from embedder.store.lock import write_lock
from embedder.store.publish.publish import finish_publication
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.store_info import bind_store, check_writable, other_libraries
from embedder.store.tables.arrow_lookup import without_ids, without_items
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import index_builder, make_first_index
from shards.model_summary import untrained_reason

LOG = logging.getLogger(__name__)
DEFAULT_OPTIONS = IngestOptions()
MAX_COPIES_S, COPIES_SHARE = 600.0, 0.05  # of seconds, and of a run's own limit: to look for new copies


@with_fast_start
def embed(
    config: RunConfig,
    show_progress: ShowProgress = no_progress,
    *,
    retry_rejects: bool = False,
    repair: bool = False,
    forced: Collection[str] = (),
) -> Report:
    """Embed what the store lacks, and publish it, as `embedder embed` does; nothing leaves the store.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        show_progress: display of the progress.
        retry_rejects: embed again what was rejected before, changed or not.
        repair: embed again items whose rows differ from their record, as `embedder store check` finds them.
        forced: names of guards that are overridden.

    Raises:
        ConfigError: something needed is not set, the requested resources do not exist, int8 doesn't help here, or no
            cluster answers at the given address.
        SourceError: a source can't be listed, or nothing is in it.
        StoreError: the store is locked, or of another model.
        RunFailedError: a signal came, or a guard refused what would have been published.
    """
    options = IngestOptions(kind="embed", retry_rejects=retry_rejects, repair=repair, forced=tuple(forced))
    return ingest(config, options, show_progress)


@with_fast_start
def refresh(
    config: RunConfig,
    options: IngestOptions = DEFAULT_OPTIONS,
    show_progress: ShowProgress = no_progress,
    **keywords: Any,
) -> Report:
    """Bring the store up to date with the sources, as `embedder refresh` does: new, changed, deleted; then the index.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        options: limits, retries, overridden guards.
        show_progress: display of the progress.
        keywords: fields of `IngestOptions` that override `options`: `limit=1000, max_hours=2`.

    Raises:
        ConfigError, SourceError, StoreError: as `embed`; another model is no error here.
        RunFailedError: a signal came, or a guard refused the listing or what would have been published.
    """
    return ingest(config, replace(options, **keywords, kind="refresh"), show_progress)


def ingest(config: RunConfig, options: IngestOptions, show_progress: ShowProgress) -> Report:
    """Run `embed` or `refresh`, and report to the operators."""
    with observe_run(config.observing, options.kind, show_progress) as observer:
        check_forced(options.forced)
        config = config.model_copy(update={"ray_address": find_cluster(config.ray_address, config.engine)})
        report = None
        if config.store is not None:
            files = StoreFiles(config.store)
            report = _report_hold(files.address, read_current(files), options, observer)  # listing may take hours
        if report is None:
            inputs = _list(config, options, observer)
            files, before = inputs.files, snapshot_files(inputs.files)
            with remove_empty_folders(files.folder), write_lock(files), rollback_on_mistake(files, before):
                is_int8_checked, inputs = inputs.seen is None, list_again_if_published(inputs)
                report = _run_locked(inputs, observer, is_int8_checked=is_int8_checked)
        observer.on_report(report)
        return report


def _list(config: RunConfig, options: IngestOptions, observer: RunObserver) -> Inputs:
    """List the sources, and check that the store can take what this run gives."""
    with observer.traces.span("listing"):
        inputs = open_inputs(config, options)
    if inputs.seen is None:
        require("embed", f"embedder {options.kind}")
        check_int8(inputs.config.compute, inputs.model)  # before a store is made; later runs check once they have work
    check_models(inputs)
    return inputs


def _run_locked(inputs: Inputs, observer: RunObserver, *, is_int8_checked: bool) -> Report:
    """Decide what there is to do, and do it, under the store's lock."""
    if (refused := _report_hold(inputs.files.address, inputs.seen, inputs.options, observer)) is not None:
        return refused
    served = _settle(inputs)
    with observer.traces.span("comparison"):
        found = compare_listing(inputs)
    verdicts = _judge_listing(found, observer)
    _log_findings(found)
    if found.is_nothing:
        return _end_idle(found, observer.elapsed_s)
    _check_ready(found, served, is_int8_checked=is_int8_checked)
    session = _begin(found, observer)
    outcome = _embed(session, observer)
    with observer.traces.span("publication"):
        ended = _keep_originals(found, session)
        return end_run(ended, observer, outcome, verdicts, session.models)


@dataclass(frozen=True)
class _Session:
    """Session of a run: the items it embeds, and its run in each model's view, the main model's first.

    `found` is what there was to do, without what was taken over; `held` the items that publications may hold already.
    """

    found: ListingComparison
    held: HeldItems
    chosen: pa.Table
    models: tuple[ModelRun, ...]


def _judge_listing(found: ListingComparison, observer: RunObserver) -> tuple[Verdict, ...]:
    """Judge the listing; if a guard refuses it, report that, and raise."""
    inputs, options = found.inputs, found.inputs.options
    hold = judge_hold(inputs.files.address, found.current, options.forced)
    listed = judge_listing(found.work, found.moved_ids, inputs.config.max_retire_fraction, options)
    verdicts = (listed,) if hold is None else (hold, listed)
    if any(verdict.blocks for verdict in verdicts):
        earlier = judge_earlier(found.unfinished, found.work, found.current, inputs.config.limits, options)
        raise _refuse_listing((*verdicts, *earlier), found.work, observer)
    return verdicts


def _log_findings(found: ListingComparison) -> None:
    """Log what becomes of removed models, and damage that is detected at no cost."""
    report_removed(found.removed, may_change=found.inputs.options.may_change)
    for line in found.damage:
        LOG.warning(line)


def _check_ready(found: ListingComparison, served: StoreInfo, *, is_int8_checked: bool) -> None:
    """Refuse what can't embed, and log what a user should know about the vectors to be made."""
    inputs = found.inputs
    require("embed", f"embedder {inputs.options.kind}")
    if (untrained := untrained_reason(inputs.model.folder)) is not None:
        LOG.info(f"model {inputs.model.config.name} is untrained: {untrained}; search with it means nothing yet")
    asked, clip_frames = inputs.config.frames_per_segment, inputs.model.config.clip_frames
    if clip_frames not in (None, asked) and "frames_per_segment" in inputs.config.model_fields_set:
        LOG.info(f"frames_per_segment = {asked} has no effect: model {inputs.model.config.name} takes {clip_frames}")
    has_work = found.work.difference.to_embed.num_rows > 0
    _settle_dtype(inputs, has_work=has_work, is_int8_checked=is_int8_checked)
    _log_other_libraries(inputs, served, found.work)


def _begin(found: ListingComparison, observer: RunObserver) -> _Session:
    """Begin the run or its next session, take over items of rolled-back publications, and choose what to embed."""
    inputs, options = found.inputs, found.inputs.options
    carried = _check_columns(inputs)
    run = start_run(inputs.files, inputs.info, carried, inputs.views)
    observer.on_run(run)
    to_embed = found.work.difference.to_embed
    held = find_held(inputs.files, found.current, inputs.info, to_embed)
    is_taken = bool(held.as_listed)
    if held.as_listed:
        run = _take_over(run, held.as_listed, to_embed, inputs.config.rows_per_part)
    has_values_beside = not {"takeout", "xmp"}.isdisjoint(inputs.config.captions.places)  # they are no content
    may_share = not has_values_beside and inputs.rows_follow_content
    is_resumed = found.unfinished is not None and may_share
    if is_resumed and (copies := find_finished_copies(run, to_embed)):  # of a killed session
        run, is_taken = _take_over(run, copies, to_embed, inputs.config.rows_per_part), True
    if is_taken:
        found = found.with_finished(finished_items(run))  # what could be copied is now in the journal
    if inputs.rows_follow_content:
        held = replace(held, copies=found.copies.table, current=found.current)
    num_purged = found.listing.num_rows - found.work.num_listed
    LOG.info(found.work.describe() + (f"; {num_purged:,} purged and left out" if num_purged else ""))
    needed = {plan.model.name: plan.work.difference.first(options.limit).to_embed for plan in found.plans}
    held = replace(held, new_copies=_find_new_copies(found, needed[""]))
    needed[""] = with_held_versions(needed[""], held)
    for plan in found.plans[1:]:
        LOG.info(plan.describe())
    models = begin_models(inputs, found.plans, run, carried)
    return _Session(found, held, items_of_any_model(found.listing, needed, options.limit), models)


def _embed(session: _Session, observer: RunObserver) -> EngineOutcome:
    """Embed the chosen items; take over those whose content turns out to be what a publication holds."""
    inputs, chosen, models = session.found.inputs, session.chosen, session.models
    run = models[0].run
    max_hours = inputs.options.max_hours
    stop_at_s = None if max_hours is None else observer.began_s + 3600 * max_hours
    with (
        observer.traces.span("embedding"),
        interim_publications(inputs, chosen, session.found.plans, models),
        supply_contents(inputs, run, chosen) as to_embed,
    ):
        outcome = execute(inputs, models, to_embed, observer.progress, stop_at_s, observer.on_lost)
    observer.tracking.on_plan(outcome.job.plan.to_json(), inputs.model.folder)
    if equal := find_equal(run, session.held):
        _take_over(next_session(run), equal, chosen, inputs.config.rows_per_part)
    if session.held.new_copies.num_rows and (copies := find_finished_copies(run, chosen, session.held.new_copies)):
        _take_over(next_session(run), copies, chosen, inputs.config.rows_per_part)
    return outcome


def _find_new_copies(found: ListingComparison, to_embed: pa.Table) -> pa.Table:
    """Look for items that are there twice among those that no publication is likely to have (`NEW_COPIES`)."""
    options = found.inputs.options
    if options.given is not None or not found.inputs.rows_follow_content:  # given ones are not there yet
        return NEW_COPIES.empty_table()
    most_s = MAX_COPIES_S if options.max_hours is None else min(MAX_COPIES_S, COPIES_SHARE * 3600 * options.max_hours)
    others = without_items(to_embed, found.copies.likely_ids)
    return find_new_copies(others, found.inputs.decode, time.monotonic() + most_s)


def _keep_originals(found: ListingComparison, session: _Session) -> ListingComparison:
    """Keep published what the guard `retire` took for moved, until another item has its vectors."""
    if not len(found.moved_ids):
        return session.found
    taken = find_taken(session.models[0].run, found.copies.table)
    return session.found.without_retiring(without_ids(found.moved_ids, taken))


def _report_hold(address: str, current: Current | None, options: IngestOptions, observer: RunObserver) -> Report | None:
    """Report on a run that does nothing because a rollback holds the store; None if it may continue."""
    verdict = judge_hold(address, current, options.forced)
    if verdict is None or not verdict.blocks:
        return None
    return idle_report(options.kind, observer.elapsed_s, verdict.message, held=True, verdicts=(verdict,))


def _settle_dtype(inputs: Inputs, *, has_work: bool, is_int8_checked: bool) -> None:
    """Refuse a dtype that doesn't help or that the devices don't support; log what `auto` chose.

    `has_work` says whether the stages will compute.
    """
    if not is_int8_checked:
        check_int8(inputs.config.compute, inputs.model)
    if has_work and not inputs.dtype.was_asked:
        gpus = find_gpus(inputs.config.compute)
        check_dtype(inputs.dtype, gpus)
        LOG.info(describe_dtype(inputs.dtype, gpus))
    if has_work and inputs.info.colour == RAW and not inputs.asked_colour:
        LOG.info(
            f'colour raw (decode.colour = "auto"): store {inputs.files.address} is made so, without what files say '
            "about colour; `embedder refresh --set decode.colour=srgb` makes it again"
        )


def _log_other_libraries(inputs: Inputs, served: StoreInfo, work: WorkPlan) -> None:
    """Log, once per change, that rows made with other library versions stay next to those of this run."""
    others = other_libraries(served, inputs.info)
    if work.num_as_published and work.difference.to_embed.num_rows and others:
        address = inputs.files.address
        LOG.info(
            f"store {address}: its rows were made with {', '.join(others)}; vectors of two versions may differ in "
            f"their last bits: `embedder verify SOURCE --store {quote(address)}` says by how much"
        )


def _settle(inputs: Inputs) -> StoreInfo:
    """Finish a publication that was interrupted; return the model whose vectors the store serves."""
    files, index = inputs.files, inputs.config.index
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is not None:
        check_writable(files, bound)
        finish_publication(files, index_builder(index, inputs.config.ray_address))
    return bind_store(files, inputs.info, may_change=inputs.options.may_change)


def _refuse_listing(verdicts: tuple[Verdict, ...], work: WorkPlan, observer: RunObserver) -> RunFailedError:
    """Report a listing that a guard refuses, before a run is made; return the error."""
    reason = refusal(verdicts) or ""
    report = idle_report(
        observer.kind, observer.elapsed_s, reason, num_unchanged=work.num_as_published, verdicts=verdicts
    )
    observer.on_report(report)
    return RunFailedError(reason)


def _end_idle(found: ListingComparison, wall_s: float) -> Report:
    """End a run without a change; a store from before publications made an index gets its first."""
    inputs, read_before = found.inputs, found.read_before
    left_out = log_left_out(inputs, read_before)
    number = make_first_index(inputs.files, inputs.config.index, inputs.config.ray_address)
    outcome = "nothing to do" if number is None else f"nothing to embed; index {number} is made"
    num_unchanged = found.work.num_as_published - read_before.num_rows
    return idle_report(inputs.options.kind, wall_s, outcome, num_unchanged=num_unchanged, left_out=left_out)


def _take_over(run: Run, held: tuple[HeldRecords, ...], listed: pa.Table, rows_per_part: int) -> Run:
    """Copy items of publications into the run's session; return the run in its next session.

    `listed` has the items as they are listed now; a part file has at least `rows_per_part` rows.
    """
    for each in held:
        num_items = each.records.num_rows
        where = "other items of this run" if each.parts else f"run {each.version.run_id}"
        LOG.info(f"{plural(num_items, 'item')} taken over from {where}, not computed again")
    take_over(run, held, listed, rows_per_part)
    return next_session(run)


def _check_columns(inputs: Inputs) -> pa.Schema:
    """Return the carried columns, which must be the table's; an empty listing has none and is not checked."""
    carryover = carried_schema(inputs.listing.schema)
    if inputs.listing.num_rows:
        table, of_steps = RecordTable(inputs.files, "embeddings"), inputs.models[0].outputs
        there = table.schema.names if table.schema is not None else []
        known = [column for column in of_steps if column.name in there]
        table.check_schema(with_carryover(EMBEDDINGS, pa.schema([*carryover, *known])))
        table.add_columns(of_steps)
    return carryover
