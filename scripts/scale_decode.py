"""Items a second against the number of decode CPUs: large photographs, a small model. Needs Linux and root.

    python scripts/scale_decode.py [NODES [SECONDS]]    # 5 decode nodes, 40 s each: eight minutes on two quiet cores

A head without CPUs, a node for the one stage, and decode nodes of one logical CPU, of which each run has one more. The
nodes are held to parts of a core (control groups) once the run is under way: the stage's to `STAGE_CORES`, each decode
node to `DECODE_CORES`. Each image is a JPEG of twelve megapixels. The rate has to rise with the decode CPUs until the
stage binds. The prediction is made from the first run's CPU seconds of an item: the lesser of what the decode nodes and
the stage's node can do. Its bound is what else the nodes' cores do, Ray's own processes. The last line is one JSON
document.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from cluster.nodes import NodeCluster
from corpus import encode, make_model, write_config, write_pairs
from harness import EMBEDDER, environment, show
from shards.config import load_model_config
from shards.plan import plan_shards

STAGE_CORES, DECODE_CORES = 0.22, 0.2
MEGAPIXELS, NUM_ORIGINALS, NUM_ITEMS = (4000, 3000), 4, 6000
STAGE_NODE, ROWS = 1, 16
WAIT_S, PERIOD_S = 300.0, 1.0
STAGE_LABEL, DECODE_LABEL = "stage", "decode"
COLUMNS = {
    "decode CPUs": "{num_decode}",
    "items/s": "{items_per_s:.2f}",
    "predicted": "{predicted:.2f}",
    "gain": "{gain:.2f}",
    "bound by": "{bound}",
}


@dataclass(frozen=True)
class Entry:
    """One finished write task."""

    decoded_s: float  # Unix time at which decoding its items began
    ended_s: float  # Unix time
    num_items: int  # that it wrote
    cpu_s: dict[str, float]  # CPU seconds of each step, by name, for all of its items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="?", type=int, default=5, help="decode nodes, at most")
    parser.add_argument("seconds", nargs="?", type=float, default=40.0, help="of each run, once it is under way")
    parser.add_argument("--name", default="decoders", help="of the cluster, where several are up")
    options = parser.parse_args()
    cluster = NodeCluster(options.name)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="scale-decode-") as name:
        root = Path(name)
        config = prepare(root)
        try:
            for num_decode in range(1, options.nodes + 1):
                start(cluster, num_decode)
                entries = run(cluster, config, root / f"store-{num_decode}", num_decode, options.seconds)
                rows.append(as_row(num_decode, entries, rows))
        finally:
            cluster.stop()
    show(rows, COLUMNS)
    print(json.dumps({"rows": rows, "gain": max(row["gain"] for row in rows)}))


def prepare(root: Path) -> Path:
    """Make photographs, a model and a configuration; gives the latter's path."""
    rng = np.random.default_rng(0)
    photographs = [(photograph(rng), ".jpg", f"photograph {number}") for number in range(NUM_ORIGINALS)]
    source = write_pairs(root / "photographs", NUM_ITEMS, photographs)
    vision = {"image_size": 64, "patch_size": 8, "width": 192, "depth": 10, "num_heads": 3}
    text = {"embedding_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = make_model(root / "model", vision, text | {"intermediate_size": 128})
    cut = plan_shards(load_model_config(model), 1)
    stage = replace(cut.stages[0], device=STAGE_LABEL, num_gpus=0.0, num_threads=1)
    plan = root / "plan.json"
    plan.write_text(replace(cut, stages=(stage,)).to_json())
    settings = {"batch_size": ROWS, "rows_per_part": ROWS, "decode.items_per_task": ROWS, "decode.num_cpus": 1}
    settings |= {"engine": "ray", "plan": str(plan), "cluster.type_label": "type", "index.build": False}
    return write_config(root / "run.toml", model, root / "store", source, **settings)


def photograph(rng: np.random.Generator) -> bytes:
    """A JPEG of twelve megapixels, with as much detail as a camera's."""
    coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).resize(MEGAPIXELS, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 8, (MEGAPIXELS[1], MEGAPIXELS[0], 1))
    return encode(Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)), "JPEG", quality=85)


