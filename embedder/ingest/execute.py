"""Choose the engine, make it ready, and run the job on it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.config_toml.values import toml
from embedder.executors.bottleneck import OperatorHistory
from embedder.executors.choose_engine import EngineChoice
from embedder.executors.executor import Executor, OnSample
from embedder.executors.fleet_watch import FleetWatch
from embedder.executors.job import Job, ModelRun, describe_store_limit, plan_job, ray_store_bytes
from embedder.executors.monitor import RunMonitor
from embedder.executors.progress import ShowProgress, no_progress
from embedder.executors.signals import StopRequest, stop_at, stop_on_signals
from embedder.ingest.inputs import Inputs, choose_here
from embedder.placement import hardware
from embedder.placement.device_settings import settings_of
from embedder.placement.fleet import Available
from embedder.placement.resources import describe_devices, describe_limits
from embedder.store.journal.runs import Run
from embedder.store.layout import run_file

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample
    from embedder.placement.preflight import Access

LOG = logging.getLogger(__name__)
NUM_PROBED = 7  # items that each node opens before a run on a cluster, evenly spread over the sources, and the last
PREFLIGHT_FOLDER = "preflight"


@dataclass(frozen=True)
class EngineOutcome:
    """Outcome of an engine's run, in addition to its journal."""

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
    inputs: Inputs,
    models: Sequence[ModelRun],
    to_embed: pa.Table,
    show_progress: ShowProgress = no_progress,
    stop_at_s: float | None = None,
    before_exit: Callable[[str], None] = lambda reason: None,
) -> EngineOutcome:
    """Run the job on the engine that suits it; with nothing to embed, only describe it.

    `models` has the run in each model's view, the main model's first. No item is begun after the monotonic time
    `stop_at_s`. `before_exit` is called with the reason where the process is ended and no error reaches the caller any
    more.
    """
    run = models[0].run
    choice = _choose(inputs, to_embed.num_rows)
    with _make_executor(choice.engine, inputs, run, to_embed, before_exit) as executor:
        operators, fleet = OperatorHistory(), FleetWatch(on_cluster=executor.on_cluster)
        rows, available = inputs.config.rows, executor.available
        job = executor.place(
            plan_job(inputs.config.compute, rows, inputs.model, inputs.plan, available, models, to_embed.num_rows)
        )
        stop = StopRequest(run.request_stop, job.compute.stop_timeout_s)
        _log_job(job, available)
        with (
            stop_on_signals(stop.note_signal, stop.notice, spread=stop.forward, can_break=lambda: stop.can_break),
            stop_at(stop.request_stop, stop_at_s) as time_up,
            show_progress(to_embed.num_rows) as on_progress,
            fleet,
            RunMonitor(run, on_progress, operators, fleet, [each.run for each in models[1:]]) as monitor,
        ):
            if to_embed.num_rows:
                executor.run([to_embed], job, stop, _listener(operators, fleet))
            if stop.is_overdue:
                LOG.info(f"stop_timeout_s = {stop.timeout_s:g} is over: what still was inside the stages is left")
    return EngineOutcome(
        job, available, choice, monitor, operators, fleet, out_of_time=time_up.is_set(), stopped=stop.by_signal
    )


def _choose(inputs: Inputs, num_items: int) -> EngineChoice:
    """Choose the engine, and log why."""
    compute, fingerprint = inputs.config.compute, inputs.model.fingerprint
    choice = choose_here(compute, inputs.plan, num_items, fingerprint, has_bf16=hardware.has_bf16())
    choice = choice if num_items else EngineChoice("local", "nothing to embed")
    LOG.info(f"engine {choice.engine}: {choice.reason}")
    return choice


def _log_job(job: Job, available: Available) -> None:
    """Log where the stages compute, and what lowers their number or the size of their batches."""
    if devices := describe_devices(job.allocation, available):
        LOG.info(devices)
    if compiled := [str(stage.index) for stage in job.stages if stage.compile]:
        LOG.info(f"layers are compiled in stages {', '.join(compiled)} (compile = {toml(job.compute.compile)})")
    if smaller := describe_store_limit(job, available):
        LOG.info(smaller)
    if limits := describe_limits(job.compute.stage, job.allocation):
        LOG.info(limits)


def _listener(operators: OperatorHistory, fleet: FleetWatch) -> OnSample:
    """Return what takes the samples of a run on Ray."""

    def on_sample(sample: "Sample") -> None:
        operators.add(sample)
        fleet.compare_replicas(sample)

    return on_sample


def access_of(ray_address: str | None, model_uri: str, run: Run, to_embed: pa.Table) -> "Access | None":
    """Return what the nodes of a cluster must reach: store, main model, and some items; None on one machine."""
    if ray_address is None or not to_embed.num_rows:
        return None
    from embedder.placement.preflight import Access

    rows = sorted({round(step * (to_embed.num_rows - 1) / NUM_PROBED) for step in range(NUM_PROBED + 1)})
    uris = to_embed["uri"].take(rows).to_pylist()
    return Access(run.files, run_file(run.run_id, PREFLIGHT_FOLDER), model_uri, tuple(uris))


def _make_executor(
    name: str, inputs: Inputs, run: Run, to_embed: pa.Table, before_exit: Callable[[str], None]
) -> Executor:
    if name == "local":
        from embedder.executors.local import LocalExecutor

        return LocalExecutor()
    from embedder.ray_executor import RayExecutor

    compute = inputs.config.compute
    access = access_of(compute.ray_address, inputs.model.uri, run, to_embed)
    num_gpus = hardware.num_gpus() if compute.may_use_gpus else 0
    settings = settings_of(["cuda"] if num_gpus else ["cpu"], inputs.model.config)
    return RayExecutor(
        compute,
        ray_store_bytes(compute.batch_size, inputs.model, inputs.plan, settings, max(1, num_gpus)),
        access,
        before_exit,
    )
