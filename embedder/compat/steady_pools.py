"""Ray Data's autoscaler of actor pools, whose decisions only take effect if they last."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ray.data._internal.actor_autoscaler import BacklogAwareActorAutoscaler
from ray.data._internal.actor_autoscaler.autoscaling_actor_pool import ActorPoolScalingRequest
from ray.data._internal.execution.execution_callback import ExecutionCallback

if TYPE_CHECKING:
    from ray.data._internal.actor_autoscaler import AutoscalingActorPool
    from ray.data._internal.execution.interfaces import PhysicalOperator
    from ray.data._internal.execution.streaming_executor import StreamingExecutor
    from ray.data._internal.execution.streaming_executor_state import OpState

# Ray Data 2.60 adds a replica as soon as two blocks wait at one actor, and removes it when a pool is half idle in
# one step of its loop. Two blocks that arrive together are enough: stages after a slow one load replicas for work that
# is over before these are ready. So demand must last.
GROW_AFTER_S = 4.0  # a replica takes about as long to load; it wouldn't have helped with a shorter peak
SHRINK_AFTER_S = 20.0  # at least; several times what loading it again would take
STAYS_FOR_LOADS = 3.0  # times the measured seconds of loading
SUSTAINED_SHARE = 0.8  # of that time; a refilling pool has a free slot now and then


@dataclass
class SustainedDemand:
    """Recent directions (1 grow, -1 shrink, 0 stay) that one pool's load asked for, and whether one of them lasts.

    Demand must last `grow_after_s` or `shrink_after_s` seconds; `load_s` is the last load time of replicas, 0 before
    any.
    """

    grow_after_s: float = GROW_AFTER_S
    shrink_after_s: float = SHRINK_AFTER_S
    load_s: float = 0.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def lasts(self, direction: int, now_s: float) -> bool:
        """Record a direction (1, 0 or -1) at a monotonic time; it counts until the next call.

        Returns whether a direction other than 0 has lasted; if so, the history starts again.
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
        """Forget the history, as the pool has changed."""
        self._seen.clear()

    def note_load(self, load_s: float) -> None:
        """Record a replica's load time: the longer it took, the longer a replica may stay without work."""
        self.forget()
        self.load_s = load_s
        self.shrink_after_s = max(self.shrink_after_s, STAYS_FOR_LOADS * load_s)


class SteadyActorAutoscaler(BacklogAwareActorAutoscaler):  # type: ignore[misc]  # Ray ships no types
    """Ray Data's own autoscaler, whose decisions only take effect if they last."""

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
    """Return the seconds until the computing replicas have processed all blocks of the run; infinite if unknown."""
    num_done, num_blocks = op.metrics.num_tasks_finished, op.input_dependencies[0].num_outputs_total()
    if not num_done or num_blocks is None:
        return math.inf
    call_s = op.metrics.block_generation_time / num_done
    return float((num_blocks - num_done) * call_s / max(1, pool.num_running_actors()))


class SteadyPools(ExecutionCallback):  # type: ignore[misc]  # Ray ships no types
    """Callback that gives each executed dataset the steady autoscaler."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Replace the autoscaler before the executor's thread starts."""
        executor._actor_autoscaler = SteadyActorAutoscaler(executor)
