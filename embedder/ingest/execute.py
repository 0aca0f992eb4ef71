"""Choose the engine, make it ready, and run the job on it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.config_toml.values import toml
from embedder.executors.bottleneck import OperatorHistory, is_up
from embedder.executors.choose_engine import EngineChoice, choose_engine
from embedder.executors.fleet_watch import FleetWatch
from embedder.executors.job import Job, ModelRun, plan_job, ray_store_bytes, stage_specs
from embedder.executors.monitor import RunMonitor
from embedder.executors.progress import ShowProgress, no_progress
from embedder.executors.signals import StopRequest, stop_at, stop_on_signals
from embedder.ingest.run_times import measured_times
from embedder.models.model_folder import Model
from embedder.placement import hardware
from embedder.placement.device_settings import settings_of
from embedder.placement.fleet import Available, share_of
from embedder.placement.fleet_plan import plan_for_fleet
from embedder.placement.resources import describe_devices, describe_limits
from embedder.store.journal.runs import Run
from embedder.store.layout import run_file
from shards.plan import ShardPlan

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample
    from embedder.placement.preflight import Access

LOG = logging.getLogger(__name__)
NUM_PROBED = 7  # items that each node opens before a run on a cluster, evenly spread over the sources, and the last
PREFLIGHT_FOLDER = "preflight"


@dataclass(frozen=True)
class EngineOutcome:
    """Outcome of an engine's run, beside its journal."""

    job: Job
    available: Available
    choice: EngineChoice
    monitor: RunMonitor
    """Memory and CPU seconds of the run's processes."""
    operators: OperatorHistory
    """Samples of the operators; none of a run in one process."""
    fleet: FleetWatch
    """Events of the cluster."""
    out_of_time: bool
    """Whether it was stopped because its time was up."""
    stopped: bool
    """Whether a signal stopped it."""


OnSample = Callable[["Sample"], None]


@dataclass(frozen=True)
class ReadyEngine:
    """Engine that is ready.

    Attributes:
        available: CPUs and GPUs that the run may take.
        run: runs a job over a listing; its operators are sampled on Ray.
        place: waits for room on a cluster, and gives each replica of a job its node.
        on_cluster: whether there are nodes that may come and go.
    """

    available: Available
    run: Callable[[list[pa.Table], Job, StopRequest, OnSample], None]
    place: Callable[[Job], Job] = lambda job: job
    on_cluster: bool = False


def execute(
    config: RunConfig,
    model: Model,
    plan: ShardPlan,
    run: Run,
    to_embed: pa.Table,
    show_progress: ShowProgress = no_progress,
    stop_at_s: float | None = None,
    before_exit: Callable[[str], None] = lambda reason: None,
    further: Sequence[ModelRun] = (),
) -> EngineOutcome:
    """Run the job on the engine that suits it; with nothing to embed, only describe it.

    Args:
        config: the run.
        model: its model.
        plan: the cut.
        run: where the work is journaled.
        to_embed: listed items.
        show_progress: display of the progress.
        stop_at_s: Unix time at which no further items are begun.
        before_exit: called with the reason where the process is ended and no error reaches the caller any more.
        further: further models, in their order, with the run of each.
    """
    choice = choose_engine(
        config,
        plan,
        to_embed.num_rows,
        hardware.num_cpus(),
        hardware.num_gpus(),
        gpus=hardware.gpu_names(),
        has_bf16=hardware.has_bf16(),
        measured=measured_times(config, model.fingerprint),
    )
    if to_embed.num_rows == 0:
        choice = EngineChoice("local", "nothing to embed")
    LOG.info(f"engine {choice.engine}: {choice.reason}")
    stop = StopRequest(run.request_stop, config.stop_timeout_s)
    is_on_gpus = config.may_use_gpus and hardware.num_gpus() > 0
    store_bytes = ray_store_bytes(config, model, plan, settings_of(["cuda" if is_on_gpus else "cpu"]))
    operators = OperatorHistory()
    access = access_of(config, model, run, to_embed)
    with _engine(choice.engine, config, store_bytes, access, before_exit) as engine:
        available = engine.available
        fleet = FleetWatch(on_cluster=engine.on_cluster)
        plan = plan_for_fleet(config, model, plan, available)
        carried, num_items = carried_schema(to_embed.schema), to_embed.num_rows
        job = engine.place(plan_job(config, model, plan, available, run, carried, further, num_items))
        if devices := describe_devices(job.allocation, available):
            LOG.info(devices)
        if compiled := [str(stage.index) for stage in job.stages if stage.compile]:
            LOG.info(f"layers are compiled in stages {', '.join(compiled)} (compile = {toml(config.compile)})")
        if limits := describe_limits(config, job.allocation):
            LOG.info(limits)
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
        job,
        available,
        choice,
        monitor,
        operators,
        fleet,
        out_of_time=time_up.is_set(),
        stopped=stop.by_signal,
    )


