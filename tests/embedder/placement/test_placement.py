"""Placement of replicas on nodes, compared with a packer that tries everything and places GPUs as Ray does."""

import random
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.placement.allocation import place_replicas
from embedder.placement.fleet import Available
from embedder.placement.gpus import UNITS, part_of_device
from embedder.placement.placement import Node, ReplicaRequest, explain_refusal, place
from embedder.placement.resources import allocate

TYPES = ("L4", "A100")
SHARES = [0, 0, 1, 1, 2, *(part_of_device(num_parts) for num_parts in (2, 2, 3, 4))]


@cache
def ray_places(parts, num_gpus):
    """Whether Ray finds devices for these GPUs of one node, in every order, each on the tightest that has room."""

    def waits(order):
        room = [UNITS] * num_gpus
        for size in order:
            whole, part = divmod(size, UNITS)
            for _ in range(whole):
                if UNITS not in room:
                    return True
                room[room.index(UNITS)] = 0
            if part:
                fitting = [each for each in room if each >= part]
                if not fitting:
                    return True
                room[room.index(min(fitting))] -= part
        return False

    return not any(waits(order) for order in set(permutations(parts)))


def may_compute_on(node, device_types):
    """Whether the node's type is one of these; none of them allows any."""
    return not device_types or node.device_type in device_types


def holds(node, replicas):
    """Whether a node holds replicas together."""
    return (
        all(each.labels <= node.labels and may_compute_on(node, each.device_types) for each in replicas)
        and round(sum(each.num_cpus for each in replicas) * 100) <= round(node.num_cpus * 100)
        and sum(each.memory_bytes for each in replicas) <= node.memory_bytes
        and ray_places(tuple(sorted(round(each.num_gpus * UNITS) for each in replicas)), node.num_gpus)
    )


def brute_force(nodes, requests):
    """Whether some assignment of each replica to a node lets every node hold its own."""
    replicas = [request for request in requests for _ in range(request.count)]
    numbers = range(len(replicas))
    reached = {0}
    for node in nodes:
        subsets = [
            mask
            for mask in range(1 << len(replicas))
            if holds(node, [replicas[each] for each in numbers if mask >> each & 1])
        ]
        reached = {done | mask for done in reached for mask in subsets if not done & mask}
    return (1 << len(replicas)) - 1 in reached


def is_held(nodes, requests, where):
    """Whether a placement names a node for each replica, and every node holds its own."""
    assert [len(numbers) for numbers in where] == [request.count for request in requests]
    return all(
        holds(node, [each for each, numbers in zip(requests, where, strict=True) for _ in range(numbers.count(number))])
        for number, node in enumerate(nodes)
    )


def random_fleet(rng, num_gpus, num_nodes):
    """Nodes with so many GPUs in all, of mixed types."""
    where = [rng.randrange(num_nodes) for _ in range(num_gpus)]
    return [
        Node(
            f"node {number}",
            rng.choice((0.5, 1, 2, 4)),
            where.count(number),
            rng.choice(TYPES) if where.count(number) else None,
            rng.choice((2, 4, 8)),
            frozenset({("disk", rng.choice("ab"))}),
        )
        for number in range(num_nodes)
    ]


def random_requests(rng, num_stages, types):
    """So many stages, and a decode task."""
    left = 7 - num_stages
    requests = []
    for index in range(num_stages):
        count = 1 + (rng.randint(0, min(2, left)) if rng.random() < 0.4 else 0)
        left -= count - 1
        num_gpus = rng.choice(SHARES)
        device_types = frozenset([rng.choice(types)] if num_gpus and types and rng.random() < 0.4 else [])
        labels = frozenset({("disk", "a")}) if rng.random() < 0.1 else frozenset()
        memory = rng.choice((0, 0, 1, 2, 3))
        num_cpus = rng.choice((0, 0.25, 0.5, 1))
        requests.append(ReplicaRequest(f"stage {index}", count, num_cpus, num_gpus, device_types, labels, memory))
    return [*requests, ReplicaRequest("a decode task", 1, rng.choice((0.25, 0.5, 1)))]


