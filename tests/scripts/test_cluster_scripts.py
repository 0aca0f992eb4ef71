"""The script for small clusters of namespaces; one that grows: test_cluster_growth; `loopback.py`: test_fleet_watch."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from script_runs import SCRIPTS

from cluster.nodes import NodeCluster

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="namespaces need root, and ip, unshare and nsenter",
)
NODES = SCRIPTS / "cluster" / "nodes.py"
NODES_SEEN = """
import json, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
seen = [(n["NodeManagerAddress"], n["Resources"].get("CPU", 0), n["Resources"].get("GPU", 0), n["Labels"].get("type"))
        for n in ray.nodes() if n["Alive"]]
print(json.dumps(sorted(seen, key=str)))
"""


def nodes(*words, name):
    """Run `nodes.py` as a user does; gives the last line that it prints."""
    command = [sys.executable, str(NODES), "--name", name, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture
def cluster(starts_ray):
    """Ends the test's nodes, whatever happened."""
    cluster = NodeCluster(f"test{os.getpid()}-")
    yield cluster
    cluster.stop()
    assert not cluster.place.exists()
    assert cluster.name not in subprocess.check_output(["ip", "netns", "list"], text=True)


@needs_root
@pytest.mark.slow
def test_nodes_are_machines_of_their_own(cluster, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    address = nodes("start", 2, "--cpus", 1, "--private", f"{own}:1m", name=cluster.name)
    assert address == "10.77.0.10:6379"
    nodes("add", 2, "--cpus", 3, "--cores", 0.5, "--ray=--num-gpus=2", "--ray=--labels=type=T4", name=cluster.name)
    seen = nodes("run", 0, sys.executable, "-c", NODES_SEEN, name=cluster.name)
    first, second, third = (f"10.77.0.{number}" for number in (10, 11, 12))
    assert json.loads(seen) == [[first, 1.0, 0, None], [second, 1.0, 0, None], [third, 3.0, 2.0, "T4"]]

    nodes("run", 1, "touch", own / "file", name=cluster.name)
    assert nodes("run", 1, "ls", own, name=cluster.name) == "file"
    assert nodes("run", 0, "ls", own, name=cluster.name) == "", "each node has a disk of its own"
    overfull = subprocess.run(
        cluster.command(1, ["head", "-c", "2000000", "/dev/zero"]), capture_output=True, check=True
    )
    with pytest.raises(OSError, match="No space left"):
        write_on(cluster, 1, own / "large", overfull.stdout)
    assert nodes("run", 2, "grep", cluster.netns(2), "/proc/self/cgroup", name=cluster.name), "bounded to half a core"
    assert nodes("run", 1, "hostname", name=cluster.name) == cluster.netns(1)
    assert int(nodes("run", 1, "sh", "-c", "ps ax | wc -l", name=cluster.name)) < 30, "processes of their own, too"

    assert can_ping(cluster, second)
    cluster.cut(1)
    assert not can_ping(cluster, second)
    cluster.heal(1)
    assert can_ping(cluster, second)

    nodes("drain", 2, 1, name=cluster.name)
    nodes("kill", 2, name=cluster.name)
    assert nodes("who", name=cluster.name).startswith("node 1  ray::")
    assert list(cluster.titles(2)) == []
    assert list(cluster.titles(1)) != []


def write_on(cluster, number, path, content):
    """Write a file on a node."""
    done = subprocess.run(cluster.command(number, ["tee", str(path)]), input=content, capture_output=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.decode())


def can_ping(cluster, ip):
    """Whether an address can be reached from the head."""
    connect = f"import socket; socket.create_connection(('{ip}', 1), timeout=2)"
    done = subprocess.run(
        cluster.command(0, [sys.executable, "-c", connect]), capture_output=True, text=True, check=False
    )
    return "ConnectionRefusedError" in done.stderr  # a machine that is there says that nobody listens
