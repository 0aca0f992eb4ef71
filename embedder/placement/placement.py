"""Placement of replicas on the nodes of a cluster. Pure: nodes and requests in, a node for each replica out.

A process lies on one node, and its part of a GPU on one device there, so sums over a cluster promise too much. The
device is Ray's choice (`embedder.placement.gpus`), so replicas fit on a node only if they find devices in whichever
order they start. Greedy passes place most requests; the rest is searched exhaustively, up to MAX_STEPS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil

from embedder.placement.gpus import UNITS, devices_needed, part_of_device
from embedder.quantities import plural

MAX_STEPS = 30_000  # sets of replicas that a search tries on a node: a few tenths of a second
MAX_SEARCHED = 200  # nodes that are searched exhaustively; for more, the greedy passes must do
Counts = tuple[int, ...]
"""Replicas of each request."""
NodesOfReplicas = tuple[tuple[int, ...], ...]
"""By request and replica: the index of its node in the list of nodes."""


@dataclass(frozen=True)
class Node:
    """What replicas may take of one node: all that it has, or what is free now.

    `num_cpus` may be fractional; `num_gpus` are whole. `device_type` is the value of the label that names the type of
    its devices, else `gpu_type`, Ray's name (L4, A100). `labels` are pairs of key and value; `node_id` is Ray's.
    `object_store_bytes` is its part of Ray's object store, all of it.
    """

    name: str
    num_cpus: float
    num_gpus: int = 0
    device_type: str | None = None
    memory_bytes: int = 0
    labels: frozenset[tuple[str, str]] = frozenset()
    node_id: str = ""
    gpu_type: str | None = None
    object_store_bytes: int = 0

    def __str__(self) -> str:
        gpus = f", {self.num_gpus} x {self.device_type or 'GPU'}" if self.num_gpus else ""
        return f"{self.name} ({self.num_cpus:g} CPU{gpus})"


@dataclass(frozen=True)
class ReplicaRequest:
    """Replicas with the same needs, each on one node; CPUs, GPUs and main memory are those of each.

    `num_gpus` is whole, or 1/k of one. The node must have one of `device_types` (empty accepts any) and all `labels`,
    pairs of key and value. `name`, a stage or task, is for messages.
    """

    name: str
    count: int
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    device_types: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()
    memory_bytes: int = 0

    def __str__(self) -> str:
        gpus = f" and {self.num_gpus:g} {self.type_names or 'GPU'}" if self.num_gpus else ""
        memory = f" and {self.memory_bytes / 2**30:.3g} GiB" if self.memory_bytes else ""
        labels = "".join(f", {key}={value}" for key, value in sorted(self.labels))
        return f"{self.name} ({self.count} x {self.num_cpus:g} CPU{gpus}{memory}{labels})"

    @property
    def type_names(self) -> str:
        """Types of devices to show."""
        return " or ".join(sorted(self.device_types))

    def may_use(self, node: Node) -> bool:
        """Whether the node has the labels and the type of devices asked for."""
        return self.labels <= node.labels and (not self.device_types or node.device_type in self.device_types)


@dataclass
class Placed:
    """Answer of `place`: the node of each replica, or None.

    If `nodes` is None, `is_proven` says whether the search was exhaustive, so that there is none.
    """

    nodes: NodesOfReplicas | None
    is_proven: bool = True


def units(amount: float) -> int:
    """Convert CPUs or GPUs to Ray's units, rounded as Ray does."""
    return round(amount * UNITS)


def place(nodes: Sequence[Node], requests: Sequence[ReplicaRequest], max_steps: int = MAX_STEPS) -> Placed:
    """Find a node for each replica so that all of them run at once.

    A task that needs room on one particular node is a request for its label. `max_steps` limits the search; with 0
    there are only greedy passes.
    """
    fleet = _Fleet(nodes, requests)
    counts = tuple(request.count for request in requests)
    if not fleet.is_possible(counts):
        return Placed(None)
    for is_spread in (True, False):
        for order in fleet.orders():
            if found := fleet.greedy(order, is_spread=is_spread):
                return Placed(found)
    if len(nodes) > MAX_SEARCHED:
        return Placed(None, is_proven=False)
    found = fleet.search(counts, max_steps)
    return Placed(found, is_proven=found is not None or fleet.num_steps <= max_steps)


