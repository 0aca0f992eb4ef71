"""A Ray cluster of several nodes with logical CPUs, GPUs and labels, on one address of one machine. Needs no root.

    python scripts/cluster/loopback.py 1:0 4:2:type=T4 4:2:type=L4      # CPUs:GPUs:LABEL=VALUE,... of each node

The first is the head. It prints the cluster's address, and stays until its standard input ends or says `quit`; `add
CPUS:GPUS:LABELS` adds a node, `kill NUMBER` ends one. Good for GPUs and labels that only Ray believes in, and for
placement; for partitions, lost machines and disks take `nodes.py`. Ten seconds, 0.35 GiB for the head, 0.2 for a node.
A driver needs RAY_AUTH_MODE=disabled in its environment, or a token (RAY_AUTH_TOKEN) in that of both.
"""

import os
import sys
from typing import Any

OBJECT_STORE_BYTES = 300_000_000


def as_node(text: str) -> dict[str, Any]:
    cpus, _, rest = text.partition(":")
    gpus, _, labels = rest.partition(":")
    node: dict[str, Any] = {"num_cpus": float(cpus), "num_gpus": int(gpus or 0)}
    if labels:
        node["labels"] = dict(pair.split("=", 1) for pair in labels.split(","))
    return node | {"object_store_memory": OBJECT_STORE_BYTES}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=as_node(sys.argv[1]) | {"include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(**as_node(text)) for text in sys.argv[2:])]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add", text]:
                nodes.append(cluster.add_node(**as_node(text)))
            case ["kill", number]:
                cluster.remove_node(nodes[int(number)], allow_graceful=False)
            case ["quit"]:
                break
            case words:
                print(f"unknown: {' '.join(words)}; add CPUS:GPUS:LABELS, kill NUMBER, quit", file=sys.stderr)
        print(f"{len(nodes)} nodes", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
