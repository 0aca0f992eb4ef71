"""State of each operator of a Ray Data run; only for display, never for decisions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Replica:
    """Actor of a stage that has started.

    `actor_id` stays the same when Ray restarts it; `is_restarting` is true from the loss of its process until the next
    one computes.
    """

    actor_id: str
    node_id: str
    is_restarting: bool = False


@dataclass(frozen=True)
class OperatorState:
    """State of one operator; seconds, calls, rows and bytes moved are sums since the start of the run.

    Attributes:
        name: `decode`, `models 0` for further models, `stage 0`, ..., `write`.
        queued_blocks: blocks waiting before it that no task has taken.
        num_tasks: running tasks, including those that wait in a replica.
        replicas: actors of a stage; tasks have none.
        num_starting: actors that load.
        num_cpus: CPUs that it holds; GPUs likewise.
        object_store_bytes: of its output blocks, until the next operator has processed them; estimated.
        num_calls: finished tasks.
        num_rows: rows output.
        work_s: seconds inside the calls.
        backpressure_s: seconds in which it could not start a task: the next operator was full, or its CPUs in use.
        moved_bytes: bytes of blocks that a task fetched from another node.
        spilled_bytes: bytes of blocks that Ray had moved to disk before a task had processed them.
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
