"""Callbacks in Ray Data's scheduling loop, which read its internals; `embedder.compat.draining` selects them.

Source: ray 2.60 `data/_internal/execution/streaming_executor.py`, `operators/actor_pool_map_operator.py`.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ray.data._internal.actor_autoscaler import BacklogAwareActorAutoscaler
from ray.data._internal.actor_autoscaler.autoscaling_actor_pool import ActorPoolScalingRequest
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from embedder.compat.draining import STOP, DrainedError
from embedder.compat.pace import WAIT_S, Pace, StageCalls, calls_in_flight, pace

if TYPE_CHECKING:
    from ray.data._internal.actor_autoscaler import AutoscalingActorPool
    from ray.data._internal.execution.interfaces import PhysicalOperator
    from ray.data._internal.execution.streaming_executor import StreamingExecutor
    from ray.data._internal.execution.streaming_executor_state import OpState

QUICK_S = 20.0  # from the start, without pauses: blocks come to the first stages, and what is short is over
LOOK_S = 0.5  # between two looks at the stages' calls
FEW_CALLS = 3  # say nothing yet
RECENT_SHARE = 0.5  # of the latest calls in a mean; the earlier ones weigh the less the older they are
STARVED_LOOKS = 10  # at the first stage, by which it is told whether decoding keeps it waiting
NUM_BEFORE_STAGES = 2  # operators: the input, and decoding
# Ray Data 2.60 adds a replica as soon as two blocks lie with one actor, and takes it away when a pool is half idle in
# one step of its loop. Two blocks that arrive together are enough: stages behind a slow one load replicas for work that
# is over before these are ready. So demand must last.
GROW_AFTER_S = 4.0  # a replica takes about as long to load; what is over sooner, it would not have helped
SHRINK_AFTER_S = 20.0  # at least; several times what loading it again would take
STAYS_FOR_LOADS = 3.0  # times the measured seconds of loading
SUSTAINED_SHARE = 0.8  # of that time; a pool that is refilled shows a free slot now and then


@dataclass
class MeasuredCalls:
    """Mean seconds of an operator's latest calls, as its processes measured them.

    Attributes:
        operator: of Ray Data.
        call_s: the mean; none before `FEW_CALLS`.
    """

    operator: Any
    call_s: float | None = None
    _num: int = 0
    _total_s: float = 0.0

    def look(self) -> None:
        """Take the calls that have ended since the last look."""
        metrics = self.operator.metrics
        num, total_s = metrics.num_tasks_finished, metrics.block_generation_time + metrics.block_serialization_time_s
        if num < self._num + (FEW_CALLS if self.call_s is None else 1):
            return
        latest_s = (total_s - self._total_s) / (num - self._num)
        self.call_s = latest_s if self.call_s is None else self.call_s + RECENT_SHARE * (latest_s - self.call_s)
        self._num, self._total_s = num, total_s


class LoopPace(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Pauses, waits and calls in flight that follow the seconds of the stages' calls (`embedder.compat.pace`).

    A turn of the loop takes 5 ms of CPU and more. Ray Data turns it ten times a second, and gives a replica two calls.
    """

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Note the start and the operators whose calls are measured; the stages and decoding."""
        self._begin_s = self._next_look_s = time.monotonic()
        pools = [each for each in executor._topology if isinstance(each, ActorPoolMapOperator)]
        self._stages = [MeasuredCalls(each) for each in pools]
        self._decode = MeasuredCalls(pools[0].input_dependencies[0]) if pools else None
        self._starved: deque[bool] = deque(maxlen=STARVED_LOOKS)
        self._num_turns, self._turn_s = 0, 0.0
        self._cpu_s: float | None = None
        self._pace = Pace()

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Look at the calls from time to time, and pause."""
        now_s = time.monotonic()
        self._num_turns += 1
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look(executor)
        if self._pace.pause_s and now_s > self._begin_s + QUICK_S:
            time.sleep(self._pace.pause_s)

    def after_execution_succeeds(self, executor: "StreamingExecutor") -> None:
        """Give Ray Data its own wait back."""
        streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = WAIT_S

    def after_execution_fails(self, executor: "StreamingExecutor", error: Exception) -> None:
        """Give Ray Data its own wait back."""
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
        """Seconds of a decode task, where the first stage has lately had no calls while such tasks ran."""
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
    """End of the execution with `DrainedError` once it is asked to stop and nothing is in flight."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Take the stop of the thread that executes the dataset; the other methods are called by another one."""
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
    """End of the stages' processes at once where an execution fails or is stopped, whatever they do."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Replace the executor's shutdown; Ray calls no callback between the failure and that."""
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
    """Whether rows are inside the stages; blocks that wait for the first stage don't count."""
    first = stages[0]
    num_begun, num_through = first.metrics.rows_task_outputs_generated, write.metrics.num_row_inputs_received
    return bool(first.num_active_tasks() or num_begun > num_through)


