"""Choose the engine, prepare it, and run the job on it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config_toml.values import toml
from embedder.executors.bottleneck import OperatorHistory, is_up
from embedder.executors.choose_engine import EngineChoice, choose_engine
from embedder.executors.fleet_watch import FleetWatch
from embedder.executors.job import Job, ModelRun, plan_job, ray_store_bytes, stage_specs
from embedder.executors.monitor import RunMonitor
from embedder.executors.progress import ShowProgress, no_progress
from embedder.executors.signals import StopRequest, stop_at, stop_on_signals
from embedder.ingest.inputs import Inputs
from embedder.ingest.run_times import measured_times
from embedder.placement import hardware
from embedder.placement.device_settings import settings_of
from embedder.placement.fleet import Available, share_of
from embedder.placement.fleet_plan import plan_for_fleet
from embedder.placement.resources import describe_devices, describe_limits
from embedder.store.journal.runs import Run
from embedder.store.layout import run_file

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample
    from embedder.executors.capacity import StartClaim
    from embedder.placement.preflight import Access

LOG = logging.getLogger(__name__)
NUM_PROBED = 7  # items, evenly spread over the listing and the last, that each node opens before a run on a cluster
PREFLIGHT_FOLDER = "preflight"


@dataclass(frozen=True)
class EngineOutcome:
    """Outcome of an engine's run, besides its journal."""

    job: Job
    available: Available
    choice: EngineChoice
    monitor: RunMonitor
    """Memory and CPU seconds of the run's processes."""
    operators: OperatorHistory
    """Samples of the operators; none for a run in one process."""
    fleet: FleetWatch
    """Events of the cluster."""
    out_of_time: bool
    """Whether it was stopped because its time was up."""
    stopped: bool
    """Whether a signal stopped it."""


OnSample = Callable[["Sample"], None]


@dataclass(frozen=True)
class ReadyEngine:
    """Engine that is ready, with the CPUs and GPUs that the run may take.

    `run` runs a job over a listing and samples its operators on Ray. `place` waits for room on a cluster and gives each
    replica of a job its node. `on_cluster` says whether nodes may come and go.
    """

    available: Available
    run: Callable[[list[pa.Table], Job, StopRequest, OnSample], None]
    place: Callable[[Job], Job] = lambda job: job
    on_cluster: bool = False


def execute(
    inputs: Inputs,
    run: Run,
    to_embed: pa.Table,
    show_progress: ShowProgress = no_progress,
    stop_at_s: float | None = None,
    before_exit: Callable[[str], None] = lambda reason: None,
    further: Sequence[ModelRun] = (),
) -> EngineOutcome:
    """Run the job on the engine that suits it; with nothing to embed, only describe it.

    `run` journals the work. No further items are begun after the Unix time `stop_at_s`. `before_exit` is called with
    the reason if the process has to be ended without an error reaching the caller. `further` has the further models in
    order.
    """
    choice = _choose(inputs, to_embed.num_rows)
    with _local_engine() if choice.engine == "local" else _ray_engine(inputs, run, to_embed, before_exit) as engine:
        operators, fleet = OperatorHistory(), FleetWatch(on_cluster=engine.on_cluster)
        job = engine.place(_plan(inputs, engine.available, run, to_embed, further))
        stop = StopRequest(run.request_stop, job.compute.stop_timeout_s)
        _log_job(job, engine.available)
        with (
            stop_on_signals(stop.note_signal, stop.notice, spread=stop.forward, can_break=lambda: stop.can_break),
            stop_at(stop.request_stop, stop_at_s) as time_up,
            show_progress(to_embed.num_rows) as on_progress,
            fleet,
            RunMonitor(run, on_progress, operators, fleet, [each.run for each in further]) as monitor,
        ):
            if to_embed.num_rows:
                engine.run([to_embed], job, stop, _listener(operators, fleet))
            if stop.is_overdue:
                LOG.info(f"stop_timeout_s = {stop.timeout_s:g} is over: what still was inside the stages is left")
    return EngineOutcome(
        job, engine.available, choice, monitor, operators, fleet, out_of_time=time_up.is_set(), stopped=stop.by_signal
    )


def _choose(inputs: Inputs, num_items: int) -> EngineChoice:
    compute = inputs.config.compute
    measured = measured_times(compute.ray_address, inputs.model.fingerprint)
    choice = choose_engine(
        compute,
        inputs.plan,
        num_items,
        hardware.num_cpus(),
        hardware.num_gpus(),
        gpus=hardware.gpu_names(),
        has_bf16=hardware.has_bf16(),
        measured=measured,
    )
    choice = choice if num_items else EngineChoice("local", "nothing to embed")
    LOG.info(f"engine {choice.engine}: {choice.reason}")
    return choice


