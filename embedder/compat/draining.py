"""End of a Ray Data run that is asked to stop or fails: what it waits for, and how its stages are ended.

Without it, Ray would start a task for each block that is not decoded yet, and wait for stages that still load their
weights, before the last finished rows reached a part file. It would also leave a hanging stage with the CPUs and
the GPU that it reserved until its call is over.

`fast_start = false` leaves it on, because it is needed for correctness. If Ray has other names, a stopped run waits:
its tasks see the request to stop and output no rows, so the run ends once they have seen every block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from embedder.compat.ray_data import ExecutionTimeoutError
from shards.compat import Private

EXECUTION = "ray.data._internal.execution."
POOLS = f"{EXECUTION}operators.actor_pool_map_operator:"
METRICS = f"{EXECUTION}interfaces.op_runtime_metrics:OpRuntimeMetrics."
EXECUTOR = f"{EXECUTION}streaming_executor:StreamingExecutor."
CALLBACKS = (
    "ray.data:DataContext.custom_execution_callback_classes",
    f"{EXECUTION}execution_callback:ExecutionCallback.before_execution_starts",
    f"{EXECUTION}execution_callback:ExecutionCallback.on_execution_step",
    f"{EXECUTOR}_topology",
    f"{POOLS}ActorPoolMapOperator._actor_pool",
)


def _metrics(*names: str) -> tuple[str, ...]:
    return tuple(METRICS + name for name in names)


def _pool(*names: str) -> tuple[str, ...]:
    return tuple(f"{POOLS}_ActorPool.{name}" for name in names)


CALLS = _metrics("num_tasks_finished", "block_generation_time", "block_serialization_time_s")
PACE = Private(
    "Ray Data's scheduling at the pace of its calls",
    (
        *CALLBACKS,
        *CALLS,
        *_metrics("average_bytes_inputs_per_task"),
        *_pool("_config", "max_tasks_in_flight_per_actor", "num_running_actors", "num_tasks_in_flight"),
        *_pool("can_schedule_task"),
        f"{EXECUTOR}_resource_manager",
        f"{EXECUTION}resource_manager:ResourceManager.get_global_limits",
        f"{EXECUTION}streaming_executor_state:WAIT_FOR_TASK_COMPLETION_TIMEOUT_S",
        f"{EXECUTION}streaming_executor_state:OpState.total_enqueued_input_blocks",
    ),
    "ray 2.56.1 to 2.60.0",
)
STEADY_POOLS = Private(
    "steady actor pools",
    (
        *CALLBACKS,
        *_metrics("num_tasks_finished", "block_generation_time"),
        f"{EXECUTOR}_actor_autoscaler",
        f"{EXECUTOR}_data_context",
        f"{EXECUTOR}_resource_manager",
        "ray.data._internal.actor_autoscaler:BacklogAwareActorAutoscaler._derive_target_scaling_config",
        "ray.data._internal.actor_autoscaler.autoscaling_actor_pool:ActorPoolScalingRequest.no_op(reason)",
    ),
    "ray 2.60.0",
)
EARLY_END = Private(
    "the early end of a Ray Data run",
    (
        *CALLBACKS,
        *_metrics("rows_task_outputs_generated", "num_row_inputs_received"),
        *_pool("shutdown(force)"),
        f"{EXECUTOR}shutdown(force, exception)",
        f"{EXECUTION}operators.map_operator:MapOperator._block_ref_bundler",
        f"{EXECUTION}bundle_queue:RebundleQueue._ready_bundles",
        f"{EXECUTION}bundle_queue:RebundleQueue._pending_bundles",
    ),
    "ray 2.56.1 to 2.60.0",
    "a run that is stopped or fails waits for Ray, and its stages may keep their CPUs until the process ends",
)
STATES = Private(
    "reading of operators' states",
    (
        *CALLBACKS,
        *CALLS,
        *_metrics("num_tasks_running", "rows_task_outputs_generated", "task_submission_backpressure_time"),
        *_metrics("bytes_inputs_of_task_locality_miss_tasks", "obj_store_mem_spilled", "_running_tasks"),
        *_metrics("on_task_finished"),
        *_pool("_running_actors", "num_pending_actors"),
        "ray.actor:ActorHandle._actor_id",
        f"{EXECUTOR}_resource_manager",
        f"{EXECUTION}resource_manager:ResourceManager._op_usages",
        f"{EXECUTION}operators.input_data_buffer:InputDataBuffer",
    ),
    "ray 2.56.1 to 2.60.0",
    "a run shows no operators and no bottleneck",
)


class RunStop(Protocol):
    """Request to stop, as the scheduling loop sees it."""

    @property
    def asked(self) -> bool:
        """Return whether the run is to stop."""

    @property
    def is_overdue(self) -> bool:
        """Return whether to stop waiting for anything."""


# Ray creates the callback, and sends its settings to every process; this one stays here.
STOP: ContextVar[RunStop | None] = ContextVar("stop", default=None)


class DrainedError(ExecutionTimeoutError):  # type: ignore[misc]  # Ray prints the trace of any other as its own bug
    """The stages are empty, or were not waited for.

    `finished` has references to blocks of finished rows that no write task has taken.
    """

    def __init__(self, finished: list[Any]) -> None:
        super().__init__("the run was asked to stop")
        self.finished = finished


@contextmanager
def draining(stop: RunStop | None) -> Iterator[None]:
    """Let datasets executed in the block end by `DrainedError` when the stop is requested."""
    token = STOP.set(stop)
    try:
        yield
    finally:
        STOP.reset(token)
