"""Room on a cluster: a run finds nodes for its replicas, or waits until other jobs or new nodes make room."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from embedder.compat import ray_claim
from embedder.config_toml.run_sections import ClusterConfig, StageConfig
from embedder.errors import RunFailedError
from embedder.executors.ray_session import cluster, ray_nodes
from embedder.placement.allocation import Allocation, pin_replicas, place_replicas, replica_requests, task_request
from embedder.placement.fleet import Available, share_of
from embedder.placement.placement import Node, ReplicaRequest
from embedder.quantities import duration_text, plural

LOG = logging.getLogger(__name__)
LOOK_S = 1.0  # Ray's table of free resources is this old
SAY_S = 30.0


class StartClaim:
    """Claim on a cluster by a run that starts, released once its replicas hold what they need, or at the end.

    Other runs that start meanwhile wait, as both would find the same room.
    """

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> "StartClaim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> bool:
        """Take the claim unless this run has it; return whether this run has it now."""
        self.is_held = ray_claim.claim()
        return self.is_held

    def release(self) -> None:
        """Release it if held."""
        if self.is_held:
            self.is_held = False
            ray_claim.release()


def wait_for_capacity(
    settings: ClusterConfig,
    requests: Sequence[StageConfig],
    allocation: Allocation,
    available: Available,
    claim: StartClaim,
) -> Allocation:
    """Wait until all replicas that start with the run have nodes, and record these; the claim is then held.

    `requests` has the configuration of each stage, or nothing; `available` is the run's share of the cluster. Raises
    `RunFailedError` if there is no room after `cluster.wait_s`.
    """
    wait, asked = _Wait(settings.wait_s, allocation), False
    try:
        while True:
            nodes = _free_nodes(settings)
            found = place_replicas(allocation, nodes)
            if not found:
                claim.release()
            elif claim.is_held and claim.take():
                owned = _owned_nodes(settings, nodes)
                return pin_replicas(requests, allocation, owned, found) if len(nodes) > 1 else allocation
            elif claim.take():
                time.sleep(LOOK_S)  # after that, Ray's table includes what the last started run holds
                continue
            if available.can_grow and not asked:
                asked = True
                _request_nodes([*replica_requests(allocation), task_request(allocation)], settings.type_label)
            wait.go_on(nodes, another_starts=bool(found))
    finally:
        if asked:
            _request_nodes([], settings.type_label)  # from now on Ray Data asks for what it needs


class _Wait:
    def __init__(self, wait_s: float, allocation: Allocation) -> None:
        self._wait_s, self._needs = wait_s, _needs(allocation)
        self._started_s = self._next_say_s = time.monotonic()

    def go_on(self, nodes: list[Node], *, another_starts: bool) -> None:
        now_s = time.monotonic()
        waited_s = now_s - self._started_s
        if waited_s >= self._wait_s:
            raise RunFailedError(
                f"cluster: no room for {self._needs} after cluster.wait_s = {self._wait_s:g}; "
                f"{_describe_nodes(nodes)}; end what holds the rest, lower replicas or num_gpus, or raise "
                "cluster.wait_s"
            )
        if now_s >= self._next_say_s:
            self._next_say_s = now_s + SAY_S
            waited = f", {duration_text(round(waited_s))}" if waited_s >= 1 else ""
            reason = "another run starts" if another_starts else _describe_nodes(nodes)
            LOG.warning(f"waiting for {self._needs}{waited}; {reason}")
        time.sleep(LOOK_S)


def _free_nodes(settings: ClusterConfig) -> list[Node]:
    """Return the nodes with what is free now, at most the run's share of their CPUs."""
    share = {node.node_id: node.num_cpus for node in _share(settings).nodes}
    return [
        replace(node, num_cpus=min(node.num_cpus, share.get(node.node_id, node.num_cpus)))
        for node in ray_nodes(settings.type_label, free_now=True)
    ]


def _owned_nodes(settings: ClusterConfig, nodes: list[Node]) -> list[Node]:
    """Return the nodes with the run's share of their CPUs, which its threads use in the long run."""
    share = {node.node_id: node for node in _share(settings).nodes}
    return [share.get(node.node_id, node) for node in nodes]


def _share(settings: ClusterConfig) -> Available:
    return share_of(cluster(settings.type_label), settings, is_cluster=True)


def _needs(allocation: Allocation) -> str:
    """Describe the replicas in a few words, such as `3 x L4 and 2.5 CPUs`."""
    gpus: dict[str, float] = {}
    for request in replica_requests(allocation):
        if request.num_gpus:
            name = request.type_names or "GPU"
            gpus[name] = gpus.get(name, 0.0) + request.count * request.num_gpus
    return " and ".join([*(f"{number:g} x {name}" for name, number in gpus.items()), f"{allocation.min_cpus:g} CPUs"])


def _describe_nodes(nodes: list[Node]) -> str:
    if not nodes:
        return "the cluster has no node with CPUs yet"
    num_gpus = sum(node.num_gpus for node in nodes)
    num_cpus = sum(node.num_cpus for node in nodes)
    gpus = f" and {plural(num_gpus, 'GPU')}" if num_gpus else ""
    return f"free: {num_cpus:g} {'CPU' if num_cpus == 1 else 'CPUs'}{gpus} on {plural(len(nodes), 'node')}"


def _request_nodes(requests: list[ReplicaRequest], type_label: str) -> None:
    """Ask Ray's autoscaler for nodes with room for all of these; an empty list cancels the last request."""
    from ray.autoscaler.sdk import request_resources

    bundles: list[dict[str, float]] = []
    selectors: list[dict[str, str]] = []
    for request in requests:
        bundle = {"CPU": request.num_cpus} | ({"GPU": request.num_gpus} if request.num_gpus else {})
        bundles += [bundle] * request.count
        selectors += [type_selector(request.device_types, type_label)] * request.count
    request_resources(bundles=bundles, **({"bundle_label_selectors": selectors} if any(selectors) else {}))


def type_selector(device_types: frozenset[str], type_label: str) -> dict[str, str]:
    """Return Ray's label selector for nodes with devices of one of these types; empty if any will do."""
    return {type_label: f"in({','.join(sorted(device_types))})"} if device_types else {}


@contextmanager
def limit_to_share(settings: ClusterConfig, available: Available) -> Iterator[None]:
    """Limit Ray Data to the run's share while the block lasts, if the configuration says so."""
    if settings.share == 1 and settings.max_cpus is None and settings.max_gpus is None:
        yield
        return
    from ray.data import DataContext, ExecutionResources

    options = DataContext.get_current().execution_options
    before: Any = options.resource_limits
    options.resource_limits = ExecutionResources(cpu=available.num_cpus, gpu=available.num_gpus)
    try:
        yield
    finally:
        options.resource_limits = before
