"""Nodes of a run: the steps that computed on each, their memory, and the cost of the devices. Pure."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from embedder.batch_schema import Measurement
from embedder.placement.fleet import Available
from embedder.placement.placement import Node
from embedder.quantities import plural
from embedder.report.report_schema import NodeReport
from embedder.store.journal.step_metrics import LOAD

if TYPE_CHECKING:
    from embedder.compat.operator_stats import Sample

CPU, GPU = "CPU", "GPU"  # keys of `[prices]`; the second is for a GPU whose type Ray doesn't report
SECONDS_PER_HOUR = 3600


def node_reports(nodes: Iterable[Node], trace: Iterable[Measurement]) -> list[NodeReport]:
    """Sum up a run's measurements, including those of loading, by node.

    Measurements name hosts, so nodes of one host count as one.
    """
    by_host: dict[str, list[Node]] = {}
    for node in nodes:
        by_host.setdefault(node.name.partition(" ")[0], []).append(node)
    peaks: dict[str, dict[int, int]] = {}
    steps: dict[str, set[str]] = {}
    for call in trace:
        processes = peaks.setdefault(call.node, {})
        processes[call.pid] = max(processes.get(call.pid, 0), call.peak_rss_bytes)
        if not call.step.startswith(LOAD):
            steps.setdefault(call.node, set()).add(call.step)
    return [
        NodeReport(
            name=each[0].name if len(each) == 1 else f"{host} ({plural(len(each), 'node')})",
            num_cpus=sum(node.num_cpus for node in each),
            num_gpus=sum(node.num_gpus for node in each),
            gpu_type=each[0].device_type,
            steps=tuple(sorted(steps.get(host, ()))),
            peak_memory_bytes=sum(peaks.get(host, {}).values()),
        )
        for host, each in sorted(by_host.items())
    ]


def this_machine(available: Available) -> Node:
    """Return this machine as a node, for an engine without nodes."""
    return Node(platform.node(), available.num_cpus, available.num_devices)


def held_devices(samples: "Sequence[Sample]", nodes: Mapping[str, Node]) -> dict[str, float]:
    """Return the peak number of CPUs and GPUs that the steps of a run reserved at once."""
    most: dict[str, float] = {}
    for sample in samples:
        held = {CPU: sum(state.num_cpus for state in sample.operators)}
        for state in sample.operators:
            for replica in state.replicas if state.num_gpus else ():
                node = nodes.get(replica.node_id)
                kind = (node and node.device_type) or GPU
                held[kind] = held.get(kind, 0.0) + state.num_gpus / len(state.replicas)
        most |= {kind: max(number, most.get(kind, 0.0)) for kind, number in held.items()}
    return most


def all_devices(nodes: Iterable[Node]) -> dict[str, float]:
    """Count the CPUs and GPUs of nodes."""
    found: dict[str, float] = {}
    for node in nodes:
        kinds = [(CPU, node.num_cpus), *([(node.device_type or GPU, node.num_gpus)] if node.num_gpus else [])]
        found |= {kind: found.get(kind, 0.0) + number for kind, number in kinds}
    return found


def cost_per_million(
    prices: Mapping[str, float], devices: Mapping[str, float], items_per_s: float
) -> tuple[float | None, tuple[str, ...]]:
    """Compute the cost of a million items, and the device types without a price; with any of these, the cost is None.

    A run that started Ray on this machine, or used no Ray, pays for all CPUs and GPUs of the machine, as no other job
    gets the rest. A run on a cluster pays for what its steps reserved.
    """
    lacking = tuple(kind for kind, number in devices.items() if number and kind not in prices)
    if not prices or lacking or not items_per_s:
        return None, lacking if prices else ()
    price_per_hour = sum(prices[kind] * number for kind, number in devices.items() if number)
    return price_per_hour / (items_per_s * SECONDS_PER_HOUR) * 1e6, ()
