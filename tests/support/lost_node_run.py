"""A program: a command on a Ray of several nodes, of which one is killed while a stage on it has work.

python lost_node_run.py NOTES ARGUMENT...    prints one line of JSON: the command's end, and the nodes of the stage
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from command_runs import run_here
from ray.cluster_utils import Cluster

from embedder import pipeline
from embedder.steps.stage_actor import StageActor

NOTES = "EMBEDDER_TEST_NOTES"
NUM_BLOCKS_BEFORE = 3
STORE_BYTES = 200_000_000
LOST_AFTER = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # 2 s; 20 are usual


class NotedStage(StageActor):
    """A stage whose second replica notes its node with each block, and takes its time."""

    def __call__(self, table):
        if self._spec.index == 1 and table.num_rows:
            with Path(os.environ[NOTES]).open("a") as notes:
                notes.write(ray.get_runtime_context().get_node_id() + "\n")
            time.sleep(0.3)
        return super().__call__(table)


def noted():
    """Node of each block so far."""
    path = Path(os.environ[NOTES])
    return path.read_text().split() if path.exists() else []


def kill_node(cluster, nodes):
    """Kill the node that has the stage, once it has worked on some blocks."""
    while len(noted()) < NUM_BLOCKS_BEFORE:
        time.sleep(0.1)
    cluster.remove_node(nodes[noted()[-1]], allow_graceful=False)


def main():
    """Run the command."""
    os.environ[NOTES] = sys.argv[1]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": LOST_AFTER},
    )
    workers = [cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    pipeline.StageActor = NotedStage
    nodes = {node.node_id: node for node in workers}
    threading.Thread(target=kill_node, args=(cluster, nodes), daemon=True).start()
    ended = run_here(*sys.argv[2:])
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps({"nodes": list(dict.fromkeys(noted())), **ended._asdict()}))


if __name__ == "__main__":
    main()
