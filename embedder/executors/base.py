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
    """Executor of one run, ready within a `with` block.

    Attributes:
        available: CPUs and GPUs that the run may take; known within the block.
        on_cluster: whether nodes may come and go.
    """

    available: Available
    on_cluster = False

    @abstractmethod
    def __enter__(self) -> Self:
        """Get ready: attach to a cluster, or start what runs here."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what was started."""
        return

    def place(self, job: Job) -> Job:
        """Wait for capacity, and give each replica its node, where there are several."""
        return job

    @abstractmethod
    def run(self, listing: list[pa.Table], job: Job, stop: StopRequest, on_sample: OnSample) -> None:
        """Run a job over a listing.

        Args:
            listing: items to embed.
            job: what each step gets.
            stop: asked by each step; set by signals and by the time that a run may take.
            on_sample: given a sample of the operators from time to time, on Ray.

        Raises:
            EmbedderError: a step failed in a way that is no item's fault.
        """
