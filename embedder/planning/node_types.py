"""Types of a cluster's nodes, on each of which costs are measured once. Pure: what nodes say of themselves in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from embedder.errors import ConfigError
from embedder.placement.placement import Node
from shards.planning.devices import MAX_TYPES

CPU, GPU = "CPU", "GPU"
ALIKE = 0.1  # cores that a quota holds to a part count as equal where the parts differ by less
RAY_PREFIX = "ray.io/"  # of labels that Ray alone gives


@dataclass(frozen=True)
class NodeHardware:
    """What is known of one node before anything is measured there.

    Attributes:
        node: as Ray describes it.
        cores: CPU seconds that Ray's processes may spend there in a second.
        memory_bytes: main memory.
        machine: key of measurements on it (`embedder.planning.profile.machine_key`).
        has_bf16: whether its cores have instructions for bfloat16.
    """

    node: Node
    cores: float
    memory_bytes: int
    machine: dict[str, object] = field(hash=False)
    has_bf16: bool = False

    @property
    def cpu_name(self) -> object:
        """Model of its processor."""
        return self.machine.get("cpu")

    def is_like(self, other: "NodeHardware") -> bool:
        """Say whether one CPU of Ray's computes about as fast on both nodes."""
        own, others = (each.cores / each.node.num_cpus for each in (self, other))
        return self.cpu_name == other.cpu_name and abs(own - others) <= ALIKE * max(own, others)


@dataclass(frozen=True)
class NodeType:
    """Nodes that compute alike.

    Attributes:
        name: as plans name it, see `shards.plan.PlannedStage`.
        nodes: at least one.
        ray_type: Ray's name of their GPUs; none of CPUs, or where Ray knows none.
    """

    name: str
    nodes: tuple[NodeHardware, ...]
    ray_type: str | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all its nodes."""
        return sum(facts.node.num_gpus for facts in self.nodes)

    @property
    def cores(self) -> float:
        """CPU seconds in a second of all its nodes, as far as Linux says so."""
        return sum(facts.cores for facts in self.nodes)

    @property
    def has_bf16(self) -> bool:
        """Whether the cores of all its nodes have instructions for bfloat16."""
        return all(facts.has_bf16 for facts in self.nodes)

    @property
    def node_memory_bytes(self) -> int:
        """Main memory of its smallest node."""
        return min(facts.memory_bytes for facts in self.nodes)


def node_types(nodes: Iterable[NodeHardware], type_label: str) -> tuple[NodeType, ...]:
    """Sort nodes by type: by label, else by type of GPU; nodes without either have to be alike.

    Raises:
        ConfigError: nodes without GPUs differ and lack the label, so no plan could name them; or there are too many
            types.
    """
    found: dict[tuple[str, bool], list[NodeHardware]] = {}
    for facts in nodes:
        name = facts.node.device_type or (GPU if facts.node.num_gpus else CPU)
        found.setdefault((name, facts.node.num_gpus > 0), []).append(facts)
    _check_cpus([each for (_, has_gpus), each in found.items() if not has_gpus], type_label)
    names = [name for name, _ in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"cluster: nodes with GPUs and nodes without are both {', '.join(sorted(twice))} by label {type_label}; "
            "give them labels of different values"
        )
    if len(found) > MAX_TYPES:
        raise ConfigError(
            f"cluster: {len(found)} types of nodes ({', '.join(sorted(names))}), and a plan places stages on up to "
            f"{MAX_TYPES}; give like nodes one value of a label, and name it with --set cluster.type_label=NAME"
        )
    return tuple(NodeType(name, tuple(each), each[0].node.gpu_type) for (name, _), each in sorted(found.items()))


def _check_cpus(groups: Sequence[Sequence[NodeHardware]], type_label: str) -> None:
    """Refuse nodes without GPUs that no plan could tell apart.

    Raises:
        ConfigError: they compute at different speeds, and one at least lacks the label.
    """
    nodes = [facts for group in groups for facts in group]
    label = "type" if type_label.startswith(RAY_PREFIX) else type_label  # Ray lets nobody give its own
    for facts, other in product((facts for facts in nodes if not facts.node.device_type), nodes):
        if not facts.is_like(other) or other.node.device_type:
            raise ConfigError(
                f"cluster: {_describe_type(facts)} and {_describe_type(other)} are of two types, and the first lacks "
                f"label {label}: a plan could not name it; start each node without GPUs with `ray start "
                f"--labels={label}=TYPE`, and plan and run with --set cluster.type_label={label}"
            )


def _describe_type(facts: NodeHardware) -> str:
    return f"{facts.node.name} ({facts.cores:.3g} cores of {facts.cpu_name})"
