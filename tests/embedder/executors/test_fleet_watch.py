"""Events of a cluster: nodes that come and go, replicas that start again."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from embedder.compat.operator_stats import OperatorState, Replica, Sample
from embedder.executors.fleet_watch import FleetWatch, LivingNodes, ReplicaEvents, node_events
from embedder.placement.placement import Node

SCRIPT = Path(__file__).parents[3] / "scripts" / "cluster" / "loopback.py"

# A driver that says each event of its cluster.
WATCHER = """
import sys, time
from embedder.executors.fleet_watch import FleetWatch
from embedder.executors.ray_session import start_ray

start_ray(sys.argv[1])
with FleetWatch(on_cluster=True) as watch:
    num_said = 0
    while len(watch.events) < 4:
        if num_said == 0 and watch.nodes:
            num_said = 1
            print("watching", flush=True)
        for event in watch.events[num_said - 1:]:
            print(event.text, flush=True)
            num_said += 1
        time.sleep(0.2)
"""

HEAD = Node("head 10.0.0.1", 4, node_id="a")
WORKER = Node("worker 10.0.0.2", num_cpus=8, num_gpus=2, device_type="L4", node_id="b")


def fleet(*nodes, **draining):
    return LivingNodes({node.node_id: node for node in nodes}, draining)


def test_nodes_that_come_and_go_are_told_once():
    gone = set()
    states = [fleet(HEAD), fleet(HEAD, WORKER), fleet(HEAD, WORKER), fleet(HEAD), fleet(HEAD)]
    again = Node("worker 10.0.0.2", num_cpus=8, num_gpus=2, device_type="L4", node_id="c")  # Ray gives it another id
    states.append(fleet(HEAD, again))
    lines = [node_events(*pair, gone, 0.0) for pair in pairwise(states)]
    assert lines == [
        ["node worker 10.0.0.2 (8 CPU, 2 x L4) has joined"],
        [],
        ["node worker 10.0.0.2 is lost; what was in work there is done again elsewhere"],
        [],
        ["node worker 10.0.0.2 (8 CPU, 2 x L4) is back"],
    ]


def test_a_drained_node_is_told_with_its_deadline_and_its_end_is_no_loss():
    draining = fleet(HEAD, WORKER, b=1120.0)
    assert node_events(fleet(HEAD, WORKER), draining, set(), 1000.0) == [
        "node worker 10.0.0.2 is drained: it gets no new blocks, and leaves within 2 min"
    ]
    assert node_events(fleet(HEAD, WORKER), fleet(HEAD, WORKER, b=0.0), set(), 1000.0) == [
        "node worker 10.0.0.2 is drained: it gets no new blocks"
    ]
    assert node_events(draining, draining, set(), 1001.0) == []
    assert node_events(draining, fleet(HEAD, WORKER), set(), 1001.0) == ["node worker 10.0.0.2 is not drained any more"]
    assert node_events(draining, fleet(HEAD), set(), 1121.0) == ["node worker 10.0.0.2 has left, as it was drained"]


def sample(time_s, *replicas):
    return Sample(time_s, (OperatorState("decode"), OperatorState("stage 1", replicas=replicas)))


def test_a_replica_that_is_lost_and_runs_again_is_told_with_its_nodes():
    names = {"a": " on node head", "b": " on node worker"}
    events = ReplicaEvents()
    states = [
        sample(0.0),
        sample(2.0, Replica("x", "a"), Replica("y", "b")),
        sample(4.0, Replica("x", "a"), Replica("y", "b", is_restarting=True)),
        sample(6.0, Replica("x", "a"), Replica("y", "b", is_restarting=True)),
        sample(24.0, Replica("x", "a"), Replica("y", "a")),
        sample(26.0, Replica("y", "a")),  # a pool that shrinks
        sample(28.0, Replica("y", "a", is_restarting=True)),
        sample(30.0, Replica("y", "a")),  # Ray doesn't know the new place yet
    ]
    assert [events.compare(state, names.__getitem__) for state in states] == [
        [],
        [],
        ["stage 1 lost a replica on node worker; it is started again"],
        [],
        ["stage 1 has its replica again on node head, 20 s later"],
        [],
        ["stage 1 lost a replica on node head; it is started again"],
        ["stage 1 has its replica again, 2 s later"],
    ]


def test_on_one_machine_replicas_are_told_without_a_node_and_no_thread_runs():
    with FleetWatch(on_cluster=False) as watch:
        watch.compare_replicas(sample(10.0, Replica("x", "a")))
        watch.compare_replicas(sample(12.0, Replica("x", "a", is_restarting=True)))
        watch.compare_replicas(sample(19.0, Replica("x", "a")))
    assert [(event.time_s, event.text) for event in watch.events] == [
        (12.0, "stage 1 lost a replica; it is started again"),
        (19.0, "stage 1 has its replica again, 7 s later"),
    ]
    assert watch.nodes == {}


def event_of(watcher):
    """Next event; Ray itself prints the last lines of a raylet that it loses on this host."""
    return next(line for line in watcher.stdout if line.startswith("node "))


@pytest.mark.slow
def test_a_real_node_that_joins_and_is_lost_is_told(starts_ray):
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, str(SCRIPT), "1:0"], **pipes) as cluster:
        address = cluster.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", WATCHER, address], **pipes) as watcher:
            assert watcher.stdout.readline() == "watching\n"
            cluster.stdin.write("add 3:2:type=L4\n")
            cluster.stdin.flush()
            joined = event_of(watcher)
            cluster.stdin.write("kill 1\n")
            cluster.stdin.flush()
            lost = event_of(watcher)
            watcher.kill()
        cluster.communicate("quit\n", timeout=60)
    assert joined.endswith("(3 CPU, 2 x GPU) has joined\n")
    assert "is lost; what was in work there is done again elsewhere" in lost
