"""Report of a run, built once: the work, the measurements of its steps, the verdicts, and the outcome."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import Measurement
from embedder.config import RowSettings
from embedder.executors.bottleneck import OperatorUse
from embedder.ingest.diff import CONTENT_CHANGED, NEW
from embedder.ingest.execute import EngineOutcome
from embedder.ingest.guards import Verdict
from embedder.ingest.inputs import Inputs
from embedder.ingest.run_result import RunResult
from embedder.ingest.work import WorkPlan
from embedder.installation import vector_libraries
from embedder.models.model_folder import Model
from embedder.placement.placement import Node
from embedder.planning.profile_machine import kept_costs
from embedder.planning.sample import observed_mix
from embedder.quantities import plural
from embedder.report.node_sums import all_devices, cost_per_million, held_devices, node_reports, this_machine
from embedder.report.plan_review import review_run
from embedder.report.product_share import product_shares, slowest_speed
from embedder.report.report_schema import (
    EventReport,
    LoadReport,
    OperatorReport,
    PlaceReport,
    Report,
    Review,
    StepReport,
)
from embedder.report.step_sums import (
    CUTS,
    SteadyPart,
    cores_beside_steps,
    join_measurements,
    split_loads,
    steady_part,
    step_reports,
)
from embedder.sources.selection import LeftOut
from embedder.store.journal.finished import NO_PLACES, hash_rows, of_whole
from embedder.store.journal.journal import stream_entries, stream_keys
from embedder.store.layout import Kind, utc_now

LOG = logging.getLogger(__name__)
MAX_DIFFERING = 100  # ids in a report
LIBRARIES = ("ray", "pyarrow", "deltalake", "faiss-cpu")
SAME_FIGURES = (
    "taken_from", "num_equal", "num_checked", "num_stale", "num_items", "num_rejected", "num_vectors",
    "num_reject_vectors",
)  # fmt: skip
"""Figures of a run's result that the report has under the same names."""


def build_report(
    inputs: Inputs,
    outcome: EngineOutcome,
    work: WorkPlan,
    result: RunResult,
    left_out: LeftOut,
    verdicts: Sequence[Verdict],
    *,
    started_s: float,
    wall_s: float,
    not_published: str | None,
) -> Report:
    """Report on a run whose engine has ended, before it is published or kept back.

    `started_s` is the Unix time of the command's start, `wall_s` the seconds from then to the end of the engine.
    `not_published` says why the run is not published; None if it is.
    """
    return Report(
        kind=inputs.options.kind,
        run_id=result.run.run_id,
        engine=outcome.choice.engine,
        engine_reason=outcome.choice.reason,
        published=not_published is None,
        outcome=_describe_published(work, result) if not_published is None else not_published,
        started_at=result.run.info.started_at,
        wall_s=wall_s,
        guards=tuple(verdict.model_dump() for verdict in verdicts),
        **_item_counts(inputs.model, work, result, is_published=not_published is None),
        **_left_out_counts(left_out),
        **_step_figures(inputs, outcome, result, started_s),
    )


def _describe_published(work: WorkPlan, result: RunResult) -> str:
    num_left = work.difference.to_embed.num_rows - result.num_here
    return f"published; {plural(num_left, 'item')} left for the next refresh" if num_left else "published"


def _item_counts(model: Model, work: WorkPlan, result: RunResult, *, is_published: bool) -> dict[str, Any]:
    reasons = work.difference.reasons
    return {name: getattr(result, name) for name in SAME_FIGURES} | {
        "num_new": reasons.get(NEW, 0),
        "num_changed": reasons.get(CONTENT_CHANGED, 0),
        "num_unchanged": work.difference.num_unchanged,
        "reasons": reasons,
        "num_retired": work.retired.num_rows if is_published else 0,
        "num_taken_over": sum(result.taken_from.values()),
        "num_differing": len(result.differing),
        "differing": tuple(result.differing.slice(0, MAX_DIFFERING).to_pylist()),
        "ignored": _count_ignored(model, result),
        "num_left": work.difference.to_embed.num_rows - result.num_here,
    }


