"""The end of a Ray Data run that is asked to stop or fails: what is waited for, and that its stages give way.

Left to itself, Ray would start a task for each block that is not decoded yet, and wait for stages that still load their
weights, before the last rows that are finished came together in a part file. It would also leave a stage that hangs
with the CPUs and the GPU that it reserved until what it does is over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data.exceptions import ExecutionTimeoutError

from embedder.engine.signals import StopRequest

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

NUM_BEFORE_STAGES = 2  # operators: the input, and decoding

# Ray makes the callback itself, and sends its settings to every process; this one stays here.
_STOP: ContextVar[StopRequest | None] = ContextVar("stop", default=None)


class DrainedError(ExecutionTimeoutError):  # type: ignore[misc]  # Ray prints the trace of any other as a bug of its own
    """The stages are empty, or were not waited for.

    Attributes:
        finished: references to blocks of rows that are finished and that no write task has.
    """

    def __init__(self, finished: list[Any]) -> None:
        super().__init__("the run was asked to stop")
        self.finished = finished


@contextmanager
def draining(stop: StopRequest | None) -> Iterator[None]:
    """Let a dataset that is executed in the block end as the stop says."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


class DrainOnStop(ExecutionCallback):  # type: ignore[misc]  # Ray tells no types
    """Ends the execution with `DrainedError` once it is asked to stop and nothing is in flight."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Find out whose stop it is; this is called by the thread that wants the dataset, the others are not."""
        self._stop = _STOP.get()

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Look whether it is time."""
        stop = self._stop
        if stop is None or not stop.asked:
            return
        *_, (write, state) = executor._topology.items()
        stages = list(executor._topology)[NUM_BEFORE_STAGES:-1]
        if stop.is_overdue or not (_are_busy(stages, write) or write.num_active_tasks()):
            raise DrainedError(_blocks_before(write, state))


class EndStagesOnFailure(ExecutionCallback):  # type: ignore[misc]  # Ray tells no types
    """Ends the processes of the stages at once where an execution fails or is stopped, whatever they do."""

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        """Take the place of the executor's shutdown; Ray calls no callback between the failure and that."""
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
    """Whether rows are inside; what waits for the first stage is not."""
    first = stages[0]
    num_begun, num_through = first.metrics.rows_task_outputs_generated, write.metrics.num_row_inputs_received
    return bool(first.num_active_tasks() or num_begun > num_through)


def _blocks_before(write: Any, state: Any) -> list[Any]:
    """The blocks that wait for a write task, because they are too few for a part file or for want of a task."""
    bundler, (queue,) = write._block_ref_bundler, state.input_queues
    bundles = [*bundler._ready_bundles, *bundler._pending_bundles]
    while queue.has_next():
        bundles.append(queue.pop())
    return [ref for bundle in bundles for ref in bundle.block_refs]
