"""embedder's index compared with those of other libraries, on vectors of many shapes.

    python scripts/bench_retrieval.py                                   # 300,000 hard vectors, and FAISS's own
    python scripts/bench_retrieval.py --peers PYTHON ...                # interpreters that have the other libraries
    python scripts/bench_retrieval.py 200000 --peers PYTHON --shapes "all directions" matryoshka --only lorann scann

docs/index-building.md says what is measured, and how. Recall is by score: a row that is as near as the k-th of exact
search counts. embedder is measured before and after the others; its mean counts. `fastest` is what is built where exact
search isn't fast enough by itself, `small` what keeps 2 ms. With --folder, what was made there is kept, and only
measured again. The last line is one JSON document.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
from retrieval_peers import PEERS, curve
from vector_shapes import SHAPES, make_shape

from harness import MIB, CommandFailedError, json_of, number, table
from index import constraints as index_constraints
from index.build import build_index
from index.constraints import Constraints
from index.designs import parse_design
from index.search import open_index

K = 10
NUM_ASKED, NUM_HELD_OUT, MOST_NEAREST = 4000, 512, 100
MODEL = {"model_fingerprint": "hard vectors", "embeddings_version": 2}
OWN, SMALL_MS = ("fastest", "small"), 2.0
TIMEOUT_S = 1200.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS"), "1")


def write_vectors(folder: Path, shape: str, num_images: int, dim: int) -> None:
    """Images, captions to build with, and captions held out from everything, with the images nearest to each."""
    images, captions = make_shape(shape, num_images, NUM_ASKED + NUM_HELD_OUT, dim, seed=0)
    arrays = {"images": images, "captions": captions[:NUM_ASKED], "held_out": captions[NUM_ASKED:]}
    nearest = min(MOST_NEAREST, num_images)
    arrays["exact"] = faiss.knn(arrays["held_out"], images, nearest, metric=faiss.METRIC_INNER_PRODUCT)[1]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def build_own(name: str, folder: Path, recall: float) -> None:
    """Build the fastest design, where exact search isn't chosen unmeasured, or a small one within a latency."""
    index_constraints.DEFAULT_LATENCY_MS = 1e-6
    constraints = Constraints(recall=recall, latency_ms=SMALL_MS if name == "small" else None)
    images, captions = np.load(folder / "images.npy"), np.load(folder / "captions.npy")
    arguments = {"constraints": constraints, "queries": captions, "num_threads": 1, **MODEL}
    ids = {"item_id": [f"{number:09d}" for number in range(len(images))], "segment": np.zeros(len(images), np.int32)}
    build_index(images, pa.table(ids), folder / name / "000001", **arguments)


def measure_own(name: str, folder: Path, k: int) -> dict:
    """Measure embedder's index as the peers are, with all search parameters of its design."""
    index = open_index(folder / name / "000001")

    def find(asked: np.ndarray, k: int, effort: dict[str, int]) -> np.ndarray:
        return index.search(asked, k, parameters=effort or None, num_threads=1).rows

    manifest = index.manifest
    efforts = [[manifest.parameters], *parse_design(manifest.design).search_params()]
    kept = ("design", "parameters", "build_s", "steps_s", "recall_at_10", "trials", "missed")
    found = {"bytes": manifest.memory_bytes, "curve": curve((str, find), efforts, folder, k)}
    return manifest.model_dump(include=set(kept)) | found


def measure_peer(name: str, pythons: Sequence[str], folder: Path, k: int) -> dict:
    """Measure a peer with the first interpreter that has it; or the reason why there is nothing to measure."""
    found: dict = {"design": PEERS[name].design, "reason": "no interpreter"}
    for python in pythons:
        command = [python, Path(__file__).with_name("retrieval_peers.py"), name, folder, str(k)]
        try:
            return json_of(command, TIMEOUT_S, **ONE_THREAD)
        except CommandFailedError as error:
            found["reason"] = str(error).splitlines()[-1]
        if "PackageNotFoundError" not in found["reason"]:
            break
    return found


def compare(folder: Path, k: int, arguments: argparse.Namespace) -> dict:
    """Build and measure embedder's and the peers, one after the other; embedder's are measured again at the end."""
    for name in OWN:
        if not (folder / name).exists():
            build_own(name, folder, arguments.targets[0])
    found = {f"embedder, {name}": measure_own(name, folder, k) for name in OWN}
    for name in arguments.only:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        found[name] = measure_peer(name, arguments.peers, folder, k)
    for name in OWN:
        found[f"embedder, {name}"]["curve_after"] = measure_own(name, folder, k)["curve"]
    for each in found.values():
        each["at"] = {str(target): figures_at(each, target) for target in arguments.targets if "curve" in each}
    return {"contestants": found, "ratios": ratios(found, str(arguments.targets[0]))}