def _step_figures(inputs: Inputs, outcome: EngineOutcome, result: RunResult, started_s: float) -> dict[str, Any]:
    job, found = outcome.job, _measure_steps(outcome, result)
    items_per_s = result.num_here / found.window_s if found.window_s else 0.0
    stages = job.allocation.stages
    return {
        "versions": library_versions(),
        "startup_s": max(min((call.started_s for call in found.trace), default=started_s) - started_s, 0.0),
        **{name: sum(getattr(step, name) for step in found.steps) for name in CUTS},
        "caption_places": dict(sum((call.caption_places for call in found.trace), Counter[str]()).most_common()),
        "max_caption_tokens": inputs.model.config.preprocess.max_caption_tokens if inputs.model.config.text else None,
        "items_per_s": items_per_s,
        "window_s": found.window_s,
        "engine_cores": found.engine_cores,
        "steady_items_per_s": found.steady_rate,
        "observed_bottleneck": found.bottleneck,
        "operators": tuple(_operators(outcome, found.uses)),
        **_cluster_figures(outcome, found.measurements, started_s),
        "cost_per_million": _cost(outcome, inputs.config.prices, found.steady_rate or items_per_s),
        "currency": inputs.config.currency,
        "peak_memory_bytes": outcome.monitor.peak_memory.num_bytes,
        "steps": tuple(found.steps),
        "loads": tuple(found.loads),
        "places": tuple(PlaceReport.model_validate(vars(each) | {"stage": at}) for at, each in enumerate(stages)),
        "plan": [vars(stage) for stage in job.plan.stages],
        "review": _review(inputs.config.rows, outcome, result, found),
    }


@dataclass(frozen=True)
class _MeasuredSteps:
    measurements: list[Measurement]
    trace: list[Measurement]
    """Those of calls."""
    loads: list[LoadReport]
    steps: list[StepReport]
    window_s: float
    steady: SteadyPart
    steady_rate: float | None
    uses: Sequence[OperatorUse]
    bottleneck: str | None
    engine_cores: float | None


def _measure_steps(outcome: EngineOutcome, result: RunResult) -> _MeasuredSteps:
    job = outcome.job
    measurements = session_measurements(outcome, result)
    loads, trace = split_loads(measurements)
    replicas = {f"stage {index}": stage.min_replicas for index, stage in enumerate(job.allocation.stages)}
    steps, window = step_reports(trace, replicas)
    is_here = outcome.choice.engine == "ray" and job.compute.ray_address is None
    engine_cores = cores_beside_steps(outcome.monitor.cpu_use, trace, loads, window[1]) if is_here else None
    uses, bottleneck = outcome.operators.uses()
    observed = "write" if bottleneck == "write" else f"stage {len(job.stages) - 1}"
    steady = steady_part(trace, loads, steps, observed)
    mix = observed_mix([call for call in trace if call.step == "decode"], result.num_here)
    counted = steps if steady.too_short else steady.steps  # without what compiling took
    shards = [stage.shard for stage in job.stages]
    shares = product_shares(counted, loads, shards, job.model.config, mix, result.num_here)
    steps = [step.model_copy(update={"product_share": shares.get(step.step)}) for step in steps]
    num_rows = sum(call.num_rows for call in trace if call.step == observed)
    rate = steady.rows_per_s * result.num_here / num_rows if num_rows and not steady.too_short else None
    window_s = window[1] - window[0]
    return _MeasuredSteps(measurements, trace, loads, steps, window_s, steady, rate, uses, bottleneck, engine_cores)


def _review(rows: RowSettings, outcome: EngineOutcome, result: RunResult, found: _MeasuredSteps) -> Review | None:
    """Review the cut into stages; None in a single process, where it changes nothing."""
    if outcome.choice.engine != "ray" or not result.num_here:
        return None
    job, steady = outcome.job, found.steady
    busy_s = result.num_here / found.steady_rate if found.steady_rate else found.window_s
    return review_run(
        job,
        outcome.available,
        found.steps if steady.too_short else steady.steps,
        [call for call in found.trace if call.step == "decode"],
        result.num_here,
        found.engine_cores and found.engine_cores * busy_s,
        kept_costs(job.compute, rows, job.model),
        steady.too_short,
        slowest_speed(found.loads),
    )


def _operators(outcome: EngineOutcome, uses: Sequence[OperatorUse]) -> list[OperatorReport]:
    samples, peaks = outcome.operators.samples, outcome.operators.peaks
    busy = {use.name: use.busy_share for use in uses}
    return [
        OperatorReport(
            name=state.name,
            max_queued_blocks=peaks[state.name].queued_blocks,
            max_tasks=peaks[state.name].num_tasks,
            max_object_store_bytes=peaks[state.name].object_store_bytes,
            num_cpus=peaks[state.name].num_cpus,
            num_gpus=peaks[state.name].num_gpus,
            busy_share=busy.get(state.name, 0.0),
            backpressure_s=state.backpressure_s,
            spilled_bytes=state.spilled_bytes,
        )
        for state in (samples[-1].operators if samples else ())
    ]


