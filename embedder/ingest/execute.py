"""Choose the engine, make it ready, and run the job on it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.engine import hardware
from embedder.engine.bottleneck import OperatorHistory, is_up
from embedder.engine.choose_engine import EngineChoice, choose_engine
from embedder.engine.fleet import Available, share_of
from embedder.engine.fleet_plan import plan_for_fleet
from embedder.engine.fleet_watch import FleetWatch
from embedder.engine.job import Job, Model, handed_on_bytes, plan_job, rows_per_batch, stage_specs
from embedder.engine.monitor import RunMonitor
from embedder.engine.progress import ShowProgress, no_progress
from embedder.engine.resources import describe_devices, describe_limits, object_store_bytes
from embedder.engine.signals import StopRequest, stop_at, stop_on_signals
from embedder.store.layout import run_file
from embedder.store.runs import Run
from shards.plan import ShardPlan

if TYPE_CHECKING:
    from embedder.engine.preflight import Access

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


def execute(
    config: RunConfig,
    model: Model,
    plan: ShardPlan,
    run: Run,
    to_embed: pa.Table,
    show_progress: ShowProgress = no_progress,
    stop_at_s: float | None = None,
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
    """
    choice = choose_engine(config, plan, to_embed.num_rows, hardware.num_cpus(), hardware.num_gpus())
    if to_embed.num_rows == 0:
        choice = EngineChoice("local", "nothing to embed")
    LOG.info(f"engine {choice.engine}: {choice.reason}")
    stop = StopRequest(run.request_stop, config.stop_timeout_s)
    store_bytes = object_store_bytes(sum(handed_on_bytes(model, plan)), rows_per_batch(config))
    operators = OperatorHistory()
    with _engine(choice.engine, config, store_bytes, access_of(config, model, run, to_embed)) as (available, run_job):
        on_cluster = config.ray_address is not None or len(available.nodes) > 1
        fleet = FleetWatch(on_cluster=on_cluster)
        if choice.engine == "ray":
            plan = plan_for_fleet(config, model, plan, available, {})
        job = plan_job(config, model, plan, available, run, carried_schema(to_embed.schema))
        if on_cluster and choice.engine == "ray":
            job = _with_room(job, available)
        if devices := describe_devices(job.allocation, available):
            LOG.info(devices)
        if limits := describe_limits(config, job.allocation):
            LOG.info(limits)
        with (
            stop_on_signals(stop.note_signal, stop.notice, spread=stop.spread, can_break=lambda: stop.can_break),
            stop_at(stop.request_stop, stop_at_s) as time_up,
            show_progress(to_embed.num_rows) as on_progress,
            fleet,
            RunMonitor(run, on_progress, operators, fleet) as monitor,
        ):
            if to_embed.num_rows:
                with (
                    _start_released(on_cluster and choice.engine == "ray") as release,
                    _sampled(choice.engine, operators, fleet, release),
                    _share_kept(choice.engine, config, available),
                ):
                    run_job([to_embed], job, stop)
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


def _with_room(job: Job, available: Available) -> Job:
    """Wait for room on a cluster, and place the replicas there."""
    from embedder.engine.room import take_room

    allocation = take_room(job.config, job.allocation, available)
    return replace(job, allocation=allocation, stages=stage_specs(job.config, job.model, job.plan, allocation))


def _start_released(on_cluster: bool) -> AbstractContextManager[Callable[[], None]]:
    """Give the claim on a cluster back in the block, once the run has started."""
    if not on_cluster:
        return nullcontext(lambda: None)
    from embedder.engine.room import start_released

    return start_released()


def _share_kept(engine: str, config: RunConfig, available: Available) -> AbstractContextManager[None]:
    """Keep Ray Data within the run's share in the block.

    Args:
        engine: its name.
        config: the run.
        available: its share.
    """
    if engine == "local":
        return nullcontext()
    from embedder.engine.room import held_to

    return held_to(config, available)


@contextmanager
def _sampled(
    engine: str, operators: OperatorHistory, fleet: FleetWatch, on_started: Callable[[], None]
) -> Iterator[None]:
    """Sample the operators of a run on Ray in the block.

    Args:
        engine: its name.
        operators: takes the samples.
        fleet: compares the replicas of each with those before.
        on_started: called with each sample of which no replica is loading any more.
    """
    if engine == "local":
        yield
        return
    from embedder.compat.operator_stats import Sample, sampled_to

    def on_sample(sample: Sample) -> None:
        operators.add(sample)
        fleet.compare_replicas(sample)
        if is_up(sample) and not any(state.num_starting for state in sample.operators):
            on_started()

    with sampled_to(on_sample):
        yield


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
    from embedder.engine.preflight import Access

    rows = sorted({round(step * (to_embed.num_rows - 1) / NUM_PROBED) for step in range(NUM_PROBED + 1)})
    uris = to_embed["uri"].take(rows).to_pylist()
    return Access(run.files, run_file(run.run_id, PREFLIGHT_FOLDER), model.uri, tuple(uris))


RunJob = Callable[[list[pa.Table], Job, StopRequest], None]


@contextmanager
def _engine(
    name: str, config: RunConfig, store_bytes: int, access: "Access | None"
) -> Iterator[tuple[Available, RunJob]]:
    """Make an engine ready; give the machine it has, and the function that runs a job on it.

    Args:
        name: of the engine.
        config: the run.
        store_bytes: shared memory of a Ray that is started here.
        access: what the nodes of a cluster must reach.
    """
    if name == "local":
        from embedder.engine.local import embed_locally

        yield Available(num_cpus=hardware.num_cpus()), embed_locally
        return
    from embedder.engine.ray_session import ray_session

    ship = config.cluster.ship_package
    session = ray_session(
        config.ray_address, config.no_progress_timeout_s, store_bytes, access=access, ship_package=ship
    )
    with session:
        from embedder.engine.ray_session import cluster
        from embedder.pipeline import embed_on_ray

        there = cluster(config.cluster.type_label)
        is_cluster = config.ray_address is not None or len(there.nodes) > 1
        yield share_of(there, config.cluster, is_cluster=is_cluster), embed_on_ray
