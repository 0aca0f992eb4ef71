"""Events of a cluster during a run: nodes lost, joined, drained or back, and replicas that restart.

Comparing two states is pure. Nodes are read in a thread, only on a cluster; the states of the replicas come with the
operators' samples.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from embedder.placement.placement import Node
from embedder.quantities import duration_text

if TYPE_CHECKING:  # it imports Ray, which a run in one process doesn't need
    from embedder.compat.operator_stats import Replica, Sample

INTERVAL_S = 2.0
END_S = 5.0  # for a running query that waits for a lost head


@dataclass(frozen=True)
class Event:
    """Something that happened to the cluster, or to the run's part of it, in one line; `time_s` is Unix time."""

    time_s: float
    text: str


@dataclass(frozen=True)
class LivingNodes:
    """Living nodes of a cluster at one time, by id.

    `draining` has the ids of nodes that are to leave, with the Unix time of their deadline, or 0.
    """

    nodes: Mapping[str, Node]
    draining: Mapping[str, float] = field(default_factory=dict)


def node_events(before: LivingNodes, after: LivingNodes, gone: set[str], now_s: float) -> list[str]:
    """Compare two states of a cluster; return one line for each event.

    `gone` has the names of nodes that were lost or left before, and is updated. `now_s` is the Unix time of `after`.
    """
    lines = []
    for node_id in before.nodes.keys() - after.nodes.keys():
        name = before.nodes[node_id].name
        gone.add(name)
        if node_id in before.draining:
            lines.append(f"node {name} has left, as it was drained")
        else:
            lines.append(f"node {name} is lost; what was in work there is done again elsewhere")
    for node_id in after.nodes.keys() - before.nodes.keys():
        node = after.nodes[node_id]
        lines.append(f"node {node} is back" if node.name in gone else f"node {node} has joined")
        gone.discard(node.name)
    for node_id in after.nodes.keys() & (before.draining.keys() ^ after.draining.keys()):
        name, deadline_s = after.nodes[node_id].name, after.draining.get(node_id)
        if deadline_s is None:
            lines.append(f"node {name} is not drained any more")
        else:
            leaves = f", and leaves within {duration_text(round(max(deadline_s - now_s, 0)))}" if deadline_s else ""
            lines.append(f"node {name} is drained: it gets no new blocks{leaves}")
    return sorted(lines)


class ReplicaEvents:
    """Comparison of the replicas of a run's stages from sample to sample."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Replica] = {}
        self._lost: dict[tuple[str, str], tuple[float, str]] = {}

    def compare(self, sample: "Sample", node_name: Callable[[str], str]) -> list[str]:
        """Return one line for each replica that was lost, or runs again, since the last sample.

        `node_name` gives a node's name by id for messages, preceded by `on`; empty if there is only one node.
        """
        lines = []
        now = {(state.name, each.actor_id): each for state in sample.operators for each in state.replicas}
        for (stage, actor), replica in now.items():
            before = self._before.get((stage, actor))
            if before is None or before.is_restarting == replica.is_restarting:
                continue
            if replica.is_restarting:
                self._lost[stage, actor] = sample.time_s, before.node_id
                lines.append(f"{stage} lost a replica{node_name(before.node_id)}; it is started again")
            else:
                lost_s, lost_on = self._lost.pop((stage, actor), (sample.time_s, ""))
                # Ray reports a new place late: until then it names the node that may be gone.
                place = node_name(replica.node_id) if replica.node_id != lost_on else ""
                lines.append(
                    f"{stage} has its replica again{place}, {duration_text(round(sample.time_s - lost_s))} later"
                )
        self._before = now
        return lines


class FleetWatch:
    """Watch over nodes and replicas between entering and leaving the block.

    `events` has all of the run so far, `nodes` all that were seen, living or not, by id.
    """

    def __init__(self, *, on_cluster: bool) -> None:
        """Start without events; unless `on_cluster`, nodes can't come and go and are not read."""
        self.events: list[Event] = []
        self.nodes: dict[str, Node] = {}
        self._replicas = ReplicaEvents()
        self._fleet: LivingNodes | None = None
        self._gone: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet-watch", daemon=True) if on_cluster else None

    def __enter__(self) -> "FleetWatch":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def compare_replicas(self, sample: "Sample") -> None:
        """Record the events among the stages' replicas; for the thread that takes the samples."""
        self._note(self._replicas.compare(sample, self._on_node), sample.time_s)

    def _on_node(self, node_id: str) -> str:
        node = self.nodes.get(node_id)
        return f" on node {node.name}" if node is not None else ""

    def _note(self, lines: list[str], now_s: float) -> None:
        self.events += [Event(now_s, line) for line in lines]

    def _watch(self) -> None:
        from embedder.compat.ray_fleet import can_read

        if not can_read():
            return
        self._look()
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        fleet = read_fleet()
        if fleet is None or self._stop.is_set():
            return
        self.nodes |= fleet.nodes
        if self._fleet is not None:
            now_s = time.time()
            self._note(node_events(self._fleet, fleet, self._gone, now_s), now_s)
        self._fleet = fleet


def read_fleet() -> LivingNodes | None:
    """Read the cluster that this process is attached to; None if its head doesn't answer."""
    from embedder.compat.ray_fleet import read_nodes
    from embedder.executors.ray_session import as_node

    found = read_nodes()
    if found is None:
        return None
    entries, draining = found
    nodes = {entry["NodeID"]: as_node(entry, entry["Resources"]) for entry in entries if entry["Alive"]}
    return LivingNodes(nodes, {node_id: deadline_ms / 1000 for node_id, deadline_ms in draining.items()})
