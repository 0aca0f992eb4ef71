"""The end of a Ray Data run that is asked to stop or fails: what is waited for, and that its stages give way.

Without it, Ray would start a task for each block that is not decoded yet, and wait for stages that still load their
weights, before the last rows that are finished came together in a part file. It would also leave a stage that hangs
with the CPUs and the GPU that it reserved until its call is over.

Needed for correctness, so `fast_start = false` leaves it on. Outside of the tested versions a stopped run waits for
Ray: its tasks see the request to stop and hand on no rows, so the run ends once they have seen every block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from ray.data.exceptions import ExecutionTimeoutError

from shards.compat import Tested, is_tested, saves_time

TESTED: Tested = (("ray", "==2.60.*"),)


class Stop(Protocol):
    """Request to stop, as the scheduling loop sees it."""

    @property
    def asked(self) -> bool:
        """Whether the run is to stop."""

    @property
    def is_overdue(self) -> bool:
        """Whether nothing is waited for any more."""


# Ray makes the callback itself, and sends its settings to every process; this one stays here.
STOP: ContextVar[Stop | None] = ContextVar("stop", default=None)


class DrainedError(ExecutionTimeoutError):  # type: ignore[misc]  # Ray prints the trace of any other as a bug of its own
    """The stages are empty, or were not waited for.

    Attributes:
        finished: references to blocks of rows that are finished and that no write task has.
    """

    def __init__(self, finished: list[Any]) -> None:
        super().__init__("the run was asked to stop")
        self.finished = finished


@contextmanager
def draining(stop: Stop | None) -> Iterator[None]:
    """Let a dataset that is executed in the block end by `DrainedError` when the stop is requested."""
    token = STOP.set(stop)
    try:
        yield
    finally:
        STOP.reset(token)


def execution_callbacks() -> list[type]:
    """Return the classes of callbacks that Ray Data is to make for each dataset that it executes."""
    callbacks: list[type] = []
    if saves_time("Ray Data's scheduling at the pace of its calls, and steady actor pools", TESTED):
        from embedder.compat.ray_callbacks import LoopPace, SteadyPools

        callbacks += [LoopPace, SteadyPools]
    if is_tested("the early end of a Ray Data run", TESTED, "a run that is stopped or fails waits for Ray"):
        from embedder.compat.ray_callbacks import DrainOnStop, EndStagesOnFailure

        callbacks += [DrainOnStop, EndStagesOnFailure]
    if is_tested("reading of operators' states", TESTED, "a run shows no operators and no bottleneck"):
        from embedder.compat.operator_stats import OperatorStats

        callbacks.append(OperatorStats)
    return callbacks
