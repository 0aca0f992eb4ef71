"""State of each operator of a Ray Data run: for what it shows, and for nothing that it decides."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Replica:
    """Actor of a stage that has begun.

    Attributes:
        actor_id: stays the same when Ray starts it again.
        node_id: node of its process.
        is_restarting: whether its process is lost and the next one doesn't compute yet.
    """

    actor_id: str
    node_id: str
    is_restarting: bool = False


@dataclass(frozen=True)
class OperatorState:
    """State of one operator; seconds, calls, rows and bytes moved are sums since the start of the run.

    Attributes:
        name: `decode`, `models 0` for further models, `stage 0`, ..., `write`.
        queued_blocks: blocks that wait before it, none of which a task has taken.
        num_tasks: tasks under way, those included that wait in a replica.
        replicas: actors of a stage; tasks have none.
        num_starting: actors that load.
        num_cpus: CPUs that it holds; GPUs likewise.
        object_store_bytes: of blocks that it makes and has made, until the next operator is done with them; estimated.
        num_calls: finished tasks.
        num_rows: rows that came out.
        work_s: seconds inside the calls.
        backpressure_s: seconds in which it could not begin a task, as what follows is full or its CPUs are in use.
        moved_bytes: bytes of blocks that a task took on another node than they lay on.
        spilled_bytes: bytes of blocks that Ray had moved to disk before a task was done with them.
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


# Ray makes the callback itself, and sends its settings to every process; this one stays here.
LISTENER: ContextVar[Callable[[Sample], None] | None] = ContextVar("listener", default=None)


@contextmanager
def sampled_to(listener: Callable[[Sample], None] | None) -> Iterator[None]:
    """Send samples of a dataset that is executed in the block to a function, which Ray's scheduling loop calls."""
    token = LISTENER.set(listener)
    try:
        yield
    finally:
        LISTENER.reset(token)
