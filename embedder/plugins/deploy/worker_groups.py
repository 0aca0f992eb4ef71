"""Worker groups of a plan: for each of its device types, the number and size of pods or nodes. Pure."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embedder.config_toml.deploy_section import GIB, DeployConfig, GroupConfig
from embedder.errors import ConfigError
from embedder.placement.fleet import MEMORY_SHARE
from embedder.placement.gpus import devices_needed
from embedder.quantities import plural
from shards.plan import PlannedStage, ShardPlan
from shards.planning.devices import GB, RAY_NAMES

CPU = "CPU"  # the planner's name of cores if there is only one kind
CPUS_PER_GPU = 8  # for decoding and writing next to the stages
MAX_CPUS_PER_POD = 16  # of a group of cores, unless one replica needs more
BYTES_PER_CPU = 4 * GIB
RAY_SHARE_OF_SHM = 0.9  # the rest is for pixels from the decoding children
MIN_SHARE_OF_MEMORY = 2  # a pod has at least this many times its shared memory


@dataclass(frozen=True)
class DeployGroup:
    """Nodes of one device type.

    `label` is the value of the label `cluster.type_label`; empty for cores of one kind, which any node has. Cores, GPUs
    and memory (with shared memory) are those of each pod; `min_pods` and `max_pods` apply with autoscaling.
    """

    name: str
    device: str
    label: str
    num_pods: int
    min_pods: int
    max_pods: int
    num_cpus: int
    num_gpus: int
    memory_bytes: int
    settings: GroupConfig

    @property
    def object_store_bytes(self) -> int:
        """Bytes of Ray's object store."""
        return int(self.settings.shm_bytes * RAY_SHARE_OF_SHM)


def worker_groups(plan: ShardPlan, settings: DeployConfig) -> tuple[DeployGroup, ...]:
    """Make a group of each device type, in the plan's order; ConfigError without stages, or if a section misfits."""
    by_device: dict[str, list[PlannedStage]] = {}
    for number, stage in enumerate(plan.stages):
        if stage.device is None or stage.num_gpus is None:
            raise ConfigError(
                f"plan: stage {number} is placed on no device, so no cluster can be made for it; plan for a fleet: "
                "embedder plan --devices 2xL4,16xCPU --out plan.json"
            )
        by_device.setdefault(stage.device, []).append(stage)
    sections = {group.device: group for group in settings.group}
    if unknown := sorted(set(sections) - set(by_device)):
        raise ConfigError(
            f"[[deploy.group]] device = {unknown[0]!r}: the plan has no such device; it has {', '.join(by_device)}"
        )
    groups = tuple(
        _group(device, stages, sections.get(device) or GroupConfig(device=device), settings)
        for device, stages in by_device.items()
    )
    _check_names(groups)
    return groups


def _group(device: str, stages: Sequence[PlannedStage], section: GroupConfig, settings: DeployConfig) -> DeployGroup:
    num_gpus = devices_needed((stage.num_gpus or 0.0, stage.num_replicas) for stage in stages)
    if num_gpus and section.replicas is not None:
        raise ConfigError(
            f"[[deploy.group]] {device}: replicas = {section.replicas}, and the plan says how many GPUs there are; "
            "leave it out, or write gpus_per_pod"
        )
    if num_gpus:
        per_pod = _gpus_per_pod(device, stages, num_gpus, section)
        num_pods, num_cpus = num_gpus // per_pod, section.cpus or CPUS_PER_GPU * per_pod
    else:
        per_pod = 0
        num_pods, num_cpus = _pods_of_cores(device, stages, section)
    least, most = section.min_replicas if settings.autoscaling else num_pods, section.max_replicas or num_pods
    if not least <= num_pods <= most:
        raise ConfigError(
            f"[[deploy.group]] {device}: min_replicas = {least}, max_replicas = {most}, and the plan has "
            f"{plural(num_pods, 'pod')}; it has to lie between them"
        )
    return DeployGroup(
        name=re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-"),
        device=device,
        label="" if device == CPU else ray_label(device),
        num_pods=num_pods,
        min_pods=least,
        max_pods=most if settings.autoscaling else num_pods,
        num_cpus=num_cpus,
        num_gpus=per_pod,
        memory_bytes=_memory_bytes(device, stages, section, num_pods, num_cpus),
        settings=section,
    )


def ray_label(device: str) -> str:
    """Return the value of the nodes' label for a device type: Ray's name of it, such as A100-80G for `A100:80GB`."""
    name, _, memory = device.partition(":")
    gigabytes = float(found[0]) * (GIB / GB if found[1] == "GiB" else 1) if (found := _memory_of(memory)) else None
    exact = [ray for ray, (table, gb) in RAY_NAMES.items() if table == name and gb == gigabytes]
    return exact[0] if exact else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")