def _blocks_before(write: Any, state: Any) -> list[Any]:
    """Blocks that wait for a write task, because they are too few for a part file or all tasks are busy."""
    bundler, (queue,) = write._block_ref_bundler, state.input_queues
    bundles = [*bundler._ready_bundles, *bundler._pending_bundles]
    while queue.has_next():
        bundles.append(queue.pop())
    return [ref for bundle in bundles for ref in bundle.block_refs]


@dataclass
class SustainedDemand:
    """Directions (1 grow, -1 shrink, 0 stay) that one pool's load lately asked for, and whether one of them lasts.

    Attributes:
        grow_after_s: seconds that demand for more replicas must last.
        shrink_after_s: seconds that demand for fewer must last.
        load_s: seconds that replicas last took to load; 0 before any has.
    """

    grow_after_s: float = GROW_AFTER_S
    shrink_after_s: float = SHRINK_AFTER_S
    load_s: float = 0.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def lasts(self, direction: int, now_s: float) -> bool:
        """Note a direction, and return whether it has lasted.

        Args:
            direction: 1, 0 or -1; it counts until the next call.
            now_s: monotonic time.

        Returns:
            Whether a direction other than 0 has lasted; the history then starts anew.
        """
        self._seen.append((now_s, direction))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - max(self.grow_after_s, self.shrink_after_s):
            self._seen.popleft()
        needed_s = {1: self.grow_after_s, -1: self.shrink_after_s}.get(direction)
        if needed_s is None:
            return False
        since_s = now_s - needed_s
        if self._seen[0][0] > since_s or self._seconds_of(direction, since_s) < SUSTAINED_SHARE * needed_s:
            return False
        self._seen.clear()
        return True

    def _seconds_of(self, direction: int, since_s: float) -> float:
        pairs = pairwise(self._seen)
        return sum(
            stop_s - max(start_s, since_s)
            for (start_s, seen), (stop_s, _) in pairs
            if seen == direction and stop_s > since_s
        )

    def forget(self) -> None:
        """Forget the history; the pool has changed."""
        self._seen.clear()

    def note_load(self, load_s: float) -> None:
        """Let a replica that took so long to load stay the longer without work."""
        self.forget()
        self.load_s = load_s
        self.shrink_after_s = max(self.shrink_after_s, STAYS_FOR_LOADS * load_s)


class SteadyActorAutoscaler(BacklogAwareActorAutoscaler):  # type: ignore[misc]  # Ray ships no types
    """Ray Data's own autoscaler, whose decisions take effect once they have lasted."""

    def __init__(self, executor: "StreamingExecutor") -> None:
        super().__init__(
            executor._topology, executor._resource_manager, config=executor._data_context.autoscaling_config
        )
        self._demands: dict[int, SustainedDemand] = {}
        self._loading_since_s: dict[int, float] = {}

    def _derive_target_scaling_config(
        self, actor_pool: "AutoscalingActorPool", op: "PhysicalOperator", op_state: "OpState"
    ) -> ActorPoolScalingRequest:
        request = super()._derive_target_scaling_config(actor_pool, op, op_state)
        size = actor_pool.current_size()
        if request.force or size < max(1, actor_pool.min_size()) or size > actor_pool.max_size():
            return request
        demand, now_s = self._demands.setdefault(id(actor_pool), SustainedDemand()), time.monotonic()
        if actor_pool.num_pending_actors():
            self._loading_since_s.setdefault(id(actor_pool), now_s)
            demand.forget()
            return ActorPoolScalingRequest.no_op(reason="a replica is being loaded")
        if (since_s := self._loading_since_s.pop(id(actor_pool), None)) is not None:
            demand.note_load(now_s - since_s)
        direction = (request.delta > 0) - (request.delta < 0)
        if direction > 0 and _left_s(actor_pool, op) <= demand.load_s:
            return ActorPoolScalingRequest.no_op(reason="what is left is over before another replica is loaded")
        if demand.lasts(direction, now_s):
            return request
        return ActorPoolScalingRequest.no_op(reason=f"not for long enough yet: {request.reason}")


def _left_s(pool: "AutoscalingActorPool", op: "PhysicalOperator") -> float:
    """Seconds until the replicas that compute are through all blocks of the run; endless where that is unknown."""
    num_done, num_blocks = op.metrics.num_tasks_finished, op.input_dependencies[0].num_outputs_total()
    if not num_done or num_blocks is None:
        return math.inf
    call_s = op.metrics.block_generation_time / num_done
    return float((num_blocks - num_done) * call_s / max(1, pool.num_running_actors()))


class SteadyPools(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Callback that gives each dataset that is executed the steady autoscaler."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Replace the autoscaler; the executor's thread has not begun."""
        executor._actor_autoscaler = SteadyActorAutoscaler(executor)
