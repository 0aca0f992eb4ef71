"""State of each operator of a Ray Data run; only for display, never for decisions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from shards.compat import Private


@dataclass(frozen=True)
class Replica:
    """Started actor of a stage; `actor_id` survives a restart by Ray, during which `is_restarting` is true."""

    actor_id: str
    node_id: str
    is_restarting: bool = False


@dataclass(frozen=True)
class OperatorState:
    """State of one operator; seconds, calls, rows and bytes moved are sums since the start of the run.

    `name` is `decode`, `models 0` for further models, `stage 0`, ..., `write`. `queued_blocks` wait and no task has
    taken them; `num_tasks` includes those that wait in a replica; tasks have no `replicas`. `object_store_bytes`
    (estimated) are output blocks until the next operator has processed them. In `backpressure_s` no task could start:
    the next operator was full, or its CPUs in use. `moved_bytes` were fetched from another node; `spilled_bytes` had
    been moved to disk before a task processed them.
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


SENT = "sent_s"  # argument of a stage's call: the Unix time at which the driver sent it
SENDING = Private(
    "the times at which Ray's driver sends blocks to stages",
    (
        "ray.data._internal.execution.operators.map_operator:MapOperator.add_map_task_kwargs_fn",
        "ray.data._internal.execution.interfaces.task_context:TaskContext.get_current",
    ),
    "ray 2.52.1 to 2.60.0",
    "what a GPU waited for the object store counts as a wait for Ray's driver",
)


def sent_s() -> float | None:
    """Return the Unix time at which the driver sent the call that this thread is in; None if unknown."""
    if "ray.data" not in sys.modules or not SENDING.is_there():
        return None
    from ray.data._internal.execution.interfaces.task_context import TaskContext

    context = TaskContext.get_current()
    return None if context is None else context.kwargs.get(SENT)


# Ray creates the callback, and sends its settings to every process; this one stays here.
LISTENER: ContextVar[Callable[[Sample], None] | None] = ContextVar("listener", default=None)


@contextmanager
def sampled_to(listener: Callable[[Sample], None] | None) -> Iterator[None]:
    """Send samples of datasets executed in the block to a function, which Ray's scheduling loop calls."""
    token = LISTENER.set(listener)
    try:
        yield
    finally:
        LISTENER.reset(token)
