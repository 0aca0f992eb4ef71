"""What runs the pipeline: this process, or Ray. One class for both, so that a run knows neither."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from embedder.executors.job import Job
from embedder.executors.signals import StopRequest
from embedder.placement.fleet import Available

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample

OnSample = Callable[["Sample"], None]


class Executor(ABC):
    """Executor of one run, ready within a `with` block, where `available`, the CPUs and GPUs it may take, is known."""

    available: Available
    on_cluster = False  # whether nodes may come and go

    @abstractmethod
    def __enter__(self) -> Self:
        """Get ready: attach to a cluster, or start what runs here."""

    def __exit__(  # noqa: B027 - this process has nothing to end
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what was started."""

    def place(self, job: Job) -> Job:
        """Wait for capacity, and give each replica its node, where there are several."""
        return job

    @abstractmethod
    def run(self, listing: list[pa.Table], job: Job, stop: StopRequest, on_sample: OnSample) -> None:
        """Run a job over a listing; signals and the end of the run's time set `stop`, which each step asks.

        `on_sample` gets a sample of the operators from time to time, on Ray. Raises `EmbedderError` if a step failed in
        a way that is no item's fault.
        """
