"""Forecast of a run: what it would do and why, without a lock, a written file or a loaded model."""

import statistics
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
from pydantic import Field

from embedder.config import RunConfig
from embedder.ingest.comparison import ListingComparison, compare_listing
from embedder.ingest.guards import Verdict, check_forced, judge_hold, judge_listing
from embedder.ingest.inputs import Inputs, open_inputs
from embedder.ingest.model_work import ModelPlan, check_models
from embedder.ingest.new_copies import count_new_copies
from embedder.ingest.run_times import measured_times
from embedder.ingest.takeover import find_held
from embedder.ingest.work import IngestOptions, WorkPlan, count_by_source
from embedder.quantities import duration_text, rate
from embedder.report.report_schema import ReportSection
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import REPORT_FILE, all_runs
from embedder.store.layout import Current, run_file
from embedder.store.tables.arrow_lookup import KnownIds, without_items
from embedder.store.tables.tables import RecordTable
from shards.file_schema import parse_json

NUM_RUNS = 5  # the estimate is made of their medians


class RunEstimate(ReportSection):
    """Estimated seconds of a run, and the measurements behind them."""

    wall_s: float | None
    """None if no run of this model has been measured in this store."""
    items_per_s: float | None = None
    startup_s: float | None = None
    num_runs: int = 0

    def text(self) -> str:
        """Describe the estimate in one clause."""
        if self.wall_s is None:
            return "no time is known: no run of this model has been measured in this store"
        if not self.num_runs:
            return "about no time"
        runs = "measured run" if self.num_runs == 1 else f"{self.num_runs} measured runs"
        return (
            f"about {duration_text(round(self.wall_s))}, as the last {runs} made "
            f"{rate(self.items_per_s or 0)} after {duration_text(round(self.startup_s or 0))} of start-up"
        )


class EmbedReason(ReportSection):
    """Reason why items would be embedded, with their number."""

    reason: str
    num_items: int
    size_bytes: int
    """Size of their files, if the listing knows it."""


class ModelForecast(ReportSection):
    """Forecast for a further model."""

    reasons: tuple[EmbedReason, ...]
    num_unchanged: int
    num_retired: int
    is_new: bool
    """Whether nothing of it is published."""
    replaces_all: bool


class Forecast(ReportSection):
    """Forecast of a run."""

    reasons: tuple[EmbedReason, ...]
    num_unchanged: int
    num_retired: int
    retired_by_source: dict[str, int]
    held: str | None = None
    """What holds the store, so that a refresh would do nothing."""
    num_taken_over: int = 0
    """Items in a rolled-back publication, which no model would process."""
    num_moved: int = 0
    """Items to embed that are probably published under an id that is gone: they are read, and keep its vectors."""
    num_copied: int = 0
    """The same, under an id that stays."""
    num_new_copies: int = 0
    """Items to embed that probably have the bytes of another one of them, and take its vectors over."""
    num_to_embed: int
    """Items to embed within the limit."""
    num_left: int
    """Items beyond it."""
    replaces_all: bool
    """Another model or preprocessing: the old vectors are served until all new ones exist."""
    rewrite_bytes: int
    """Most bytes of embeddings' part files to rewrite, as they hold replaced or retired items."""
    estimate: RunEstimate
    retire_guard: Verdict
    models: dict[str, ModelForecast] = Field({})
    """Forecasts of further models, by name; the counts above are of the main one."""
    removed_models: tuple[str, ...] = ()
    """Models that the configuration no longer has and that would leave the store."""
    left_out: tuple[str, ...] = ()
    """What the sources hold besides items, in lines for a person."""
    damage: tuple[str, ...] = ()
    """Models whose items record other vectors than the store has, in lines for a person."""


def forecast(config: RunConfig, options: IngestOptions) -> Forecast:
    """Compare the sources with the store as `embed` or `refresh` would.

    `config` must set `model`, `store` and at least one source. Raises `ConfigError` or `SourceError` or `StoreError` as
    `embedder.ingest.embed.refresh`.
    """
    check_forced(options.forced)
    inputs = open_inputs(config, options, lambda compute: None)  # the dtype changes no forecast
    check_models(inputs)
    found = compare_listing(inputs)
    files, changing, current = inputs.files, found.work.difference.to_embed, found.current
    held = find_held(files, current, inputs.info, changing)
    left = replace(found.work.difference, to_embed=held.leave_out(changing))
    num_taken_over, work = changing.num_rows - left.to_embed.num_rows, replace(found.work, difference=left)
    chosen = left.first(options.limit).to_embed
    num_moved, num_copied, num_new_copies = _count_copies(found, chosen)
    num_computed = max(0, chosen.num_rows - num_moved - num_copied - num_new_copies)
    hold = judge_hold(files.address, current, options.forced)
    return Forecast(
        reasons=_reasons(work),
        num_unchanged=work.difference.num_unchanged,
        num_retired=work.retired.num_rows,
        retired_by_source=count_by_source(work.retired),
        held=hold.message if hold is not None and hold.blocks else None,
        num_taken_over=num_taken_over,
        num_moved=num_moved,
        num_copied=num_copied,
        num_new_copies=num_new_copies,
        num_to_embed=chosen.num_rows,
        num_left=left.to_embed.num_rows - chosen.num_rows,
        replaces_all=work.outdated is not None,
        rewrite_bytes=_rewrite_bytes(files, current, work, changing if num_taken_over else chosen),
        estimate=_estimate(inputs, num_computed),
        retire_guard=judge_listing(work, found.moved_ids, config.max_retire_fraction, options),
        models={plan.model.name: _of_model(plan) for plan in found.plans[1:]},
        removed_models=found.removed if options.may_change else (),
        left_out=tuple(inputs.left_out.with_read(found.read_before).lines()),
        damage=tuple(found.damage),
    )


