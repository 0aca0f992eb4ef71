"""State of each operator of a Ray Data run, read in its scheduling loop every two seconds.

For what a run shows, and for nothing that it decides: outside of the tested versions there are no such figures.
Source: ray 2.60 `data/_internal/execution/interfaces/op_runtime_metrics.py`, `operators/actor_pool_map_operator.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.input_data_buffer import InputDataBuffer
from ray.experimental.locations import get_local_object_locations

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

MODEL_ACTOR = "ModelActor"  # in Ray's name of an operator that holds further models
INTERVAL_S = 2.0  # one reading takes a tenth of a millisecond


@dataclass(frozen=True)
class Replica:
    """Actor of a stage that has begun.

    Attributes:
        actor_id: stays the same when Ray starts it again.
        node_id: node of its process.
        is_restarting: whether its process is lost and the next one doesn't compute yet.
    """

    actor_id: str
    node_id: str
    is_restarting: bool = False


@dataclass(frozen=True)
class OperatorState:
    """State of one operator; seconds, calls, rows and bytes moved are sums since the start of the run.

    Attributes:
        name: `decode`, `models 0` for further models, `stage 0`, ..., `write`.
        queued_blocks: blocks that wait before it, none of which a task has taken.
        num_tasks: tasks under way, those included that wait in a replica.
        replicas: actors of a stage; tasks have none.
        num_starting: actors that load.
        num_cpus: CPUs that it holds; GPUs likewise.
        object_store_bytes: of blocks that it makes and has made, until the next operator is done with them; estimated.
        num_calls: finished tasks.
        num_rows: rows that came out.
        work_s: seconds inside the calls.
        backpressure_s: seconds in which it could not begin a task, as what follows is full or its CPUs are in use.
        moved_bytes: bytes of blocks that a task took on another node than they lay on.
        spilled_bytes: bytes of blocks that Ray had moved to disk before a task was done with them.
    """

    name: str
    queued_blocks: int = 0
    num_tasks: int = 0
    replicas: tuple[Replica, ...] = ()
    num_starting: int = 0
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    object_store_bytes: int = 0
    num_calls: int = 0
    num_rows: int = 0
    work_s: float = 0.0
    backpressure_s: float = 0.0
    moved_bytes: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True)
class Sample:
    """State of all operators at one Unix time, in the order of the flow."""

    time_s: float
    operators: tuple[OperatorState, ...]


# Ray makes the callback itself, and sends its settings to every process; this one stays here.
_LISTENER: ContextVar[Callable[[Sample], None] | None] = ContextVar("listener", default=None)


@contextmanager
def sampled_to(listener: Callable[[Sample], None] | None) -> Iterator[None]:
    """Send samples of a dataset that is executed in the block to a function, which Ray's scheduling loop calls."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


class OperatorStats(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Sampling of the operators."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Take the listener of the thread that executes the dataset; the other methods are called by another one."""
        self._listener = _LISTENER.get()
        self._next_s = 0.0
        if self._listener is not None:
            for operator in executor._topology:
                _count_spilled(operator.metrics)

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Read all states, if it is time to."""
        if self._listener is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        self._listener(Sample(time.time(), _states(executor)))

    def after_execution_succeeds(self, executor: "StreamingExecutor") -> None:
        """Read the last sums."""
        if self._listener is not None:
            self._listener(Sample(time.time(), _states(executor)))


def _states(executor: "StreamingExecutor") -> tuple[OperatorState, ...]:
    steps = [(op, state) for op, state in executor._topology.items() if not isinstance(op, InputDataBuffer)]
    names = _names([(op.name, isinstance(op, ActorPoolMapOperator)) for op, _ in steps])
    usages = executor._resource_manager._op_usages
    return tuple(_state(name, *step, usages.get(step[0])) for name, step in zip(names, steps, strict=True))


def _names(operators: list[tuple[str, bool]]) -> list[str]:
    """Name a run's operators in the order of the flow; pure.

    Args:
        operators: Ray's name of each, and whether it has actors.
    """
    models, stages = count(), count()
    middle = [
        (f"models {next(models)}" if MODEL_ACTOR in name else f"stage {next(stages)}") if has_actors else "no vectors"
        for name, has_actors in operators[1:-1]
    ]
    return ["decode", *middle, "write"]


def _state(name: str, operator: Any, state: Any, usage: Any) -> OperatorState:
    metrics = operator.metrics
    pool = operator._actor_pool if isinstance(operator, ActorPoolMapOperator) else None
    return OperatorState(
        name=name,
        queued_blocks=sum(queue.num_blocks for queue in state.input_queues),
        num_tasks=metrics.num_tasks_running,
        replicas=_replicas(pool) if pool is not None else (),
        num_starting=pool.num_pending_actors() if pool is not None else 0,
        num_cpus=(usage and usage.cpu) or 0.0,
        num_gpus=(usage and usage.gpu) or 0.0,
        object_store_bytes=int((usage and usage.object_store_memory) or 0),
        num_calls=metrics.num_tasks_finished,
        num_rows=metrics.rows_task_outputs_generated,
        work_s=metrics.block_generation_time + metrics.block_serialization_time_s,
        backpressure_s=metrics.task_submission_backpressure_time,
        moved_bytes=metrics.bytes_inputs_of_task_locality_miss_tasks,
        spilled_bytes=metrics.obj_store_mem_spilled,
    )


def _count_spilled(metrics: Any) -> None:
    """Have the metrics count spilled bytes; Ray itself would ask a server about each block, and this takes 10 us."""
    finished = metrics.on_task_finished

    def count_task(task_index: int, *ended: Any) -> None:
        inputs = metrics._running_tasks[task_index].inputs
        locations = get_local_object_locations(inputs.block_refs)
        metrics.obj_store_mem_spilled += sum(
            block.metadata.size_bytes or 0
            for block in inputs.blocks
            if locations.get(block.ref, {}).get("did_spill", False)
        )
        finished(task_index, *ended)

    metrics.on_task_finished = count_task


def _replicas(pool: Any) -> tuple[Replica, ...]:
    return tuple(
        Replica(actor._actor_id.hex(), state.actor_location, state.is_restarting)
        for actor, state in pool._running_actors.items()
    )
