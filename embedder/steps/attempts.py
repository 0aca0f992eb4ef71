"""Limits work that kills its process, by counting the deaths during the same work.

Ray restarts a task forever when its process or its node is lost. That is right for a lost node, but wrong for work that
kills every process that runs it. So a restarted task leaves a note of its place, which it deletes however it ends,
unless its process dies. A remaining note counts as a death if its node is alive, and as nothing if the node is gone. A
first attempt writes no note and costs microseconds, so its death isn't counted.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from embedder.compat import ray_attempts
from embedder.errors import RunFailedError

MAX_DEATHS = 3  # during retries of the same work
MAX_CAUSE_CHARACTERS = 200


class DeadlyWorkError(RunFailedError):
    """Work that killed its process on every attempt."""

    is_resumable = True


@dataclass(frozen=True)
class Attempt:
    """Place of one attempt of a task: Ray's ids of its node and its process."""

    node: str
    worker: str

    @classmethod
    def parse(cls, text: str) -> "Attempt":
        """Parse a note."""
        node, _, worker = text.partition(" ")
        return cls(node, worker)

    def __str__(self) -> str:
        return f"{self.node} {self.worker}"


def deaths(attempts: Iterable[Attempt], living_nodes: Collection[str], own_worker: str) -> list[Attempt]:
    """Select the attempts whose process is gone while its node is alive. Pure.

    `attempts` were noted and haven't ended, in their order. `own_worker` is the id of this process, which may get the
    same task again after its node was unreachable.
    """
    return [each for each in attempts if each.node in living_nodes and each.worker != own_worker]


@contextmanager
def limit_deaths(work: Callable[[], str], cure: str, *, key: str | None = None) -> Iterator[None]:
    """Refuse the block's work if it has killed `MAX_DEATHS` processes in earlier retries, with a DeadlyWorkError.

    `work` and `cure` (what the user can do) are for the message. `key` identifies the work in a call of a restarted
    actor, as Ray Data makes the calls in a thread that doesn't know the task. None means this thread's task or actor
    start.
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
