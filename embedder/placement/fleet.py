"""Fleet of a run: CPUs and GPUs by node, the run's share of them, and the replicas that use it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedder.config_toml.run_sections import ClusterConfig
from embedder.placement.placement import Node

TOLERANCE = 1e-6  # sums of fractions
# Of a replica on CPUs: threads share each matrix product, and with more of them the parts get too small. Not measured
# on machines with more than two cores.
MAX_THREADS = 8
PROCESS_BYTES = 1 << 30  # of a stage's process besides its weights: torch and its libraries take 0.8 GiB
MEMORY_SHARE = 0.5  # of a node, for stages; the rest is for decoding, blocks and the system


@dataclass(frozen=True)
class Available:
    """CPUs and GPUs that a run may take from a machine or cluster.

    `num_cpus` and `num_gpus` are totals; `nodes` may be unknown. With `can_grow`, nodes up to these totals come on
    request.
    """

    num_cpus: float
    num_gpus: float = 0.0
    nodes: tuple[Node, ...] = ()
    can_grow: bool = False

    @property
    def max_node_cpus(self) -> float:
        """CPUs of the largest node, the most that one process may use."""
        return min(self.num_cpus, max((node.num_cpus for node in self.nodes), default=self.num_cpus))

    @property
    def num_devices(self) -> int:
        """GPUs, counted whole."""
        return int(self.num_gpus + TOLERANCE)

    @property
    def object_store_bytes(self) -> int:
        """Ray's object store on all nodes; 0 if unknown."""
        return sum(node.object_store_bytes for node in self.nodes)


def share_of(available: Available, cluster: ClusterConfig, *, is_cluster: bool) -> Available:
    """Return the part of a machine or cluster that a run may take; each node gives the same part of its CPUs.

    With `is_cluster` more nodes may come; bounds above what there is then say how many.
    """
    num_cpus, num_gpus = available.num_cpus * cluster.share, available.num_gpus * cluster.share
    most_cpus = num_cpus if cluster.max_cpus is None else cluster.max_cpus
    most_gpus = num_gpus if cluster.max_gpus is None else float(cluster.max_gpus)
    grows = is_cluster and (most_cpus > available.num_cpus + TOLERANCE or most_gpus > available.num_gpus + TOLERANCE)
    if not grows:
        most_cpus, most_gpus = min(num_cpus, most_cpus), min(num_gpus, most_gpus)
    part = min(1.0, most_cpus / available.num_cpus) if available.num_cpus else 1.0
    nodes = tuple(replace(node, num_cpus=node.num_cpus * part) for node in available.nodes)
    return Available(most_cpus, math.floor(most_gpus + TOLERANCE), nodes, can_grow=grows)


def cpu_nodes(available: Available, num_stages: int, weight_bytes: int) -> list[str]:
    """Return a node for each replica of a stage, so that all CPUs are used: one on a node, several on a large one.

    A node with a replica of each stage keeps its blocks. A cluster that is yet to grow gets one replica. The nodes are
    Ray's ids, or empty strings if unknown.
    """
    nodes = [node for node in available.nodes if node.num_cpus]
    if available.can_grow or not nodes:
        nodes = [Node("", available.num_cpus)]
    numbers = [1 if available.can_grow else _replicas_on(node, num_stages, weight_bytes) for node in nodes]
    return [node.node_id for node, number in zip(nodes, numbers, strict=True) for _ in range(number)]


def _replicas_on(node: Node, num_stages: int, weight_bytes: int) -> int:
    wanted = math.ceil(node.num_cpus / (num_stages * MAX_THREADS) - TOLERANCE)
    if node.memory_bytes:
        wanted = min(wanted, int(node.memory_bytes * MEMORY_SHARE) // (weight_bytes + num_stages * PROCESS_BYTES))
    return max(1, wanted)


def threads_by_node(nodes: Sequence[Node], placed: Sequence[Sequence[int]]) -> dict[str, int]:
    """Share the CPUs of each node among its replicas; returns the threads of a replica, by Ray's node id."""
    numbers = [number for replicas in placed for number in replicas]
    return {
        nodes[number].node_id: max(1, int(nodes[number].num_cpus // numbers.count(number))) for number in set(numbers)
    }
