"""A cluster's node types; costs are measured once on each. Pure: works on what nodes report about themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from embedder.errors import ConfigError
from embedder.placement.placement import Node
from shards.planning.devices import MAX_TYPES

CPU, GPU = "CPU", "GPU"
ALIKE = 0.1  # under a quota, core shares that differ by less count as equal
RAY_PREFIX = "ray.io/"  # of labels that only Ray sets


@dataclass(frozen=True)
class NodeHardware:
    """What is known of a node before any measurement there.

    `node` is Ray's description, `cores` the CPU seconds that Ray's processes may spend there per second,
    `memory_bytes` main memory, `machine` the key of measurements on it
    (`embedder.planning.profile_machine.machine_key`), and `has_bf16` whether its cores have bfloat16 instructions.
    """

    node: Node
    cores: float
    memory_bytes: int
    machine: dict[str, object] = field(hash=False)
    has_bf16: bool = False

    @property
    def cpu_name(self) -> object:
        """Model name of its processor."""
        return self.machine.get("cpu")

    def is_like(self, other: "NodeHardware") -> bool:
        """Return whether one of Ray's CPUs computes about as fast on both nodes."""
        own, others = (each.cores / each.node.num_cpus for each in (self, other))
        return self.cpu_name == other.cpu_name and abs(own - others) <= ALIKE * max(own, others)


@dataclass(frozen=True)
class NodeType:
    """Nodes that compute equally fast; `name` is that of plans, `ray_type` Ray's name of GPUs or None."""

    name: str
    nodes: tuple[NodeHardware, ...]
    ray_type: str | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all its nodes."""
        return sum(facts.node.num_gpus for facts in self.nodes)

    @property
    def cores(self) -> float:
        """CPU seconds per second of all its nodes, as reported by Linux."""
        return sum(facts.cores for facts in self.nodes)

    @property
    def has_bf16(self) -> bool:
        """Whether the cores of all its nodes have bfloat16 instructions."""
        return all(facts.has_bf16 for facts in self.nodes)

    @property
    def node_memory_bytes(self) -> int:
        """Main memory of its smallest node."""
        return min(facts.memory_bytes for facts in self.nodes)


def node_types(nodes: Iterable[NodeHardware], type_label: str) -> tuple[NodeType, ...]:
    """Group nodes by label, else by type of GPU; ConfigError if other nodes differ, or for too many types."""
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
    """Raise `ConfigError` if nodes without GPUs differ in speed and one lacks the label that distinguishes them."""
    nodes = [facts for group in groups for facts in group]
    label = "type" if type_label.startswith(RAY_PREFIX) else type_label  # nobody but Ray may set Ray's labels
    for facts, other in product((facts for facts in nodes if not facts.node.device_type), nodes):
        if not facts.is_like(other) or other.node.device_type:
            raise ConfigError(
                f"cluster: {_describe_type(facts)} and {_describe_type(other)} are of two types, and the first lacks "
                f"label {label}: a plan could not name it; start each node without GPUs with `ray start "
                f"--labels={label}=TYPE`, and plan and run with --set cluster.type_label={label}"
            )


def _describe_type(facts: NodeHardware) -> str:
    return f"{facts.node.name} ({facts.cores:.3g} cores of {facts.cpu_name})"