@pytest.mark.parametrize("num_nodes", range(1, 5))
@pytest.mark.parametrize("num_gpus", range(9))
def test_nothing_placeable_is_refused_and_nothing_else_placed(num_gpus, num_nodes):
    rng = random.Random(num_gpus * 10 + num_nodes)
    for num_stages in range(1, 7):
        for _ in range(5):
            nodes = random_fleet(rng, num_gpus, num_nodes)
            types = sorted({node.device_type for node in nodes if node.device_type})
            requests = random_requests(rng, num_stages, types)
            found = place(nodes, requests)
            assert found.is_proven
            assert (found.nodes is not None) == brute_force(nodes, requests), (nodes, requests)
            assert found.nodes is None or is_held(nodes, requests, found.nodes)
            if found.nodes is None:
                assert explain_refusal(nodes, requests).startswith(("stage", "a decode task"))


@pytest.mark.parametrize("num_nodes", range(1, 5))
@pytest.mark.parametrize("num_gpus", range(9))
def test_a_run_starts_where_its_replicas_have_a_placement_and_nowhere_else(num_gpus, num_nodes):
    rng = random.Random(num_gpus * 10 + num_nodes)
    for num_stages in range(1, 7):
        for _ in range(3):
            nodes = [replace(node, memory_bytes=0) for node in random_fleet(rng, num_gpus, num_nodes)]
            stages, requests = [], []
            for request in random_requests(rng, num_stages, []):
                requests.append(replace(request, labels=frozenset(), memory_bytes=0))
                replicas = {"min": request.count, "max": request.count}
                settings = {"num_cpus": request.num_cpus, "num_gpus": request.num_gpus, "device": "cpu"}
                stages.append(settings | {"replicas": replicas})
            task = {"num_cpus": stages.pop()["num_cpus"]}
            config = load_config(overrides={"num_stages": num_stages, "stage": stages, "decode": task})
            fleet = Available(sum(node.num_cpus for node in nodes), num_gpus, tuple(nodes))
            try:
                allocation = allocate(config.compute, fleet)
            except ConfigError:
                assert not brute_force(nodes, requests), (nodes, requests)
                continue
            assert brute_force(nodes, requests), (nodes, requests)
            assert is_held(nodes, requests[:-1], place_replicas(allocation, nodes))


def test_hundreds_of_nodes_are_placed_without_a_search():
    nodes = [Node(f"node {number}", 16, 4, TYPES[number % 2]) for number in range(300)]
    requests = [
        ReplicaRequest("stage 0", 600, 1, 1, frozenset({"A100"})),
        ReplicaRequest("stage 1", 1200, 0.5, 0.5, frozenset({"L4"})),
        ReplicaRequest("stage 2", 300, 2),
    ]
    found = place(nodes, requests, max_steps=0)
    assert found.nodes is not None
    assert is_counted_within(nodes, requests, found.nodes)
    too_many = [*requests, ReplicaRequest("stage 3", 1, 0, 1)]
    refused = place(nodes, too_many)
    assert (refused.nodes, refused.is_proven) == (None, True), "the sum of GPUs is used up"


def is_counted_within(nodes, requests, placed):
    """Whether CPUs and GPUs of the replicas on each node are within its own; for parts that fill devices evenly."""
    for number, node in enumerate(nodes):
        counts = [numbers.count(number) for numbers in placed]
        if sum(each.num_cpus * count for each, count in zip(requests, counts, strict=True)) > node.num_cpus:
            return False
        if sum(each.num_gpus * count for each, count in zip(requests, counts, strict=True)) > node.num_gpus:
            return False
    return True


def test_a_refusal_names_the_request_the_nearest_node_and_what_would_fit():
    nodes = [Node("small", 2, 1, "L4"), Node("large", 8, 2, "A100")]
    assert explain_refusal(nodes, [ReplicaRequest("stage 0", 1, 1, 4)]) == (
        "stage 0 (1 x 1 CPU and 4 GPU): no node has room for replica 1 of 1; the nearest, large (8 CPU, 2 x A100), "
        "has 2 GPUs; num_gpus = 2 can be placed"
    )
    assert explain_refusal(nodes, [ReplicaRequest("stage 0", 3, 1, 1, frozenset({"A100"}))]) == (
        "stage 0 (3 x 1 CPU and 1 A100): no node has room for replica 3 of 3 next to the others; the nearest, "
        "large (8 CPU, 2 x A100), has 0 whole GPUs free; 2 of its 3 replicas can be placed"
    )
    assert "the nearest, large (8 CPU, 2 x A100), has 8 CPU free; num_cpus = 6 can be placed" in explain_refusal(
        nodes, [ReplicaRequest("a decode task", 1, 12)]
    )
