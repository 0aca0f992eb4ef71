"""The main job: list, compare with the store, embed what is new or changed, publish. Creates a store or goes on."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from embedder.config import RunConfig
from embedder.errors import ConfigError, RunFailed, SourceError
from embedder.planning.measured import kept_costs
from embedder.planning.records import Review
from embedder.planning.review import Observed, review_run
from embedder.retrieval.indexing import keep_index
from embedder.rows import carried_schema
from embedder.run import machine
from embedder.run.cpu_use import CpuUse, beside_steps
from embedder.run.diff import Difference, diff
from embedder.run.engine import Choice, choose_engine
from embedder.run.int8 import check_int8
from embedder.run.job import (
    Job,
    Model,
    bytes_per_row,
    make_plan,
    open_model,
    plan_job,
    preprocessing_of,
    rows_per_batch,
)
from embedder.run.known import known_items
from embedder.run.monitor import RunMonitor
from embedder.run.report import Report, count_items, first_loads, split_loads, step_reports
from embedder.run.resources import Available, check_cpus, describe_limits, object_store_bytes, requested
from embedder.run.stopping import stop_on_signals
from embedder.sources.listing import list_sources
from embedder.store.binding import bind_store
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo, run_file
from embedder.store.lock import write_lock
from embedder.store.publish import publish
from embedder.store.runs import REPORT_FILE, Run, start_run
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.tables import RecordTable
from shards.plan import ShardPlan

LIBRARIES = ("torch", "timm", "transformers", "ray", "pyarrow", "deltalake", "faiss-cpu")


class Watcher(Protocol):
    """Whoever wants to see the run: a progress display, or nobody."""

    def say(self, message: str) -> None:
        """One line about what happens now."""

    def progress(self, num_items: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show progress over so many items while the block runs; yields what to tell the number done."""


@dataclass(frozen=True)
class Outcome:
    """What an engine's run came to, beside its journal."""

    job: Job
    available: Available
    choice: Choice
    wall_s: float
    peak_memory_bytes: int
    cpu_use: CpuUse


def embed(config: RunConfig, watcher: Watcher, *, retry_rejects: bool = False) -> Report:
    """Embed what the store lacks, and publish it.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        watcher: is told what happens.
        retry_rejects: embed again what was rejected before, changed or not.

    Raises:
        ConfigError: something needed is not set, the resources asked for do not exist, or int8 doesn't help here.
        SourceError: a source can't be listed, or nothing is in it.
        StoreError: the store is locked, or of another model.
        RunFailed: a signal came, or more than `max_reject_fraction` was rejected.
    """
    model_uri, store_uri = _required(config)
    started_s = time.time()
    model = open_model(model_uri)
    plan = make_plan(config, model)
    files = StoreFiles(store_uri)
    _check_places(config, files)
    check_int8(config, model)
    if config.engine == "ray" and config.ray_address is None:  # say so before Ray takes its seconds to start
        num_cpus = machine.num_cpus()
        check_cpus(requested(config, Available(num_cpus), plan.stages), num_cpus)
    listing = _list(config)
    carryover = carried_schema(listing.schema)
    with write_lock(files):
        info = bind_store(files, store_info(config, model))
        RecordTable(files, "embeddings").check_schema(with_carryover(EMBEDDINGS, carryover))
        run = start_run(files, info, carryover)
        difference = diff(listing, known_items(run, retry_rejects=retry_rejects))
        watcher.say(
            f"{difference.num_new:,} new, {difference.num_changed:,} changed, "
            f"{difference.num_unchanged:,} unchanged or finished before"
        )
        outcome = _run_engine(config, model, plan, run, difference.to_embed, watcher)
        report = _report(outcome, difference, started_s)
        return _finish(report, outcome.job, watcher)


def _required(config: RunConfig) -> tuple[str, str]:
    if config.model is None:
        raise ConfigError("no model: give --model DIR, or `model` in the configuration file")
    if config.store is None:
        raise ConfigError("no store: give --store URI, or `store` in the configuration file")
    if not config.source:
        raise ConfigError("no source: give SOURCE, or a [[source]] in the configuration file")
    return config.model, config.store


def _check_places(config: RunConfig, files: StoreFiles) -> None:
    """A store inside a source would be embedded itself the next time."""
    for source in config.source:
        if "://" not in source.path and files.root.is_relative_to(Path(source.path).expanduser().absolute()):
            raise ConfigError(f"store {files.root}: it lies inside the source {source.path}; put it somewhere else")


def store_info(config: RunConfig, model: Model) -> StoreInfo:
    """What a store made by this configuration is bound to."""
    return StoreInfo(
        model=model.uri,
        model_fingerprint=model.fingerprint,
        preprocess_fingerprint=preprocessing_of(config, model),
        segment_s=config.segment_s,
        frames_per_segment=config.frames_per_segment,
        dtype=config.dtype,
    )


def _list(config: RunConfig) -> pa.Table:
    """All items of all sources; before anything is made, so that a wrong path leaves no store behind."""
    tables = list(list_sources(config.source))
    if not any(table.num_rows for table in tables):
        paths = ", ".join(source.path for source in config.source)
        raise SourceError(f"source {paths}: nothing is in it; check the path, or whether a disk is mounted")
    return pa.concat_tables(tables)


