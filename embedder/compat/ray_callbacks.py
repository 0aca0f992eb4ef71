"""Callbacks in Ray Data's scheduling loop, which read its internals; `embedder.compat.draining` selects them.

Source: ray 2.60 `data/_internal/execution/streaming_executor.py`, `operators/actor_pool_map_operator.py`.
"""

import time
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from embedder.compat.draining import STOP, DrainedError

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

QUICK_S = 20.0  # from the start: blocks come to the first stages, and what is short is over
PAUSE_S = 0.15  # a stage works on one block and has the next one queued, and each lasts longer
NUM_BEFORE_STAGES = 2  # operators: the input, and decoding


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