def start(cluster: NodeCluster, num_decode: int) -> None:
    """Start the nodes, not yet held to their parts of a core."""
    cluster.start(1, cpus=0)
    cluster.add(STAGE_NODE, cpus=1, ray=[f"--labels=type={STAGE_LABEL}"], cores=1)
    for number in range(num_decode):
        cluster.add(STAGE_NODE + 1 + number, cpus=1, ray=[f"--labels=type={DECODE_LABEL}"], cores=1)


def run(cluster: NodeCluster, config: Path, store: Path, num_decode: int, seconds: float) -> list[Entry]:
    """Embed for some seconds on held nodes; gives the write tasks that ended in that time."""
    words = ["embed", "--config", config, "--store", store, "--ray-address", cluster.address]
    log = store.parent / f"{store.name}.log"
    command = cluster.command(0, [*map(str, EMBEDDER), *map(str, words)])
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())

    def wait_for(is_so: Callable[[], bool]) -> None:
        deadline_s = time.time() + WAIT_S
        while not is_so():
            if process.poll() is not None or time.time() > deadline_s:
                raise SystemExit(f"the run did not go on: {log.read_text()[-2000:]}")
            time.sleep(0.5)

    try:
        wait_for(lambda: bool(read_entries(store)))
        cluster.hold(STAGE_NODE, STAGE_CORES)
        for number in range(num_decode):
            cluster.hold(STAGE_NODE + 1 + number, DECODE_CORES)
        # What was decoded ahead before doesn't count.
        held_s = time.time() + PERIOD_S
        wait_for(lambda: span(read_entries(store, held_s)) >= seconds)
    finally:
        process.kill()
        process.wait()
    return read_entries(store, held_s)


def read_entries(store: Path, since_s: float = 0.0) -> list[Entry]:
    """Read the finished write tasks whose items were decoded since then, in the order of their ends."""
    found = []
    for path in store.glob("runs/*/journal/*.json"):
        entry = json.loads(path.read_text())
        cpu_s: defaultdict[str, float] = defaultdict(float)
        for measured in entry["trace"]:
            cpu_s[measured["step"]] += measured["cpu_s"]
        decoded_s = min(measured["started_s"] for measured in entry["trace"] if measured["step"] == "decode")
        if decoded_s >= since_s:
            found.append(Entry(decoded_s, path.stat().st_mtime, entry["num_items"], dict(cpu_s)))
    return sorted(found, key=lambda entry: entry.ended_s)


def span(entries: Sequence[Entry]) -> float:
    """Seconds from the first entry to the last."""
    return entries[-1].ended_s - entries[0].ended_s if entries else 0.0


def as_row(num_decode: int, entries: list[Entry], rows: list[dict]) -> dict:
    """Rate of a run beside its prediction, which is made from the first one's CPU seconds."""
    items_per_s = sum(entry.num_items for entry in entries[1:]) / span(entries)
    costs = rows[0]["cpu_s_per_item"] if rows else {step: per_item(entries, step) for step in ("decode", "stage 0")}
    limits = {"decode": num_decode * DECODE_CORES / costs["decode"], "stage": STAGE_CORES / costs["stage 0"]}
    bound = min(limits, key=limits.__getitem__)
    return {
        "num_decode": num_decode,
        "items_per_s": round(items_per_s, 3),
        "predicted": round(limits[bound], 3),
        "gain": round(items_per_s / (rows[0]["items_per_s"] if rows else items_per_s), 3),
        "bound": bound,
        "cpu_s_per_item": costs,
    }


def per_item(entries: Sequence[Entry], step: str) -> float:
    """CPU seconds of a step for one item."""
    return sum(entry.cpu_s.get(step, 0.0) for entry in entries) / sum(entry.num_items for entry in entries)


if __name__ == "__main__":
    main()
