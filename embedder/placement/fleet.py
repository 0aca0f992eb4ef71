"""Fleet of a run: CPUs and GPUs by node, its share of them, and the replicas that use it. Pure: numbers in and out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedder.config import ClusterConfig
from embedder.placement.placement import Node

TOLERANCE = 1e-6  # sums of fractions
# Of a replica on CPUs: each product of matrices is shared among threads, and the parts get too small. Not measured on
# machines of more than two cores.
MAX_THREADS = 8
PROCESS_BYTES = 1 << 30  # of a stage's process beside its weights: torch and its libraries take 0.8 GiB
MEMORY_SHARE = 0.5  # of a node, for stages; the rest is for decoding, blocks and the system


@dataclass(frozen=True)
class Available:
    """CPUs and GPUs that a run may take of a machine or cluster.

    Attributes:
        num_cpus: CPUs together.
        num_gpus: GPUs together.
        nodes: nodes, where they are known.
        can_grow: whether nodes up to these sums come when they are asked for.
    """

    num_cpus: float
    num_gpus: float = 0.0
    nodes: tuple[Node, ...] = ()
    can_grow: bool = False

    @property
    def max_node_cpus(self) -> float:
        """CPUs of the largest node, which are the most that one process may use."""
        return max((node.num_cpus for node in self.nodes), default=self.num_cpus)

    @property
    def num_devices(self) -> int:
        """GPUs, counted whole."""
        return int(self.num_gpus + TOLERANCE)


def share_of(available: Available, cluster: ClusterConfig, *, is_cluster: bool) -> Available:
    """Return the part of a machine or cluster that a run may take; each node gives the same part of its CPUs.

    Args:
        available: all that there is.
        cluster: share and bounds.
        is_cluster: whether more nodes may come; bounds above what there is then say how many.
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
    """Return the node of each replica of a stage, so that all CPUs are used: one on a node, several on a large one.

    A node with a replica of each stage keeps its blocks. On a cluster that is yet to grow, there is one replica.

    Returns:
        Ray's ids of nodes, or empty strings where nodes are not known.
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
    """Share the CPUs of each node among the replicas that lie there.

    Returns:
        Threads of a replica, by Ray's id of its node.
    """
    numbers = [number for replicas in placed for number in replicas]
    return {
        nodes[number].node_id: max(1, int(nodes[number].num_cpus // numbers.count(number))) for number in set(numbers)
    }
