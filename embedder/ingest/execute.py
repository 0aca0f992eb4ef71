"""Choose the engine, make it ready, and run the job on it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.engine import hardware
from embedder.engine.choose_engine import EngineChoice, choose_engine
from embedder.engine.job import Job, Model, handed_on_bytes, plan_job, rows_per_batch
from embedder.engine.monitor import RunMonitor
from embedder.engine.progress import ShowProgress, no_progress
from embedder.engine.resources import Available, describe_devices, describe_limits, object_store_bytes
from embedder.engine.signals import StopRequest, stop_at, stop_on_signals
from embedder.store.runs import Run
from shards.plan import ShardPlan

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOutcome:
    """Outcome of an engine's run, beside its journal."""

    job: Job
    available: Available
    choice: EngineChoice
    monitor: RunMonitor
    """Memory and CPU seconds of the run's processes."""
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
    with _engine(choice.engine, config, store_bytes) as (available, run_job):
        job = plan_job(config, model, plan, available, run, carried_schema(to_embed.schema))
        if devices := describe_devices(job.allocation, available):
            LOG.info(devices)
        if limits := describe_limits(config, job.allocation):
            LOG.info(limits)
        with (
            stop_on_signals(stop.note_signal, stop.notice, spread=stop.spread, can_break=lambda: stop.can_break),
            stop_at(stop.request_stop, stop_at_s) as time_up,
            show_progress(to_embed.num_rows) as on_progress,
            RunMonitor(run, on_progress) as monitor,
        ):
            if to_embed.num_rows:
                run_job([to_embed], job, stop)
            if stop.is_overdue:
                LOG.info(f"stop_timeout_s = {stop.timeout_s:g} is over: what still was inside the stages is left")
    return EngineOutcome(job, available, choice, monitor, out_of_time=time_up.is_set(), stopped=stop.by_signal)


RunJob = Callable[[list[pa.Table], Job, StopRequest], None]


@contextmanager
def _engine(name: str, config: RunConfig, store_bytes: int) -> Iterator[tuple[Available, RunJob]]:
    """Make an engine ready; give the machine it has, and the function that runs a job on it."""
    if name == "local":
        from embedder.engine.local import embed_locally

        yield Available(num_cpus=hardware.num_cpus()), embed_locally
        return
    from embedder.engine.ray_session import ray_session

    with ray_session(config.ray_address, config.no_progress_timeout_s, store_bytes) as available:
        from embedder.pipeline import embed_on_ray

        yield available, embed_on_ray