def _cluster_figures(outcome: EngineOutcome, trace: Sequence[Measurement], started_s: float) -> dict[str, Any]:
    """Return the fields of the report about nodes, events and bytes; `trace` includes the measurements of loading."""
    samples = outcome.operators.samples
    last = samples[-1].operators if samples else ()
    return {
        "nodes": tuple(node_reports(_nodes(outcome).values(), trace)),
        "events": tuple(EventReport(at_s=event.time_s - started_s, text=event.text) for event in outcome.fleet.events),
        "spilled_bytes": sum(state.spilled_bytes for state in last),
        "moved_bytes": sum(state.moved_bytes for state in last if state.name.startswith("stage")) if last else None,
    }


def _nodes(outcome: EngineOutcome) -> dict[str, Node]:
    """Return the nodes of the run by id: those at its start and those that joined; without Ray, this machine."""
    nodes = {node.node_id: node for node in outcome.available.nodes} | outcome.fleet.nodes
    return nodes or {"": this_machine(outcome.available)}


def _cost(outcome: EngineOutcome, prices: Mapping[str, float], items_per_s: float) -> float | None:
    """Return the cost of a million items; None, with a log line, if a price is missing."""
    nodes = _nodes(outcome)
    is_shared = outcome.choice.engine == "ray" and outcome.job.compute.ray_address is not None
    devices = held_devices(outcome.operators.samples, nodes) if is_shared else all_devices(nodes.values())
    cost, lacking = cost_per_million(prices, devices, items_per_s)
    if lacking:
        LOG.info(f"prices: no price of {', '.join(lacking)}, which this run held; without it no cost is reported")
    return cost


def idle_report(
    kind: Kind,
    wall_s: float,
    outcome: str,
    *,
    num_unchanged: int = 0,
    left_out: LeftOut | None = None,
    verdicts: Sequence[Verdict] = (),
    held: bool = False,
) -> Report:
    """Report on a command that made no run: nothing to do, the store is held, or the listing is refused.

    `wall_s` is the seconds since the command's start, `outcome` the reason in one line, `num_unchanged` the listed
    items that are as published. `held` says whether a rollback holds the store.
    """
    left_out = left_out or LeftOut()
    return Report(
        kind=kind,
        outcome=outcome,
        held=held,
        started_at=utc_now(),
        wall_s=wall_s,
        num_unchanged=num_unchanged,
        **_left_out_counts(left_out),
        guards=tuple(verdict.model_dump() for verdict in verdicts),
        versions=library_versions(),
    )


def session_measurements(outcome: EngineOutcome, result: RunResult) -> list[Measurement]:
    """Read this session's measurements from the journal; many calls as sums."""
    run, session = result.run, outcome.job.run.session
    earlier = {entry.name for entry in result.entries if not entry.name.startswith(session)}
    entries = stream_entries(run.files, run.run_id, earlier)
    return join_measurements(Measurement(**call) for entry in entries for call in entry.trace)


@cache
def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on, without importing them."""
    return vector_libraries() | {name: version(name) for name in LIBRARIES}


def _count_ignored(model: Model, result: RunResult) -> dict[str, int]:
    """Count embedded items with a part that the model has no tower for, by the name of that part."""
    if len(model.config.towers) == 2:
        return {}
    is_vision = model.config.text is None
    parts = [part for entry in result.entries for part in entry.parts]
    keys = stream_keys(result.run.files, parts, "embeddings", ["item_id", "modality", "caption"])

    def with_ignored(rows: pa.Table) -> pa.Table:
        return rows.filter(pc.is_valid(rows["caption"]) if is_vision else pc.not_equal(rows["modality"], "text"))

    rows = of_whole(hash_rows(map(with_ignored, keys), NO_PLACES.schema), result.whole)
    num = sum(pc.count_distinct(each["item_id"]).as_py() for each in rows)
    return {"captions" if is_vision else "images": num} if num else {}


def _left_out_counts(left_out: LeftOut) -> dict[str, Any]:
    return {
        "other_files": dict(left_out.others),
        "unreadable": dict(left_out.unreadable),
        "num_other_files": left_out.others.total(),
        "num_unreadable": left_out.unreadable.total(),
        "num_junk": left_out.counts["junk"],
        "num_sidecars": left_out.counts["sidecar"],
        "num_excluded": left_out.counts["excluded"],
        "num_orphan_captions": left_out.num_orphans,
        "num_kept_captions": left_out.num_kept_orphans,
        "num_json_without_caption": left_out.num_json_without_caption,
    }