def _listener(operators: OperatorHistory, fleet: FleetWatch) -> OnSample:
    """Return what takes the samples of a run on Ray."""

    def on_sample(sample: "Sample") -> None:
        operators.add(sample)
        fleet.compare_replicas(sample)

    return on_sample


def access_of(config: RunConfig, model: Model, run: Run, to_embed: pa.Table) -> "Access | None":
    """Return what the nodes of a cluster must reach: store, model, and some items; None on one machine.

    Args:
        config: the run.
        model: its model.
        run: tokens lie in its folder.
        to_embed: listed items.
    """
    if config.ray_address is None or not to_embed.num_rows:
        return None
    from embedder.placement.preflight import Access

    rows = sorted({round(step * (to_embed.num_rows - 1) / NUM_PROBED) for step in range(NUM_PROBED + 1)})
    uris = to_embed["uri"].take(rows).to_pylist()
    return Access(run.files, run_file(run.run_id, PREFLIGHT_FOLDER), model.uri, tuple(uris))


@contextmanager
def _engine(
    name: str, config: RunConfig, store_bytes: int, access: "Access | None", before_exit: Callable[[str], None]
) -> Iterator[ReadyEngine]:
    """Make an engine ready.

    Args:
        name: of the engine.
        config: the run.
        store_bytes: shared memory of a Ray that is started here.
        access: what the nodes of a cluster must reach.
        before_exit: see `execute`.
    """
    if name == "local":
        from embedder.executors.local import embed_locally

        yield ReadyEngine(
            Available(num_cpus=hardware.num_cpus()), lambda listing, job, stop, _: embed_locally(listing, job, stop)
        )
        return
    from embedder.executors.ray_session import ray_session

    ship = config.cluster.ship_package
    session = ray_session(
        config.ray_address,
        config.no_progress_timeout_s,
        store_bytes,
        access=access,
        ship_package=ship,
        before_exit=before_exit,
    )
    with session:
        from embedder.compat.operator_stats import sampled_to
        from embedder.executors.capacity import StartClaim, limit_to_share, wait_for_capacity
        from embedder.executors.ray_session import cluster
        from embedder.pipeline import embed_on_ray

        there = cluster(config.cluster.type_label)
        on_cluster = config.ray_address is not None or len(there.nodes) > 1
        available = share_of(there, config.cluster, is_cluster=on_cluster)
        with StartClaim() as claim:

            def place(job: Job) -> Job:
                if not on_cluster:
                    return job
                allocation = wait_for_capacity(config, job.allocation, available, claim)
                stages = stage_specs(config, job.model, job.plan, allocation, job.num_items)
                return replace(job, allocation=allocation, stages=stages)

            def run_job(listing: list[pa.Table], job: Job, stop: StopRequest, on_sample: OnSample) -> None:
                def watch(sample: "Sample") -> None:
                    on_sample(sample)
                    if is_up(sample) and not any(state.num_starting for state in sample.operators):
                        claim.release()

                with sampled_to(watch), limit_to_share(config, available):
                    embed_on_ray(listing, job, stop)

            yield ReadyEngine(available, run_job, place, on_cluster=on_cluster)