def figures_at(contestant: Mapping[str, Any], target: float) -> dict[str, float | None]:
    """Milliseconds of a query, and of one in a batch, at a recall; the mean of what was measured twice."""
    curves = [contestant[name] for name in ("curve", "curve_after") if name in contestant]
    found: dict[str, float | None] = {}
    for name in ("ms", "batch_ms"):
        each = [cost_at([(point["recall"], point[name]) for point in points], target) for points in curves]
        known = [value for value in each if value is not None]
        found[name] = float(np.mean(known)) if known else None
    return found


def cost_at(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The least cost at a recall, between the nearest two (recall, cost) that none betters; None out of reach."""
    best: list[tuple[float, float]] = []
    for recall, cost in sorted(points, key=lambda point: (point[1], -point[0])):
        if not best or recall > best[-1][0]:
            best.append((recall, cost))
    if not best or best[-1][0] < target:
        return None
    recalls, costs = zip(*best, strict=True)
    return float(np.exp(np.interp(target, recalls, np.log(costs))))


def ratios(found: Mapping[str, dict], target: str) -> list[dict]:
    """How fast each of embedder's is, a query at a time, to the best peer at no more memory, and to the best of all."""
    ms = {name: each["at"][target]["ms"] for name, each in found.items() if each["at"]}
    peers = [name for name in ms if name in PEERS and ms[name]]
    rows = []
    for name in (f"embedder, {name}" for name in OWN):
        row = {"ours": name, "recall": float(target)}
        small = [peer for peer in peers if found[peer]["bytes"] <= found[name]["bytes"]]
        for what, among in (("no_larger", small), ("all", peers)):
            best = min(among, key=ms.__getitem__, default=None)
            row |= {f"{what}_peer": best, f"{what}_ratio": ms[best] / ms[name] if best and ms[name] else None}
        rows.append(row)
    return rows


def show_comparison(found: Mapping[str, Any], targets: Sequence[float]) -> None:
    """Print a line for each contestant, and how embedder's compare with the best."""
    rows: list[list[str]] = [["", "design", *(f"ms at {target}" for target in targets), "in batches", "MiB", "build s"]]
    for name, each in found["contestants"].items():
        at = [each["at"].get(str(target), {}) for target in targets]
        row = [name, each.get("reason", each["design"])[-60:], *(number(figures.get("ms"), 3) for figures in at)]
        sizes = [number(each.get("bytes", 0) / MIB or None, 0), number(each.get("build_s"), 0)]
        rows.append([*row, number(at[0].get("batch_ms"), 3), *sizes])
    table(rows)
    for each in found["ratios"]:
        no_larger, of_all = (number(each[f"{what}_ratio"], 2) for what in ("no_larger", "all"))
        print(f"{each['ours']}: {no_larger} times the best peer at no more memory ({each['no_larger_peer']}), "
              f"{of_all} times the best ({each['all_peer']})", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_images", nargs="?", type=int, default=300_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["few directions"])
    parser.add_argument("--targets", nargs="+", type=float, default=[0.95, 0.9, 0.99], help="embedder has the 1st")
    parser.add_argument("--k", nargs="+", type=int, default=[K])
    parser.add_argument("--peers", nargs="+", metavar="PYTHON", default=[sys.executable], help="interpreters to try")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="peers to measure")
    parser.add_argument("--folder", type=Path, help="where vectors and indexes are kept")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    faiss.omp_set_num_threads(1)
    place = tempfile.TemporaryDirectory(prefix="bench-retrieval-") if arguments.folder is None else None
    with place or nullcontext(arguments.folder) as name:
        found = {"machine": machine(), "arguments": vars(arguments), "shapes": {}}
        for shape in arguments.shapes:
            folder = Path(name) / f"{shape} {arguments.num_images} {arguments.dim}".replace(" ", "-")
            if not folder.exists():
                folder.mkdir(parents=True)
                write_vectors(folder, shape, arguments.num_images, arguments.dim)
            for k in arguments.k:
                print(f"{shape}: {arguments.num_images:,} x {arguments.dim}, k = {k}, {found['machine']}", flush=True)
                found["shapes"][f"{shape}, k = {k}"] = compared = compare(folder, k, arguments)
                show_comparison(compared, arguments.targets)
    print(json.dumps(found, default=str))


def machine() -> str:
    """The processor's name, and how many cores there are; one is used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"one core of {os.cpu_count()}, {model}, FAISS {faiss.__version__}"


if __name__ == "__main__":
    main()