def _count_copies(found: ListingComparison, chosen: pa.Table) -> tuple[int, int, int]:
    """Return the numbers of items that were probably moved, that were copied, and that are copies of new ones."""
    if not found.inputs.rows_follow_content:
        return 0, 0, 0
    others = without_items(chosen, found.copies.likely_ids)
    num_new = 0 if found.inputs.options.given else count_new_copies(others)
    return *found.copies.count_likely(found.work.retired["item_id"]), num_new


def _of_model(plan: ModelPlan) -> ModelForecast:
    return ModelForecast(
        reasons=_reasons(plan.work),
        num_unchanged=plan.work.difference.num_unchanged,
        num_retired=plan.work.retired.num_rows,
        is_new=plan.current is None,
        replaces_all=plan.work.outdated is not None,
    )


def _reasons(work: WorkPlan) -> tuple[EmbedReason, ...]:
    sizes = work.difference.to_embed.group_by("reason").aggregate([("item_id", "count"), ("size_bytes", "sum")])
    rows = sorted(sizes.to_pylist(), key=lambda row: -row["item_id_count"])
    return tuple(
        EmbedReason(reason=row["reason"], num_items=row["item_id_count"], size_bytes=row["size_bytes_sum"] or 0)
        for row in rows
    )


def _rewrite_bytes(files: StoreFiles, current: Current | None, work: WorkPlan, chosen: pa.Table) -> int:
    """Sum the bytes of published part files in which a row may change; found file by file."""
    if current is None or work.outdated is not None or not (chosen.num_rows or work.retired.num_rows):
        return 0
    ids = KnownIds(pa.chunked_array([*chosen["item_id"].chunks, *work.retired["item_id"].chunks], pa.string()))
    table = RecordTable(files, "embeddings", current.embeddings)
    touched = set[str]()
    for part in table.parts():
        if ids.any_between(part.id_range) and len(ids.find_among(table.read(["item_id"], [part.path])["item_id"])):
            touched.add(part.path)
    return table.size_bytes(touched)


def _estimate(inputs: Inputs, num_items: int) -> RunEstimate:
    """Estimate by runs of the store, else by those of other stores on this machine."""
    if num_items == 0:
        return RunEstimate(wall_s=0.0)
    files, fingerprint = inputs.files, inputs.info.model_fingerprint
    runs = reversed([run for run in all_runs(files) if run.model_fingerprint == fingerprint])
    found = from_reports(_reports(files, (run_file(run.run_id, REPORT_FILE) for run in runs)), num_items)
    times = list(measured_times(inputs.config.ray_address, inputs.model.fingerprint).values())
    if found.wall_s is not None or not times:
        return found
    best = min(times, key=lambda each: each.seconds(num_items))
    return RunEstimate(
        wall_s=best.seconds(num_items), items_per_s=best.items_per_s, startup_s=best.startup_s, num_runs=1
    )


def _reports(files: StoreFiles, paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read the reports of runs; unreadable ones are left out, as they only serve an estimate."""
    for path in paths:
        with suppress(FileNotFoundError, ValueError):
            report = parse_json(files.read(path))
            if isinstance(report, dict):
                yield report


def from_reports(reports: Iterable[dict[str, Any]], num_items: int) -> RunEstimate:
    """Estimate by the medians of the first `NUM_RUNS` reports that measured anything."""
    measured = list(islice((report for report in reports if report.get("items_per_s", 0) > 0), NUM_RUNS))
    if not measured:
        return RunEstimate(wall_s=None)
    rate = statistics.median(report["items_per_s"] for report in measured)
    startup_s = statistics.median(report["startup_s"] for report in measured)
    wall_s = startup_s + num_items / rate
    return RunEstimate(wall_s=wall_s, items_per_s=rate, startup_s=startup_s, num_runs=len(measured))
