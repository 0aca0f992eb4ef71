"""Growth and shrinking of Ray Data's actor pools by demand that lasts, instead of the load of one moment.

Ray Data 2.60 adds a replica as soon as two blocks lie with one actor, and takes it away when a pool is half idle in one
step of its loop. Two blocks that arrive together are enough: stages behind a slow one load replicas for work that is
over before these are ready.
"""

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

GROW_AFTER_S = 4.0  # a replica takes about as long to load; what is over sooner, it would not have helped
SHRINK_AFTER_S = 20.0  # several times what loading it again would take
SUSTAINED_SHARE = 0.8  # of that time; a pool that is refilled shows a free slot now and then


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