def fits(node: Node, requests: Sequence[ReplicaRequest], counts: Counts) -> bool:
    """Whether so many replicas of each request fit on the node together, with its GPUs taken in any order."""
    present = [(request, count) for request, count in zip(requests, counts, strict=True) if count]
    return (
        all(request.may_use(node) for request, _ in present)
        and sum(units(request.num_cpus) * count for request, count in present) <= units(node.num_cpus)
        and sum(request.memory_bytes * count for request, count in present if request.memory_bytes) <= node.memory_bytes
        and devices_needed((request.num_gpus, count) for request, count in present) <= node.num_gpus
    )


@dataclass
class _Fleet:
    """Nodes by kind, and which sets of replicas fit on each; equal nodes are counted, not distinguished."""

    nodes: Sequence[Node]
    requests: Sequence[ReplicaRequest]
    kinds: list[Node] = field(default_factory=list)
    kind_of: list[int] = field(default_factory=list)
    num_steps: int = 0
    _known: dict[tuple[int, Counts], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: dict[Node, int] = {}
        self.kind_of = [numbers.setdefault(replace(node, name="", node_id=""), len(numbers)) for node in self.nodes]
        self.kinds = list(numbers)

    def fits(self, kind: int, counts: Counts) -> bool:
        known = self._known.get((kind, counts))
        if known is None:
            known = self._known[kind, counts] = fits(self.kinds[kind], self.requests, counts)
        return known

    def is_possible(self, counts: Counts) -> bool:
        """Rule out by sums what no placement can hold: each request by itself, and all together."""
        for index, count in enumerate(counts):
            room = 0
            for kind in self.kind_of:
                if room >= count:
                    break
                room += self._most_alone(kind, index, count)
            if room < count:
                return False
        pairs = list(zip(self.requests, counts, strict=True))
        return (
            sum(units(each.num_cpus) * count for each, count in pairs) <= sum(units(n.num_cpus) for n in self.nodes)
            and sum(units(each.num_gpus) * count for each, count in pairs)
            <= UNITS * sum(n.num_gpus for n in self.nodes)
            and sum(each.memory_bytes * count for each, count in pairs) <= sum(n.memory_bytes for n in self.nodes)
        )

    def _most_alone(self, kind: int, index: int, count: int) -> int:
        """Return the most replicas of a request that fit on an empty node, up to `count`; by bisection."""
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            alone = tuple(middle if each == index else 0 for each in range(len(self.requests)))
            low, high = (middle, high) if self.fits(kind, alone) else (low, middle - 1)
        return low

    def orders(self) -> list[list[int]]:
        """Return orders in which greedy passes place the requests: those with few nodes first, large ones first."""
        choice = [sum(request.may_use(node) for node in self.nodes) for request in self.requests]

        def size(index: int) -> tuple[float, int, float]:
            request = self.requests[index]
            return (-request.num_gpus, -request.memory_bytes, -request.num_cpus)

        numbers = range(len(self.requests))
        return [sorted(numbers, key=lambda index: (choice[index], size(index))), sorted(numbers, key=size)]

    def greedy(self, order: Sequence[int], *, is_spread: bool) -> NodesOfReplicas | None:
        """Place the replicas one by one on the emptiest, or the fullest, node that has room."""
        empty: Counts = (0,) * len(self.requests)
        waiting: dict[tuple[int, Counts], list[int]] = {}
        for number in reversed(range(len(self.nodes))):
            waiting.setdefault((self.kind_of[number], empty), []).append(number)
        found: list[list[int]] = [[] for _ in self.requests]
        for index in order:
            for _ in range(self.requests[index].count):
                options = [
                    (
                        self._is_wasted(kind, index),
                        self._load(kind, _one_more(counts, index)) * (1 if is_spread else -1),
                        kind,
                        counts,
                    )
                    for kind, counts in waiting
                    if self.fits(kind, _one_more(counts, index))
                ]
                if not options:
                    return None
                _, _, kind, counts = min(options)
                number = waiting[kind, counts].pop()
                if not waiting[kind, counts]:
                    del waiting[kind, counts]
                waiting.setdefault((kind, _one_more(counts, index)), []).append(number)
                found[index].append(number)
        return tuple(map(tuple, found))

    def _is_wasted(self, kind: int, index: int) -> bool:
        return self.kinds[kind].num_gpus > 0 and not self.requests[index].num_gpus

    def _load(self, kind: int, counts: Counts) -> float:
        node, pairs = self.kinds[kind], list(zip(self.requests, counts, strict=True))
        cpus = sum(request.num_cpus * count for request, count in pairs) / (node.num_cpus or 1)
        return max(cpus, sum(request.num_gpus * count for request, count in pairs) / (node.num_gpus or 1))

    def search(self, counts: Counts, max_steps: int) -> NodesOfReplicas | None:
        """Fill the nodes one by one in all ways that leave no room for more of the remaining replicas."""
        order = sorted(range(len(self.nodes)), key=lambda number: self.kind_of[number])
        last_of_kind = {self.kind_of[number]: position for position, number in enumerate(order)}
        failed: set[tuple[int, Counts]] = set()

        def fill(position: int, left: Counts) -> list[Counts] | None:
            if not any(left):
                return []
            if position == len(order) or (position, left) in failed:
                return None
            kind = self.kind_of[order[position]]
            for taken in self._fullest(kind, left, max_steps):
                if not any(taken):  # nothing that is left fits on a node of this kind
                    rest = fill(last_of_kind[kind] + 1, left)
                    skipped = last_of_kind[kind] - position
                    if rest is not None:
                        return [taken] * (skipped + 1) + rest
                    continue
                rest = fill(position + 1, tuple(had - took for had, took in zip(left, taken, strict=True)))
                if rest is not None:
                    return [taken, *rest]
                if self.num_steps > max_steps:
                    return None
            failed.add((position, left))
            return None

        filled = fill(0, counts)
        if filled is None:
            return None
        return tuple(
            tuple(chain.from_iterable([order[position]] * taken[index] for position, taken in enumerate(filled)))
            for index in range(len(counts))
        )

    def _fullest(self, kind: int, left: Counts, max_steps: int) -> Iterator[Counts]:
        """Yield sets of replicas that fit on a node, and to which none of the rest can be added."""

        def extend(index: int, taken: Counts) -> Iterator[Counts]:
            if self.num_steps > max_steps:
                return
            if index == len(left):
                more = (_one_more(taken, each) for each, had in enumerate(left) if taken[each] < had)
                if not any(self.fits(kind, each) for each in more):
                    yield taken
                return
            reached = taken
            sets = [taken]
            while reached[index] < left[index] and self.fits(kind, _one_more(reached, index)):
                self.num_steps += 1
                reached = _one_more(reached, index)
                sets.append(reached)
            for each in reversed(sets):
                yield from extend(index + 1, each)

        self.num_steps += 1
        return extend(0, (0,) * len(left))


def _one_more(counts: Counts, index: int) -> Counts:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


def explain_refusal(nodes: Sequence[Node], requests: Sequence[ReplicaRequest]) -> str:
    """Say in a line which request finds no node, which node is nearest and what it lacks, and what would fit."""
    if not nodes:
        return f"{requests[0]}: the cluster has no node"
    refused, num_placed = _first_refused(nodes, requests)
    before = [*requests[: requests.index(refused)], replace(refused, count=num_placed)]
    placed = place(nodes, before).nodes or ()
    held = [tuple(numbers.count(number) for numbers in placed) for number in range(len(nodes))]
    lacks = [_lacking(node, refused, before, counts) for node, counts in zip(nodes, held, strict=True)]
    node, (_, what) = min(zip(nodes, lacks, strict=True), key=lambda pair: pair[1][0])
    others = " next to the others" if any(each.count for each in before) else ""
    return (
        f"{refused}: no node has room for replica {num_placed + 1} of {refused.count}{others}; the nearest, {node}, "
        f"{what}; {_nearest_request(nodes, before, refused, num_placed)}"
    )


def _first_refused(nodes: Sequence[Node], requests: Sequence[ReplicaRequest]) -> tuple[ReplicaRequest, int]:
    """Return the first request that can't be placed with those before it, and how many of its replicas can."""
    for index, request in enumerate(requests):
        if place(nodes, requests[: index + 1]).nodes is not None:
            continue
        low, high = 0, request.count - 1
        while low < high:
            middle = (low + high + 1) // 2
            fit = place(nodes, [*requests[:index], replace(request, count=middle)]).nodes is not None
            low, high = (middle, high) if fit else (low, middle - 1)
        return request, low
    return requests[-1], 0


def _lacking(
    node: Node, request: ReplicaRequest, held: Sequence[ReplicaRequest], counts: Counts
) -> tuple[tuple[int, float], str]:
    """Return how far a node is from holding one more replica, as a sort key and in words."""
    pairs = [(each, count) for each, count in zip(held, counts, strict=bool(counts)) if count]
    if not request.labels <= node.labels:
        return (3, 0.0), f"lacks the label {', '.join('='.join(each) for each in sorted(request.labels - node.labels))}"
    if not request.may_use(node):
        return (2, 0.0), f"has {node.device_type or 'no GPU'} and not {request.type_names}"
    free_cpus = node.num_cpus - sum(each.num_cpus * count for each, count in pairs)
    free_memory = node.memory_bytes - sum(each.memory_bytes * count for each, count in pairs)
    taken = devices_needed((each.num_gpus, count) for each, count in pairs)
    needed = devices_needed([*((each.num_gpus, count) for each, count in pairs), (request.num_gpus, 1)])
    words, distance = [], 0.0
    if units(free_cpus) < units(request.num_cpus):
        words.append(f"{max(0.0, free_cpus):.4g} CPU free")
        distance += request.num_cpus - free_cpus
    if needed > node.num_gpus:
        words.append(f"{plural(node.num_gpus - taken, 'whole GPU')} free" if pairs else plural(node.num_gpus, "GPU"))
        distance += needed - node.num_gpus
    if request.memory_bytes and free_memory < request.memory_bytes:
        words.append(f"{free_memory / 2**30:.3g} GiB free")
        distance += (request.memory_bytes - free_memory) / 2**30
    return (
        len(words),
        distance,
    ), f"has {' and '.join(words)}" if words else "would hold it in another arrangement only"


def _nearest_request(
    nodes: Sequence[Node], before: Sequence[ReplicaRequest], refused: ReplicaRequest, num_placed: int
) -> str:
    """Say what could be placed instead: fewer replicas, else a smaller part of a GPU, else fewer CPUs."""
    if num_placed:
        return f"{num_placed} of its {plural(refused.count, 'replica')} can be placed"
    rest = before[:-1]
    whole = [float(number) for number in range(ceil(refused.num_gpus) - 1, 0, -1)]
    smaller = [replace(refused, num_gpus=each) for each in [*whole, *(part_of_device(k) for k in range(2, 9))]]
    for each in smaller:
        if each.num_gpus < refused.num_gpus and place(nodes, [*rest, each]).nodes is not None:
            return f"num_gpus = {each.num_gpus:g} can be placed"
    for part in (2, 4, 8, 16):
        each = replace(refused, num_cpus=refused.num_cpus / part)
        if refused.num_cpus and place(nodes, [*rest, each]).nodes is not None:
            return f"num_cpus = {each.num_cpus:g} can be placed"
    return "no smaller part of a GPU or CPU can be placed either" if ceil(refused.num_gpus) else "none can be placed"
