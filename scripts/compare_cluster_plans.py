"""Plan of a cluster whose nodes differ against the even cut: two nodes, one held to half a core. Needs Linux and root.

    python scripts/compare_cluster_plans.py [SECONDS] [--name NAME]     # 60 s a run: five minutes on two quiet cores

A head without CPUs, where the driver runs, and two nodes of a core each, one of them with a quota of half of it
(control groups). `embedder plan --cluster` measures a ViT-S/16 with a text tower on both and plans two stages; then the
plan runs, and after it the cut that a run makes without a plan, equal operations for each stage, one stage on each
node. Rates are those under way, without the start of the processes. Two promises: the run reaches what was predicted
within 20 %, and at least 1.3 times the even cut. The bound is the cores: with all of one and a half busy, 1.5 times a
cut that leaves half of the whole core idle. The last line is one JSON document.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_runs import Items, write_items

from cluster.nodes import NodeCluster
from corpus import make_model
from harness import EMBEDDER, environment, number, show
from shards.config import load_model_config
from shards.plan import ShardPlan, plan_shards

PROMISE, GAIN = 0.20, 1.3
CORES = {"whole": 1.0, "half": 0.5}
NUM_STAGES, BATCH_SIZE = 2, 8
TIMEOUT_S = 900
COLUMNS = {
    "plan": "{plan}",
    "stages": "{stages}",
    "items/s": "{items_per_s:.2f}",
    "predicted": "{predicted}",
    "items": "{num_items}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60.0, help="of each run, as predicted")
    parser.add_argument("--depth", type=int, default=12, help="layers of each tower, to try it out")
    parser.add_argument("--name", default="unlike", help="of the cluster, where several are up")
    options = parser.parse_args()
    cluster = NodeCluster(options.name)
    with tempfile.TemporaryDirectory(prefix="compare-cluster-plans-") as root:
        try:
            cluster.start(1, cpus=0)
            for number, (label, cores) in enumerate(CORES.items(), start=1):
                cluster.add(number, cpus=1, ray=[f"--labels=type={label}"], cores=cores)
            rows = compare(cluster, Path(root), options.seconds, options.depth)
        finally:
            cluster.stop()
    show(rows, COLUMNS)
    planned, even = (row["items_per_s"] for row in rows)
    found = {
        "rows": rows,
        "error": round(float(rows[0]["predicted"]) / planned - 1, 3),
        "gain": round(planned / even, 3),
    }
    print(json.dumps(found | {"within_promise": abs(found["error"]) <= PROMISE and found["gain"] >= GAIN}))


def compare(cluster: NodeCluster, root: Path, seconds: float, depth: int) -> list[dict]:
    """Plan, and run both plans."""
    square = {"width": 384, "num_heads": 6}
    text = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "embedding_size": 128}
    vision = {"image_size": 224, "patch_size": 16, "depth": depth, **square}
    model = make_model(root / "vit-s", vision, text | {"num_hidden_layers": depth})
    planned = root / "planned.json"
    found = on_head(
        cluster, root, ["plan", "--cluster", "--explain", "--stages", str(NUM_STAGES), "--out", planned], model
    )
    print("\n".join(found["node_types"]), flush=True)
    even = even_plan(ShardPlan.from_json(planned.read_text()), model)
    (root / "even.json").write_text(even.to_json())
    rows = []
    for name, plan in (("planned", ShardPlan.from_json(planned.read_text())), ("even", even)):
        predicted = found["items_per_s"] if name == "planned" else found["items_per_s"] / GAIN
        source = write_items(root / f"in-{name}", max(64, int(seconds * predicted)), Items())
        words = ["embed", source, "--store", root / f"store-{name}", "--plan", root / f"{name}.json", "--engine", "ray"]
        report = on_head(cluster, root, [*words, "--set", "index.build=false"], model)
        rows.append(
            {
                "plan": name,
                "stages": " | ".join(
                    f"{stage.device} {len(stage.spec.vision)}+{len(stage.spec.text)}" for stage in plan.stages
                ),
                "items_per_s": report["steady_items_per_s"] or report["items_per_s"],
                "predicted": number(found["items_per_s"] if name == "planned" else None, 2),
                "num_items": report["num_items"],
            }
        )
    return rows


def even_plan(planned: ShardPlan, model: Path) -> ShardPlan:
    """The cut that a run makes without a plan, one stage on each node."""
    cut = plan_shards(load_model_config(model), NUM_STAGES, model_fingerprint=planned.model_fingerprint)
    placed = zip(cut.stages, CORES, strict=True)
    stages = tuple(replace(stage, device=label, num_gpus=0.0, num_threads=1) for stage, label in placed)
    return replace(cut, stages=stages)


def on_head(cluster: NodeCluster, root: Path, words: Sequence[object], model: Path) -> dict:
    """Run a command of the package on the head; gives its JSON document."""
    settings = ["--set", "cluster.type_label=type", "--set", f"batch_size={BATCH_SIZE}"]
    shared = ["--model", model, "--ray-address", cluster.address, *settings, "--json"]
    command = cluster.command(0, [*map(str, EMBEDDER), *map(str, [*words, *shared])])
    variables = environment() | {"XDG_CACHE_HOME": str(root / "cache")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, env=variables, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
