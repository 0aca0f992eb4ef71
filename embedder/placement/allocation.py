"""Requests of all actors and tasks of a run, and their placement on the nodes of a cluster. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedder.config_toml.run_sections import StageConfig
from embedder.placement.fleet import threads_by_node
from embedder.placement.gpus import devices_needed
from embedder.placement.placement import Node, NodesOfReplicas, ReplicaRequest, fits, place

WRITE_CPUS = 0.1  # writing waits for the disk, not for the CPU


@dataclass(frozen=True)
class StageResources:
    """Resources that one replica of a stage reserves, and the bounds on the number of replicas."""

    min_replicas: int
    max_replicas: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    device: str
    """Torch device, cpu or cuda; Ray shows a replica only the GPU that it reserved."""
    device_types: frozenset[str] = frozenset()
    """Types of devices, one of which its nodes must have, as the plan says; empty accepts any."""
    weight_bytes: int = 0
    """Main memory that a replica needs at least; 0 if unknown."""
    node_ids: tuple[str, ...] = ()
    """On a cluster: Ray's node id of each replica that starts first; before placement, a preference."""
    node_threads: tuple[tuple[str, int], ...] = ()
    """On a cluster, if the configuration leaves threads out: threads of a replica, by the id of its node."""


@dataclass(frozen=True)
class ModelResources:
    """Resources that one actor of a group of further models reserves, and the number of actors.

    `name` is for messages; `node_ids` are Ray's, one for each actor, on a cluster where they take GPUs.
    """

    name: str
    replicas: int
    num_cpus: float
    num_gpus: float
    node_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """Requests of all actors and tasks of a run."""

    stages: tuple[StageResources, ...]
    decode_cpus: float
    num_writers: int = 1
    write_cpus: float = WRITE_CPUS
    models: tuple[ModelResources, ...] = ()
    """Groups of further models. Sums below leave them out: stages are allocated from what these leave."""

    @property
    def min_cpus(self) -> float:
        """CPUs without which the run would hang: those of all actors and of the largest task."""
        return sum(stage.min_replicas * stage.num_cpus for stage in self.stages) + self.task_cpus

    @property
    def task_cpus(self) -> float:
        """CPUs of the largest task."""
        return max(self.decode_cpus, self.write_cpus)

    @property
    def min_gpus(self) -> int:
        """GPUs without which an actor may find no device: each part lies on one device."""
        return devices_needed((stage.num_gpus, stage.min_replicas) for stage in self.stages)

    @property
    def max_gpus(self) -> int:
        """GPUs that all actors take when the stages have grown to their limits."""
        return devices_needed((stage.num_gpus, stage.max_replicas) for stage in self.stages)


def replica_requests(allocation: Allocation) -> list[ReplicaRequest]:
    """Return the replicas that start with the run, as `place` takes them: of the stages, then of further models.

    Those of further models without GPUs ask for nothing, as each node gives the same part of its CPUs to them
    (`embedder.placement.resources.beside_models`).
    """
    stages = [
        ReplicaRequest(
            f"stage {index}",
            stage.min_replicas,
            stage.num_cpus,
            stage.num_gpus,
            device_types=stage.device_types,
            memory_bytes=stage.weight_bytes,
        )
        for index, stage in enumerate(allocation.stages)
    ]
    return stages + [
        ReplicaRequest(each.name, each.replicas, each.num_cpus if each.num_gpus else 0.0, each.num_gpus)
        for each in allocation.models
    ]


def task_request(allocation: Allocation) -> ReplicaRequest:
    """Return the largest task, which has to find room next to the replicas."""
    return ReplicaRequest("a decode or write task", 1, allocation.task_cpus)


def place_replicas(allocation: Allocation, nodes: Sequence[Node]) -> NodesOfReplicas | None:
    """Place all `replica_requests`: with room for a task on every node, else on one; None if that is impossible."""
    requests, cpus = replica_requests(allocation), allocation.task_cpus
    with_room = [replace(node, num_cpus=node.num_cpus - min(cpus, node.num_cpus / 2)) for node in nodes]
    if any(node.num_cpus >= cpus for node in nodes):
        found = _as_wished(allocation, with_room) or place(with_room, requests, max_steps=0).nodes
        if found is not None:
            return found
    found = place(nodes, [*requests, task_request(allocation)]).nodes
    return found[:-1] if found else None


def _as_wished(allocation: Allocation, nodes: Sequence[Node]) -> NodesOfReplicas | None:
    """Give each stage's replicas the nodes that `node_ids` name, all on CPUs; None if one is missing or too small."""
    numbers = {node.node_id: number for number, node in enumerate(nodes)}
    wished = [[numbers.get(node_id, -1) for node_id in stage.node_ids] for stage in allocation.stages]
    has_all = all(len(each) == stage.min_replicas for each, stage in zip(wished, allocation.stages, strict=True))
    if not has_all or any(number < 0 for each in wished for number in each):
        return None
    requests = replica_requests(allocation)
    stages = requests[: len(wished)]
    counts = [tuple(each.count(number) for each in wished) for number in range(len(nodes))]
    if not all(fits(node, stages, count) for node, count in zip(nodes, counts, strict=True)):
        return None
    held = (sum(each.num_cpus * num for each, num in zip(stages, count, strict=True)) for count in counts)
    left = [replace(node, num_cpus=node.num_cpus - cpus) for node, cpus in zip(nodes, held, strict=True)]
    models = place(left, requests[len(wished) :]).nodes if allocation.models else ()
    return (*map(tuple, wished), *models) if models is not None else None


def pin_replicas(
    requests: Sequence[StageConfig], allocation: Allocation, nodes: Sequence[Node], found: NodesOfReplicas
) -> Allocation:
    """Record the node of each replica, and its threads there if the configuration leaves them out.

    `requests` has the configuration of each stage, or nothing. The CPUs of `nodes` are shared among the replicas'
    threads; `found` has the number of each replica's node, as `place_replicas` returns them.
    """
    of_stages, of_models = found[: len(allocation.stages)], found[len(allocation.stages) :]
    threads = tuple(sorted(threads_by_node(nodes, of_stages).items()))
    models = tuple(
        replace(model, node_ids=tuple(nodes[number].node_id for number in numbers)) if model.num_gpus else model
        for model, numbers in zip(allocation.models, of_models, strict=True)
    )
    return replace(
        allocation,
        models=models,
        stages=tuple(
            replace(
                stage,
                node_ids=tuple(nodes[number].node_id for number in numbers),
                node_threads=() if requests and requests[index].num_threads else threads,
            )
            for index, (stage, numbers) in enumerate(zip(allocation.stages, of_stages, strict=True))
        ),
    )
