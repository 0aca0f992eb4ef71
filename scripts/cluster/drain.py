"""Tell a cluster that one of its nodes goes away: python scripts/cluster/drain.py ADDRESS NODE_IP SECONDS.

To be run on a node of the cluster, and without effect on the node itself: whoever gives notice has to end it then.
"""

import subprocess
import sys
from pathlib import Path

import ray


def main() -> None:
    address, node_ip, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == node_ip]
    ray.shutdown()
    if len(found) != 1:
        sys.exit(f"error: {len(found)} living nodes have the address {node_ip}; one is expected")
    command = [Path(sys.executable).with_name("ray"), "drain-node", "--address", address, "--node-id", found[0]]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the machine is taken away"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", str(round(seconds))], check=True)


if __name__ == "__main__":
    main()