def _plan(inputs: Inputs, available: Available, run: Run, to_embed: pa.Table, further: Sequence[ModelRun]) -> Job:
    compute, rows, model = inputs.config.compute, inputs.config.rows, inputs.model
    return plan_job(
        compute,
        rows,
        model,
        plan_for_fleet(compute, model, inputs.plan, available),
        available,
        run,
        carried_schema(to_embed.schema),
        further,
        to_embed.num_rows,
    )


def _log_job(job: Job, available: Available) -> None:
    if devices := describe_devices(job.allocation, available):
        LOG.info(devices)
    if compiled := [str(stage.index) for stage in job.stages if stage.compile]:
        LOG.info(f"layers are compiled in stages {', '.join(compiled)} (compile = {toml(job.compute.compile)})")
    if limits := describe_limits(job.compute.stage, job.allocation):
        LOG.info(limits)


def _listener(operators: OperatorHistory, fleet: FleetWatch) -> OnSample:
    def on_sample(sample: "Sample") -> None:
        operators.add(sample)
        fleet.compare_replicas(sample)

    return on_sample


def access_of(ray_address: str | None, model_uri: str, run: Run, to_embed: pa.Table) -> "Access | None":
    """Return what the nodes of a cluster must reach (store, model, some items); None without a `ray_address`."""
    if ray_address is None or not to_embed.num_rows:
        return None
    from embedder.placement.preflight import Access

    rows = sorted({round(step * (to_embed.num_rows - 1) / NUM_PROBED) for step in range(NUM_PROBED + 1)})
    uris = to_embed["uri"].take(rows).to_pylist()
    return Access(run.files, run_file(run.run_id, PREFLIGHT_FOLDER), model_uri, tuple(uris))


@contextmanager
def _local_engine() -> Iterator[ReadyEngine]:
    from embedder.executors.local import embed_locally

    yield ReadyEngine(
        Available(num_cpus=hardware.num_cpus()), lambda listing, job, stop, _: embed_locally(listing, job, stop)
    )


@contextmanager
def _ray_engine(
    inputs: Inputs, run: Run, to_embed: pa.Table, before_exit: Callable[[str], None]
) -> Iterator[ReadyEngine]:
    """Attach to the cluster, or start Ray here; for `before_exit` see `execute`."""
    from embedder.executors.ray_session import cluster, ray_session

    compute = inputs.config.compute
    access = access_of(compute.ray_address, inputs.model.uri, run, to_embed)
    settings = settings_of(["cuda" if compute.may_use_gpus and hardware.num_gpus() > 0 else "cpu"])
    session = ray_session(
        compute.ray_address,
        compute.no_progress_timeout_s,
        ray_store_bytes(compute.batch_size, inputs.model, inputs.plan, settings),
        access=access,
        ship_package=compute.cluster.ship_package,
        before_exit=before_exit,
    )
    with session:
        from embedder.executors.capacity import StartClaim

        there = cluster(compute.cluster.type_label)
        on_cluster = compute.ray_address is not None or len(there.nodes) > 1
        available = share_of(there, compute.cluster, is_cluster=on_cluster)
        with StartClaim() as claim:
            place = partial(_place, available, claim) if on_cluster else lambda job: job
            yield ReadyEngine(available, partial(_run_on_ray, available, claim), place, on_cluster=on_cluster)


def _place(available: Available, claim: "StartClaim", job: Job) -> Job:
    """Wait for room on the cluster, and give each replica its node."""
    from embedder.executors.capacity import wait_for_capacity

    compute = job.compute
    allocation = wait_for_capacity(compute.cluster, compute.stage, job.allocation, available, claim)
    stages = stage_specs(compute, job.model, job.plan, allocation, job.num_items)
    return replace(job, allocation=allocation, stages=stages)


def _run_on_ray(
    available: Available,
    claim: "StartClaim",
    listing: list[pa.Table],
    job: Job,
    stop: StopRequest,
    on_sample: OnSample,
) -> None:
    """Run a job on Ray; its claim on the cluster ends when all its replicas are up."""
    from embedder.compat.operator_stats import sampled_to
    from embedder.executors.capacity import limit_to_share
    from embedder.pipeline import embed_on_ray

    def watch(sample: "Sample") -> None:
        on_sample(sample)
        if is_up(sample) and not any(state.num_starting for state in sample.operators):
            claim.release()

    with sampled_to(watch), limit_to_share(job.compute.cluster, available):
        embed_on_ray(listing, job, stop)
