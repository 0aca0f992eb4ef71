"""Limit on work that kills its process, by a count of the deaths of the same work.

Ray begins a task again without end when its process or its node is lost. That is right for a node: what was in flight
on it is done elsewhere. It is wrong for work that kills whatever process takes it. So a task that is begun again
leaves a note of its place, which it deletes when it ends in any way but the death of its process. A note whose node is
alive is a death; one whose node is gone is none. A first attempt notes nothing and costs microseconds, so its death
isn't counted.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from embedder.compat import ray_attempts
from embedder.errors import RunFailedError

MAX_DEATHS = 3  # of the same work when it was tried again
MAX_CAUSE_CHARACTERS = 200


class DeadlyWorkError(RunFailedError):
    """Work that killed its process each time that it was tried."""

    is_resumable = True


@dataclass(frozen=True)
class Attempt:
    """Place of one attempt of a task: ids that Ray gives its node and its process."""

    node: str
    worker: str

    @classmethod
    def parse(cls, text: str) -> "Attempt":
        """Read a note."""
        node, _, worker = text.partition(" ")
        return cls(node, worker)

    def __str__(self) -> str:
        return f"{self.node} {self.worker}"


def deaths(attempts: Iterable[Attempt], living_nodes: Collection[str], own_worker: str) -> list[Attempt]:
    """Select the attempts whose process is gone while its node is not. Pure.

    Args:
        attempts: noted and not ended, in their order.
        living_nodes: ids.
        own_worker: id of this process; it may work on the same task again after its node was out of reach.
    """
    return [each for each in attempts if each.node in living_nodes and each.worker != own_worker]


@contextmanager
def limit_deaths(work: Callable[[], str], cure: str, *, key: str | None = None) -> Iterator[None]:
    """Refuse the block's work if it has killed `MAX_DEATHS` processes when it was tried again.

    Args:
        work: description of the work, for the message.
        cure: what the user can do.
        key: tells the work apart in a call of an actor whose process is not its first one; Ray Data makes the calls in
            a thread, which doesn't know the task. None: the task, or the actor's start, that runs in this thread.

    Raises:
        DeadlyWorkError: it has.
    """
    if key is None and ray_attempts.attempt_number() == 0:
        yield
        return
    own = Attempt(*ray_attempts.own_place())
    prefix = f"{ray_attempts.job_id()}/deaths/{key or ray_attempts.task_id()}/"
    _refuse_deadly(prefix, own, work, cure)
    note = f"{prefix}{time.time_ns():020d}"
    ray_attempts.write_note(note, str(own))
    try:
        yield
    finally:
        ray_attempts.delete_note(note)


def _refuse_deadly(prefix: str, own: Attempt, work: Callable[[], str], cure: str) -> None:
    notes = sorted(ray_attempts.read_notes(prefix).items())
    if len(notes) < MAX_DEATHS:
        return
    nodes = ray_attempts.living_nodes()
    died = deaths([Attempt.parse(note) for _, note in notes], nodes, own.worker)
    if len(died) < MAX_DEATHS:
        return
    for key, _ in notes:
        ray_attempts.delete_note(key)
    last = died[-1]
    cause = ray_attempts.ends_of([last.worker]).get(last.worker, "Ray doesn't know why")
    raise DeadlyWorkError(
        f"{work()} killed its process each time that it was tried again, {len(died)} times, last on node "
        f"{nodes[last.node]} ({' '.join(cause.split())[:MAX_CAUSE_CHARACTERS]}); {cure}"
    )
