"""Bytes that blocks take from node to node, with and without regard to where they lie. Needs Linux and root.

    python scripts/compare_locality.py [ITEMS]     # 2000: three minutes on two cores

A head without CPUs, and three nodes of four logical CPUs, each with a replica of both stages. The same items are
embedded twice: as a run does, where a block goes to the replica on its own node if that is free, and with that
preference switched off. Counted are the bytes of the blocks that a stage took on another node than they lay on, beside
the bytes of all that it took. The last line is one JSON document.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_runs import Items, write_items

import embedder
from cluster.nodes import NodeCluster
from corpus import DEMO_MODEL, write_config
from harness import MIB, environment, show

NUM_NODES, NODE_CPUS, NUM_STAGES, TIMEOUT_S = 3, 4, 2, 600
COLUMNS = {
    "locality": "{locality}",
    "moved, MiB": "{moved_mib:.1f}",
    "handed on, MiB": "{handed_on_mib:.1f}",
    "share": "{share:.2f}",
    "items/s": "{items_per_s:.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="?", type=int, default=2000)
    parser.add_argument("--name", default="locality", help="of the cluster, where several are up")
    parser.add_argument("--drive", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.config, is_on=options.drive == "on")
        return
    cluster = NodeCluster(options.name)
    with tempfile.TemporaryDirectory(prefix="compare-locality-") as root:
        try:
            address = cluster.start(NUM_NODES + 1, NODE_CPUS, head_cpus=0)
            source = write_items(Path(root, "items"), options.items, Items())
            rows = [run(cluster, Path(root), source, address, locality) for locality in ("on", "off")]
        finally:
            cluster.stop()
    show(rows, COLUMNS)
    print(json.dumps({"rows": rows}))


def run(cluster: NodeCluster, root: Path, source: Path, address: str, locality: str) -> dict:
    """Embed once; gives a row of the table."""
    settings = {"engine": "ray", "ray_address": address, "num_stages": NUM_STAGES, "batch_size": 16}
    settings |= {"decode.items_per_task": 16, "rows_per_part": 256, "index.build": False}
    config = write_config(root / f"{locality}.toml", DEMO_MODEL, root / f"store-{locality}", source, **settings)
    words = [sys.executable, __file__, "--drive", locality, "--config", str(config)]
    command = cluster.command(0, words)
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def drive(config: Path, *, is_on: bool) -> None:
    """Embed as a driver on the cluster; prints a row of the table."""
    from ray.data import DataContext

    DataContext.get_current().execution_options._actor_locality_enabled = is_on  # the public name only warns
    report = embedder.embed(embedder.load_config(config))
    moved = report.moved_bytes or 0
    steps = {step.step: step for step in report.steps}
    stages = ["decode", *(f"stage {number}" for number in range(NUM_STAGES - 1))]
    handed_on = sum(steps[name].bytes_out for name in stages)  # what the stages take
    row = {"locality": "on" if is_on else "off", "moved_mib": round(moved / MIB, 2)}
    row |= {"handed_on_mib": round(handed_on / MIB, 2), "share": round(moved / handed_on, 3)}
    print(json.dumps(row | {"items_per_s": round(report.steady_items_per_s or report.items_per_s, 2)}))


if __name__ == "__main__":
    main()
