"""Ray Data's scheduling loop, slowed down once a run is under way."""

import time
from typing import TYPE_CHECKING

from ray.data._internal.execution.execution_callback import ExecutionCallback

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

QUICK_S = 20.0  # from the start: blocks come to the first stages, and what is short is over
PAUSE_S = 0.15  # a stage has a block in hand and one before its door, and each lasts longer


class SchedulerThrottle(ExecutionCallback):  # type: ignore[misc]  # Ray tells no types
    """Waits a little between two steps of the loop, each of which takes 5 ms of CPU, ten times a second."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Note the start."""
        self._calm_from_s = time.monotonic() + QUICK_S

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Wait."""
        if time.monotonic() > self._calm_from_s:
            time.sleep(PAUSE_S)