def _run_engine(
    config: RunConfig, model: Model, plan: ShardPlan, run: Run, to_embed: pa.Table, watcher: Watcher
) -> Outcome:
    """Choose the engine, make it ready, and run the job on it."""
    choice = choose_engine(config, plan, to_embed.num_rows, machine.num_cpus())
    if to_embed.num_rows == 0:
        choice = Choice("local", "nothing to embed")
    watcher.say(f"engine {choice.engine}: {choice.reason}")
    begun_s = time.perf_counter()
    store_bytes = object_store_bytes(bytes_per_row(model, plan), rows_per_batch(config))
    with _engine(choice.engine, config, store_bytes) as (available, run_job):
        job = plan_job(config, model, plan, available, run, carried_schema(to_embed.schema))
        if limits := describe_limits(config, job.allocation):
            watcher.say(limits)
        with (
            stop_on_signals(run, watcher.say),
            watcher.progress(to_embed.num_rows) as on_progress,
            RunMonitor(run, on_progress) as monitor,
        ):
            if to_embed.num_rows:
                run_job([to_embed], job)
    wall_s = time.perf_counter() - begun_s
    return Outcome(job, available, choice, wall_s, monitor.peak_memory_bytes, monitor.cpu_use)


RunJob = Callable[[list[pa.Table], Job], None]


@contextmanager
def _engine(name: str, config: RunConfig, store_bytes: int) -> Iterator[tuple[Available, RunJob]]:
    """Make an engine ready: what it has, and the function that runs a job on it."""
    if name == "local":
        from embedder.local import embed_locally

        yield Available(num_cpus=machine.num_cpus()), embed_locally
        return
    from embedder.run.ray_session import ray_session

    with ray_session(config.ray_address, config.no_progress_timeout_s, store_bytes) as available:
        from embedder.pipeline import embed_on_ray

        yield available, embed_on_ray


def _report(outcome: Outcome, difference: Difference, started_s: float) -> Report:
    job = outcome.job
    entries = job.run.entries()
    num_items, num_rejected, num_vectors = count_items(entries)
    session = [entry for entry in entries if entry.name.startswith(job.run.session)]
    loads, trace = split_loads(call for entry in session for call in entry.trace)
    replicas = {f"stage {index}": stage.min_replicas for index, stage in enumerate(job.allocation.stages)}
    steps, window = step_reports(trace, replicas)
    window_s = window[1] - window[0]
    is_here = outcome.choice.engine == "ray" and job.config.ray_address is None
    all_up_s = max((load.started_s + load.wall_s for load in first_loads(loads)), default=0.0)
    engine = beside_steps(outcome.cpu_use, trace, all_up_s, window[1]) if is_here else None
    decode_calls = [call for call in trace if call["step"] == "decode"]
    num_done = sum(entry.num_items for entry in session)
    engine_share = engine[0] / engine[1] if engine else None
    observed = Observed(steps, decode_calls, num_done, engine_share and engine_share * window_s)
    first_s = min((call["started_s"] for call in trace), default=started_s)
    return Report(
        run_id=job.run.run_id,
        engine=outcome.choice.engine,
        engine_reason=outcome.choice.reason,
        published=False,
        started_at=job.run.info.started_at,
        wall_s=time.time() - started_s,
        startup_s=first_s - started_s,
        num_new=difference.num_new,
        num_changed=difference.num_changed,
        num_unchanged=difference.num_unchanged,
        num_items=num_items,
        num_rejected=num_rejected,
        num_vectors=num_vectors,
        items_per_s=num_done / window_s if window_s else 0.0,
        window_s=window_s,
        engine_cores=engine_share,
        peak_memory_bytes=outcome.peak_memory_bytes,
        steps=tuple(steps),
        loads=tuple(loads),
        plan=[vars(stage) for stage in job.plan.stages],
        review=_review(outcome, observed) if outcome.choice.engine == "ray" else None,
        versions={name: version(name) for name in LIBRARIES},
    )


def _review(outcome: Outcome, observed: Observed) -> Review | None:
    """On one machine a cut changes nothing in a single process, so only runs on Ray are reviewed."""
    job = outcome.job
    return review_run(job, outcome.available, observed, kept_costs(job.config, job.model))


def _finish(report: Report, job: Job, watcher: Watcher) -> Report:
    """Publish, or say why not; the report is saved either way."""
    reason = _why_not_publish(report, job)
    if reason is None:
        watcher.say("publishing")
        publish(job.run, job.stamp, lambda embeddings: keep_index(job.files, embeddings, watcher.say))
        report = report.model_copy(update={"published": True})
    report = report.model_copy(update={"outcome": reason or "published"})
    job.files.write(run_file(job.run.run_id, REPORT_FILE), report.model_dump_json(indent=2).encode())
    if reason is not None:
        raise RunFailed(reason)
    return report


def _why_not_publish(report: Report, job: Job) -> str | None:
    if job.run.stop_requested():
        return (
            f"stopped on request after {report.num_items:,} items, which are kept and not yet published; "
            "the same command goes on"
        )
    limit = job.config.max_reject_fraction
    if report.reject_fraction > limit:
        return (
            f"{report.num_rejected:,} of {report.num_items:,} items were rejected, more than max_reject_fraction = "
            f"{limit:g} allows; nothing is published: see the reasons with `embedder rejects --store {job.files.root} "
            f"--run {job.run.run_id}`, then mend the files, or allow more with --set max_reject_fraction=..."
        )
    return None
