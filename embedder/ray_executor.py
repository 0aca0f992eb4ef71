"""The pipeline on Ray. Ray is imported when the executor is entered: its settings are read at the import."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from embedder.config import ComputeSettings
from embedder.executors.bottleneck import is_up
from embedder.executors.capacity import StartClaim, limit_to_share, wait_for_capacity
from embedder.executors.executor import Executor, OnSample
from embedder.executors.job import Job, stage_specs
from embedder.executors.ray_session import cluster, ray_session
from embedder.executors.signals import StopRequest
from embedder.placement.fleet import share_of

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample
    from embedder.placement.preflight import Access


class RayExecutor(Executor):
    """Ray Data: on a cluster, or on a Ray that is started here and ends with the block."""

    def __init__(
        self,
        compute: ComputeSettings,
        store_bytes: int,
        access: "Access | None" = None,
        before_exit: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Keep how to reach Ray.

        Args:
            compute: address, limits, share of the cluster.
            store_bytes: shared memory of a Ray that is started here.
            access: what the nodes of a cluster must reach; checked on each.
            before_exit: called with the reason where the process is ended and no error reaches the caller any more.
        """
        self._compute, self._claim, self._open = compute, StartClaim(), ExitStack()
        self._session = partial(
            ray_session,
            compute.ray_address,
            compute.no_progress_timeout_s,
            store_bytes,
            access=access,
            ship_package=compute.cluster.ship_package,
            before_exit=before_exit,
        )

    def __enter__(self) -> Self:
        """Attach to the cluster, or start Ray here."""
        ray = sys.modules.get("ray")
        is_own = self._compute.ray_address is None and not (ray is not None and ray.is_initialized())
        with ExitStack() as opened:
            opened.enter_context(self._session())
            if is_own:
                from embedder.compat.ray_helpers import without_helpers

                opened.enter_context(without_helpers())
            there = cluster(self._compute.cluster.type_label)
            self.on_cluster = self._compute.ray_address is not None or len(there.nodes) > 1
            self.available = share_of(there, self._compute.cluster, is_cluster=self.on_cluster)
            opened.enter_context(self._claim)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release what was claimed, and detach from Ray."""
        self._open.__exit__(kind, error, traceback)

    def place(self, job: Job) -> Job:
        """Wait for capacity on the cluster, and give each replica its node."""
        if not self.on_cluster:
            return job
        compute = self._compute
        allocation = wait_for_capacity(compute.cluster, compute.stage, job.allocation, self.available, self._claim)
        stages = stage_specs(compute, job.model, job.plan, allocation, job.num_items, job.settings)
        return replace(job, allocation=allocation, stages=stages)

    def run(self, listing: list[pa.Table], job: Job, stop: StopRequest, on_sample: OnSample) -> None:
        """Run a job over a listing; the claim on the cluster ends when all replicas are up."""
        from embedder.compat.operator_stats import sampled_to
        from embedder.pipeline import embed_on_ray

        def watch(sample: "Sample") -> None:
            on_sample(sample)
            if is_up(sample) and not any(state.num_starting for state in sample.operators):
                self._claim.release()

        with sampled_to(watch), limit_to_share(self._compute.cluster, self.available):
            embed_on_ray(listing, job, stop)
