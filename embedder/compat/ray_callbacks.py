"""Callbacks in Ray Data's scheduling loop, which read its internals; `embedder.compat.draining` selects them.

Source: ray 2.60 `data/_internal/execution/streaming_executor.py`, `operators/actor_pool_map_operator.py`.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ray.data._internal.actor_autoscaler import BacklogAwareActorAutoscaler
from ray.data._internal.actor_autoscaler.autoscaling_actor_pool import ActorPoolScalingRequest
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from embedder.compat.draining import STOP, DrainedError

if TYPE_CHECKING:
    from ray.data._internal.actor_autoscaler import AutoscalingActorPool
    from ray.data._internal.execution.interfaces import PhysicalOperator
    from ray.data._internal.execution.streaming_executor import StreamingExecutor
    from ray.data._internal.execution.streaming_executor_state import OpState

QUICK_S = 20.0  # from the start: blocks come to the first stages, and what is short is over
PAUSE_S = 0.15  # a stage works on one block and has the next one queued, and each lasts longer
NUM_BEFORE_STAGES = 2  # operators: the input, and decoding
# Ray Data 2.60 adds a replica as soon as two blocks lie with one actor, and takes it away when a pool is half idle in
# one step of its loop. Two blocks that arrive together are enough: stages behind a slow one load replicas for work that
# is over before these are ready. So demand must last.
GROW_AFTER_S = 4.0  # a replica takes about as long to load; what is over sooner, it would not have helped
SHRINK_AFTER_S = 20.0  # several times what loading it again would take
SUSTAINED_SHARE = 0.8  # of that time; a pool that is refilled shows a free slot now and then


class SchedulerThrottle(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Pause between two steps of the loop, each of which takes 5 ms of CPU, ten times a second."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Note the start."""
        self._pauses_from_s = time.monotonic() + QUICK_S

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Pause."""
        if time.monotonic() > self._pauses_from_s:
            time.sleep(PAUSE_S)


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
    """

    grow_after_s: float = GROW_AFTER_S
    shrink_after_s: float = SHRINK_AFTER_S
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


class SteadyActorAutoscaler(BacklogAwareActorAutoscaler):  # type: ignore[misc]  # Ray ships no types
    """Ray Data's own autoscaler, whose decisions take effect once they have lasted."""

    def __init__(self, executor: "StreamingExecutor") -> None:
        super().__init__(
            executor._topology, executor._resource_manager, config=executor._data_context.autoscaling_config
        )
        self._demands: dict[int, SustainedDemand] = {}

    def _derive_target_scaling_config(
        self, actor_pool: "AutoscalingActorPool", op: "PhysicalOperator", op_state: "OpState"
    ) -> ActorPoolScalingRequest:
        request = super()._derive_target_scaling_config(actor_pool, op, op_state)
        size = actor_pool.current_size()
        if request.force or size < max(1, actor_pool.min_size()) or size > actor_pool.max_size():
            return request
        demand = self._demands.setdefault(id(actor_pool), SustainedDemand())
        if actor_pool.num_pending_actors():
            demand.forget()
            return ActorPoolScalingRequest.no_op(reason="a replica is being loaded")
        direction = (request.delta > 0) - (request.delta < 0)
        if demand.lasts(direction, time.monotonic()):
            return request
        return ActorPoolScalingRequest.no_op(reason=f"not for long enough yet: {request.reason}")


class SteadyPools(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Callback that gives each dataset that is executed the steady autoscaler."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Replace the autoscaler; the executor's thread has not begun."""
        executor._actor_autoscaler = SteadyActorAutoscaler(executor)