def _memory_of(text: str) -> tuple[str, str] | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text)
    return (found[1], found[2]) if found else None


def _gpus_per_pod(device: str, stages: Sequence[PlannedStage], num_gpus: int, section: GroupConfig) -> int:
    """GPUs of a pod: enough for a replica, and so many that all pods together have the plan's."""
    least = max(math.ceil(stage.num_gpus or 0.0) for stage in stages)
    per_pod = section.gpus_per_pod or next(each for each in range(least, num_gpus + 1) if num_gpus % each == 0)
    if num_gpus % per_pod or per_pod < least:
        fitting = [each for each in range(least, num_gpus + 1) if num_gpus % each == 0]
        raise ConfigError(
            f"[[deploy.group]] {device}: gpus_per_pod = {per_pod}, and the plan has {plural(num_gpus, 'GPU')}, "
            f"{least} for one replica; write one of {', '.join(map(str, fitting))}"
        )
    return per_pod


def _pods_of_cores(device: str, stages: Sequence[PlannedStage], section: GroupConfig) -> tuple[int, int]:
    """Pods and the cores of each: a replica fits, and together they have the plan's unless `replicas` is set."""
    cores = sum((stage.num_threads or 1) * stage.num_replicas for stage in stages)
    least = max(stage.num_threads or 1 for stage in stages)
    if section.gpus_per_pod is not None:
        raise ConfigError(f"[[deploy.group]] {device}: gpus_per_pod is set, and the plan has only cores; leave it out")
    if section.replicas is not None:
        num_cpus = section.cpus or max(least, math.ceil(cores / section.replicas))
        if num_cpus < least:
            raise ConfigError(f"[[deploy.group]] {device}: cpus = {num_cpus}, and one replica needs {least}; raise it")
        return section.replicas, num_cpus
    fitting = [each for each in range(least, cores + 1) if cores % each == 0]
    num_cpus = section.cpus or max((each for each in fitting if each <= MAX_CPUS_PER_POD), default=fitting[0])
    if num_cpus not in fitting:
        raise ConfigError(
            f"[[deploy.group]] {device}: cpus = {num_cpus}, and the plan has {plural(cores, 'core')}, {least} for one "
            f"replica; write one of {', '.join(map(str, fitting))}, or `replicas`, too"
        )
    return cores // num_cpus, num_cpus


def _memory_bytes(
    device: str, stages: Sequence[PlannedStage], section: GroupConfig, num_pods: int, num_cpus: int
) -> int:
    """Memory of a pod: as requested, else so much that the replicas on cores take half of it."""
    held = sum((stage.memory_bytes or 0) * stage.num_replicas for stage in stages if not stage.num_gpus)
    needed = math.ceil(held / num_pods / MEMORY_SHARE / GIB) * GIB + section.shm_bytes
    found = section.memory_bytes or max(num_cpus * BYTES_PER_CPU, needed, MIN_SHARE_OF_MEMORY * section.shm_bytes)
    check_shared_memory(f"[[deploy.group]] {device}", found, section.shm_bytes)
    return found


def check_shared_memory(where: str, memory_bytes: int, shm_bytes: int) -> None:
    """Refuse (ConfigError) a pod, described in `where`, whose shared memory would leave too little to its processes."""
    if memory_bytes < MIN_SHARE_OF_MEMORY * shm_bytes:
        raise ConfigError(
            f"{where}: memory_bytes = {memory_bytes}, and shm_bytes = {shm_bytes} is more than half of it; shared "
            "memory counts as memory of the pod: raise the one or lower the other"
        )


def _check_names(groups: Sequence[DeployGroup]) -> None:
    """Refuse (ConfigError) empty names, and two types whose groups would have the same name."""
    names = [group.name for group in groups]
    for group in groups:
        if not group.name or names.count(group.name) > 1:
            raise ConfigError(
                f"plan: device {group.device!r} gives no name of its own to a group: only small letters and "
                "digits count; plan with other labels of the nodes"
            )


def check_types_are_told_apart(
    groups: Sequence[DeployGroup], key: Literal["node_selector", "gres"], example: str
) -> None:
    """Refuse GPUs of several types whose pods or tasks any node with a GPU would take.

    `key` of `[[deploy.group]]` names such nodes; `example` is a value of it, for the message. Raises `ConfigError` if a
    group lacks the key.
    """
    with_gpus = [group for group in groups if group.num_gpus]
    for group in with_gpus if len(with_gpus) > 1 else ():
        if not getattr(group.settings, key):
            raise ConfigError(
                f"[[deploy.group]] {group.device}: the plan has {len(with_gpus)} types of GPUs, and without {key} any "
                f"of them may be given for another; name the nodes, as {key} = {example}"
            )
