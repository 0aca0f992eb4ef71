"""Callback that reads the state of each operator in Ray Data's scheduling loop, every two seconds."""

import time
from itertools import count
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.input_data_buffer import InputDataBuffer
from ray.experimental.locations import get_local_object_locations

from embedder.compat.operator_stats import LISTENER, SENDING, SENT, OperatorState, Replica, Sample

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

MODEL_ACTOR = "ModelActor"  # in Ray's name of an operator with further models
INTERVAL_S = 2.0  # one reading takes a tenth of a millisecond


class OperatorReadings(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Reads the operators' states for a listener."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Get the listener of the thread that executes the dataset; another thread calls the other methods."""
        self._listener = LISTENER.get()
        self._next_s = 0.0
        if self._listener is not None:
            for operator in executor._topology:
                _count_spilled(operator.metrics)
                if isinstance(operator, ActorPoolMapOperator) and SENDING.is_there():
                    operator.add_map_task_kwargs_fn(lambda: {SENT: time.time()})

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Read all states, if it is time."""
        if self._listener is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        self._listener(Sample(time.time(), _states(executor)))

    def after_execution_succeeds(self, executor: "StreamingExecutor") -> None:
        """Read the final sums."""
        if self._listener is not None:
            self._listener(Sample(time.time(), _states(executor)))


def _states(executor: "StreamingExecutor") -> tuple[OperatorState, ...]:
    steps = [(op, state) for op, state in executor._topology.items() if not isinstance(op, InputDataBuffer)]
    names = _names([(op.name, isinstance(op, ActorPoolMapOperator)) for op, _ in steps])
    usages = executor._resource_manager._op_usages
    return tuple(_state(name, *step, usages.get(step[0])) for name, step in zip(names, steps, strict=True))


def _names(operators: list[tuple[str, bool]]) -> list[str]:
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
