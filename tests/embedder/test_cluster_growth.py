"""A run on a cluster that has no node yet: it asks for one, says so, and uses those that come."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import samples

from cluster.nodes import NodeCluster

ROOT = Path(__file__).parents[2]
MODEL, NODES = ROOT / "embedder" / "demo_model", ROOT / "scripts" / "cluster" / "nodes.py"


@pytest.fixture
def growing(starts_ray):
    """A head without CPUs, whose cluster grows up to three nodes of one CPU."""
    cluster = NodeCluster(f"grow{os.getpid()}-")
    options = ("--name", cluster.name, "start", "1", "--cpus", "0", "--grow", "3")
    subprocess.run([sys.executable, NODES, *options], stdout=subprocess.DEVNULL, check=True, timeout=200)
    yield cluster
    cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="namespaces need root, and ip, unshare and nsenter",
)
def test_a_run_waits_for_the_first_node_and_uses_the_replicas_that_it_may_have(growing, tmp_path):
    source, store, config = samples.folder(tmp_path / "in", num_images=200), tmp_path / "store", tmp_path / "run.toml"
    config.write_text(
        f'model = "{MODEL}"\nstore = "{store}"\nray_address = "{growing.address}"\nnum_stages = 1\n'
        f'[cluster]\nmax_cpus = 3\nwait_s = 120\n[[source]]\npath = "{source}"\n'
        "[[stage]]\nreplicas = { min = 2, max = 2 }\nnum_cpus = 0.6\n"
    )
    command = growing.command(0, [sys.executable, "-m", "embedder", "embed", "--config", str(config)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "waiting for " in done.stderr
    assert "no node with CPUs yet" in done.stderr
    (report,) = (json.loads(path.read_text()) for path in store.glob("runs/*/report.json"))
    assert report["num_items"] >= 200
    assert sum(node["num_cpus"] for node in report["nodes"]) >= 2
    assert len({load["pid"] for load in report["loads"]}) == 2, "one replica of 0.6 on each node of one CPU"
