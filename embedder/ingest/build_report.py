"""The report of a run: what was to be done, what its steps measured, and what it came to."""

import time
from importlib.metadata import version

from embedder.engine.cpu_use import beside_steps
from embedder.engine.resources import StageResources
from embedder.ingest.counts import Counts
from embedder.ingest.diff import Difference
from embedder.ingest.execute import EngineOutcome
from embedder.planning.profile import kept_costs
from embedder.report.plan_records import Review
from embedder.report.plan_review import Observed, review_run
from embedder.report.schema import PlaceReport, Report, first_loads, split_loads, step_reports
from embedder.store.layout import Kind, utc_now

LIBRARIES = ("torch", "timm", "transformers", "ray", "pyarrow", "deltalake", "faiss-cpu")


def make_report(outcome: EngineOutcome, difference: Difference, counts: Counts, started_s: float) -> Report:
    """Report on a run whose engine has ended; what comes of it is filled in later.

    Args:
        outcome: the engine's run.
        difference: what was to be done.
        counts: what is finished.
        started_s: Unix time of the command's start.
    """
    job = outcome.job
    session = [entry for entry in counts.entries if entry.name.startswith(job.run.session)]
    loads, trace = split_loads(call for entry in session for call in entry.trace)
    replicas = {f"stage {index}": stage.min_replicas for index, stage in enumerate(job.allocation.stages)}
    steps, window = step_reports(trace, replicas)
    window_s = window[1] - window[0]
    is_here = outcome.choice.engine == "ray" and job.config.ray_address is None
    all_up_s = max((load.started_s + load.wall_s for load in first_loads(loads)), default=0.0)
    engine = beside_steps(outcome.cpu_use, trace, all_up_s, window[1]) if is_here else None
    decode_calls = [call for call in trace if call["step"] == "decode"]
    engine_share = engine[0] / engine[1] if engine else None
    observed = Observed(steps, decode_calls, counts.num_here, engine_share and engine_share * window_s)
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
        reasons=difference.reasons,
        num_taken_over=sum(counts.taken_from.values()),
        taken_from=counts.taken_from,
        num_equal=counts.num_equal,
        num_stale=counts.num_stale,
        num_items=counts.num_items,
        num_rejected=counts.num_rejected,
        num_vectors=counts.num_vectors,
        items_per_s=counts.num_here / window_s if window_s else 0.0,
        window_s=window_s,
        engine_cores=engine_share,
        peak_memory_bytes=outcome.peak_memory_bytes,
        steps=tuple(steps),
        loads=tuple(loads),
        places=tuple(_place(index, stage) for index, stage in enumerate(job.allocation.stages)),
        plan=[vars(stage) for stage in job.plan.stages],
        review=_review(outcome, observed) if outcome.choice.engine == "ray" else None,
        versions=library_versions(),
    )


def idle_report(kind: Kind, num_unchanged: int, started_s: float) -> Report:
    """Report that there was nothing to do, so that no run was made."""
    return Report(
        kind=kind,
        run_id=None,
        engine="none",
        engine_reason="nothing to embed",
        published=False,
        outcome="nothing to do",
        started_at=utc_now(),
        wall_s=time.time() - started_s,
        startup_s=0.0,
        num_new=0,
        num_changed=0,
        num_unchanged=num_unchanged,
        num_items=0,
        num_rejected=0,
        num_vectors=0,
        items_per_s=0.0,
        peak_memory_bytes=0,
        steps=(),
        plan=[],
        versions=library_versions(),
    )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that results depend on, without importing them."""
    return {name: version(name) for name in LIBRARIES}


def _place(index: int, stage: StageResources) -> PlaceReport:
    return PlaceReport(
        stage=index,
        device=stage.device,
        num_cpus=stage.num_cpus,
        num_gpus=stage.num_gpus,
        num_threads=stage.num_threads,
    )


def _review(outcome: EngineOutcome, observed: Observed) -> Review | None:
    """On one machine a cut changes nothing in a single process, so only runs on Ray are reviewed."""
    job = outcome.job
    return review_run(job, outcome.available, observed, kept_costs(job.config, job.model))
