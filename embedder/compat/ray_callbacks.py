"""Callbacks in Ray Data's scheduling loop, which read its internals; `embedder.compat.draining` selects them."""

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from embedder.compat.draining import STOP, DrainedError
from embedder.compat.pace import WAIT_S, Pace, StageCalls, calls_in_flight, pace

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

QUICK_S = 20.0  # from the start, without pauses: blocks reach the first stages, and short runs are over
LOOK_S = 0.5  # between two checks of the stages' calls
FEW_CALLS = 3  # fewer are not conclusive
RECENT_SHARE = 0.5  # weight of the latest calls in a mean; the weight of earlier ones decays
STARVED_LOOKS = 10  # checks of the first stage, to see whether decoding keeps it waiting
NUM_BEFORE_STAGES = 2  # the input, and decoding


@dataclass
class MeasuredCalls:
    """Mean seconds of an operator's latest calls, as measured by its processes; `call_s` is None before `FEW_CALLS`."""

    operator: Any
    call_s: float | None = None
    _num: int = 0
    _total_s: float = 0.0

    def look(self) -> None:
        """Add the calls that have ended since the last time."""
        metrics = self.operator.metrics
        num, total_s = metrics.num_tasks_finished, metrics.block_generation_time + metrics.block_serialization_time_s
        if num < self._num + (FEW_CALLS if self.call_s is None else 1):
            return
        latest_s = (total_s - self._total_s) / (num - self._num)
        self.call_s = latest_s if self.call_s is None else self.call_s + RECENT_SHARE * (latest_s - self.call_s)
        self._num, self._total_s = num, total_s


class LoopPace(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Adapts pauses, waits and calls in flight to the duration of the stages' calls (`embedder.compat.pace`).

    A turn of the loop takes 5 ms of CPU or more. Ray Data turns it ten times per second, and gives a replica two calls.
    """

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Record the start and the operators whose calls are measured: the stages and decoding."""
        self._begin_s = self._next_look_s = time.monotonic()
        pools = [each for each in executor._topology if isinstance(each, ActorPoolMapOperator)]
        self._stages = [MeasuredCalls(each) for each in pools]
        self._decode = MeasuredCalls(pools[0].input_dependencies[0]) if pools else None
        self._starved: deque[bool] = deque(maxlen=STARVED_LOOKS)
        self._num_turns, self._turn_s = 0, 0.0
        self._cpu_s: float | None = None
        self._pace = Pace()

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Check the calls from time to time, and pause."""
        now_s = time.monotonic()
        self._num_turns += 1
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look(executor)
        if self._pace.pause_s and now_s > self._begin_s + QUICK_S:
            time.sleep(self._pace.pause_s)

    def after_execution_succeeds(self, executor: "StreamingExecutor") -> None:
        """Restore Ray Data's own wait."""
        streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = WAIT_S

    def after_execution_fails(self, executor: "StreamingExecutor", error: Exception) -> None:
        """Restore Ray Data's own wait."""
        self.after_execution_succeeds(executor)

    def _look(self, executor: "StreamingExecutor") -> None:
        cpu_s = time.thread_time()
        if self._cpu_s is not None:
            self._turn_s = (cpu_s - self._cpu_s) / self._num_turns
        self._num_turns, self._cpu_s = 0, cpu_s
        store_bytes = executor._resource_manager.get_global_limits().object_store_memory
        known = []
        for stage in self._stages:
            stage.look()
            calls, pool = _calls_of(stage, executor), stage.operator._actor_pool
            if calls is not None:
                in_flight = calls_in_flight(calls, self._turn_s, store_bytes)
                known.append((calls, _raise_in_flight(pool, in_flight)))
        self._pace = pace(known, self._turn_s, self._starved_decode_s())
        streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = self._pace.wait_s

    def _starved_decode_s(self) -> float | None:
        """Return the seconds of a decode task, if the first stage has lately had no calls while such tasks ran."""
        if self._decode is None:
            return None
        self._decode.look()
        pool = self._stages[0].operator._actor_pool
        is_idle = pool.num_running_actors() > 0 and pool.num_tasks_in_flight() == 0
        self._starved.append(is_idle and self._decode.operator.num_active_tasks() > 0)
        return self._decode.call_s if sum(self._starved) > STARVED_LOOKS // 2 else None


def _calls_of(stage: MeasuredCalls, executor: "StreamingExecutor") -> StageCalls | None:
    pool, state = stage.operator._actor_pool, executor._topology[stage.operator]
    if stage.call_s is None or not pool.num_running_actors():
        return None
    return StageCalls(
        call_s=stage.call_s,
        block_bytes=stage.operator.metrics.average_bytes_inputs_per_task or 0.0,
        num_replicas=pool.num_running_actors(),
        has_queue=state.total_enqueued_input_blocks() > 0 and not pool.can_schedule_task(),
    )


def _raise_in_flight(pool: Any, in_flight: int) -> int:
    """Let each replica hold more calls, never fewer: Ray asserts that none holds more than allowed."""
    if in_flight > pool.max_tasks_in_flight_per_actor():
        pool._config = replace(pool._config, max_tasks_in_flight_per_actor=in_flight)
    return int(pool.max_tasks_in_flight_per_actor())


class DrainOnStop(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Ends the execution with `DrainedError` once it is asked to stop and nothing is in flight."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Get the stop of the thread that executes the dataset; another thread calls the other methods."""
        self._stop = STOP.get()

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """End the execution if it is time."""
        stop = self._stop
        if stop is None or not stop.asked:
            return
        *_, (write, state) = executor._topology.items()
        stages = list(executor._topology)[NUM_BEFORE_STAGES:-1]
        if stop.is_overdue or not (_are_busy(stages, write) or write.num_active_tasks()):
            raise DrainedError(_blocks_before(write, state))


class EndStagesOnFailure(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Ends the stages' processes at once, whatever they do, when an execution fails or is stopped."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Replace the executor's shutdown; Ray calls no callback between the failure and the shutdown."""
        shutdown = executor.shutdown

        def end(force: bool, exception: Exception | None = None) -> None:
            vars(executor).pop("shutdown", None)
            if exception is not None:
                for operator in executor._topology:
                    if isinstance(operator, ActorPoolMapOperator):
                        _kill_at_shutdown(operator._actor_pool)
            shutdown(force=force, exception=exception)

        executor.shutdown = end


def _kill_at_shutdown(pool: Any) -> None:
    shutdown = pool.shutdown
    pool.shutdown = lambda force=False: shutdown(force=True)


def _are_busy(stages: list[Any], write: Any) -> bool:
    """Return whether rows are inside the stages; blocks that wait for the first stage don't count."""
    first = stages[0]
    num_begun, num_through = first.metrics.rows_task_outputs_generated, write.metrics.num_row_inputs_received
    return bool(first.num_active_tasks() or num_begun > num_through)


def _blocks_before(write: Any, state: Any) -> list[Any]:
    """Return the blocks waiting for a write task, because they are too few for a part file or all tasks are busy."""
    bundler, (queue,) = write._block_ref_bundler, state.input_queues
    bundles = [*bundler._ready_bundles, *bundler._pending_bundles]
    while queue.has_next():
        bundles.append(queue.pop())
    return [ref for bundle in bundles for ref in bundle.block_refs]
