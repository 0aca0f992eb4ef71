"""Our index beside those of other libraries, on vectors of many shapes; updates beside rebuilds, filtered beside exact.

    python scripts/bench_retrieval.py                                   # 300,000 hard vectors, beside FAISS's own
    python scripts/bench_retrieval.py --peers PYTHON ...                # interpreters that have the other libraries
    python scripts/bench_retrieval.py 200000 --peers PYTHON --shapes "all directions" matryoshka --only lorann scann
    python scripts/bench_retrieval.py 1000000 --changes                 # also updates and filters: half an hour

docs/index-building.md says what is measured, and how. Recall is by score: a row that is as near as the k-th of exact
search counts. Ours is measured before and after the others, and its mean counts. `fastest` is what is built where exact
search isn't fast enough by itself, `small` what keeps 2 ms. With --folder, what was made there is kept, and only
measured again. The last line is one JSON document.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
from retrieval_peers import PEERS, curve, recall_by_score
from vector_shapes import SHAPES, make_shape

from embedder.retrieval.filters import RowFilter
from embedder.retrieval.flat_index import ExactIndex
from harness import MIB, CommandFailedError, json_of, number, show, table
from index import constraints as index_constraints
from index import faiss_build
from index.build import build_index
from index.constraints import Constraints
from index.designs import parse_design
from index.manifest import Manifest
from index.search import open_index
from index.update import update_index

K, TURN = 10, 25
NUM_ASKED, NUM_HELD_OUT, MOST_NEAREST = 4000, 512, 100
MODEL = {"model_fingerprint": "hard vectors", "embeddings_version": 2}
OURS, SMALL_MS = ("fastest", "small"), 2.0
TIMEOUT_S = 1200.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS"), "1")
Find = Callable[[np.ndarray], np.ndarray]
"""Queries (Q, E) -> rows (Q, K)."""


def write_vectors(folder: Path, shape: str, num_images: int, dim: int) -> None:
    """Images, a tenth more to add later, captions to build with, and captions held out from everything."""
    num_more = max(1, num_images // 10)
    images, captions = make_shape(shape, num_images + num_more, NUM_ASKED + NUM_HELD_OUT, dim, seed=0)
    arrays = {"images": images[:num_images], "more": images[num_images:], "captions": captions[:NUM_ASKED]}
    arrays["held_out"] = captions[NUM_ASKED:]
    arrays["exact"] = exact_rows(arrays["images"], arrays["held_out"], min(MOST_NEAREST, num_images))
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def exact_rows(images: np.ndarray, queries: np.ndarray, k: int = K) -> np.ndarray:
    return faiss.knn(queries, np.ascontiguousarray(images), k, metric=faiss.METRIC_INNER_PRODUCT)[1]


def build_ours(name: str, folder: Path, recall: float) -> None:
    """Build the fastest design, where exact search isn't chosen unmeasured, or a small one within a latency."""
    index_constraints.DEFAULT_LATENCY_MS = 1e-6
    constraints = Constraints(recall=recall, latency_ms=SMALL_MS if name == "small" else None)
    images, captions = np.load(folder / "images.npy"), np.load(folder / "captions.npy")
    arguments = {"constraints": constraints, "queries": captions, "num_threads": 1, **MODEL}
    build_index(images, ids(0, len(images)), folder / name / "000001", **arguments)


def ids(start: int, stop: int) -> pa.Table:
    numbers = np.arange(start, stop)
    same = {"segment": np.zeros(len(numbers), np.int32), "run_id": np.full(len(numbers), "run-1")}
    return pa.table({"item_id": [f"{number:09d}" for number in numbers]} | same)


def measure_ours(name: str, folder: Path, k: int) -> dict:
    """Measure ours as the peers are, with all search parameters of its design."""
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
    """Build and measure ours and the peers, one after the other; ours are measured again at the end."""
    for name in OURS:
        if not (folder / name).exists():
            build_ours(name, folder, arguments.targets[0])
    found = {f"ours, {name}": measure_ours(name, folder, k) for name in OURS}
    for name in arguments.only:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        found[name] = measure_peer(name, arguments.peers, folder, k)
    for name in OURS:
        found[f"ours, {name}"]["curve_after"] = measure_ours(name, folder, k)["curve"]
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
    """How fast each of ours is, one query at a time, to the best peer at no more memory, and to the best of all."""
    ms = {name: each["at"][target]["ms"] for name, each in found.items() if each["at"]}
    peers = [name for name in ms if name in PEERS and ms[name]]
    rows = []
    for name in (f"ours, {name}" for name in OURS):
        row = {"ours": name, "recall": float(target)}
        small = [peer for peer in peers if found[peer]["bytes"] <= found[name]["bytes"]]
        for what, among in (("no_larger", small), ("all", peers)):
            best = min(among, key=ms.__getitem__, default=None)
            row |= {f"{what}_peer": best, f"{what}_ratio": ms[best] / ms[name] if best and ms[name] else None}
        rows.append(row)
    return rows


def show_comparison(found: Mapping[str, Any], targets: Sequence[float]) -> None:
    """Print a line for each contestant, and how ours compare with the best."""
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


def latencies_ms(contestants: Mapping[str, Find], queries: np.ndarray) -> dict[str, np.ndarray]:
    """Time of each query asked alone, in milliseconds.

    The contestants take turns of some queries: one that takes ten megabytes through the caches slows the next query.
    """
    times = {name: np.empty(len(queries)) for name in contestants}
    for first in range(0, len(queries), TURN):
        for name, find in contestants.items():
            find(queries[first : first + 1])
            for row in range(first, min(first + TURN, len(queries))):
                started = time.perf_counter()
                find(queries[row : row + 1])
                times[name][row] = (time.perf_counter() - started) * 1000
    return times


def compare_update(folder: Path) -> dict:
    """Add a tenth, remove a twentieth; neither time counts tuning, both count saving and the exact answers."""
    first, more, queries = (np.load(folder / f"{name}.npy") for name in ("images", "more", "held_out"))
    images = np.concatenate([first, more])
    mask = np.zeros(len(first), dtype=bool)
    mask[np.random.default_rng(4).choice(len(first), len(first) // 20, replace=False)] = True
    versions = [folder / "fastest" / f"{version:06d}" for version in (1, 2, 3)]
    print(f"updating: {len(more):,} added, {mask.sum():,} removed", flush=True)
    added_ids = ids(len(first), len(images))
    updated = update_index(versions[0], versions[1], more, added_ids, mask, embeddings_version=2)
    left = np.flatnonzero(~np.pad(mask, (0, len(more))))
    print(f"building {updated.design} of the same {len(left):,} rows", flush=True)
    rebuilt = build_index(
        images[left], ids(0, len(images)).take(pa.array(left)), versions[2], kind=updated.design,
        queries=np.load(folder / "captions.npy"), **MODEL,
    )  # fmt: skip
    last = np.einsum("qe,qe->q", images[left[exact_rows(images[left], queries)[:, -1]]], queries)
    found = {"update_s": untuned_s(updated), "rebuild_s": untuned_s(rebuilt)}
    found["times_faster"] = found["rebuild_s"] / found["update_s"]
    for name, version in (("updated", versions[1]), ("rebuilt", versions[2])):
        index = open_index(version)
        rows = np.array(index.ids["item_id"].to_pylist()).astype(np.int64)[index.search(queries, K).rows]
        found[f"{name}_recall"] = recall_by_score(rows, images, queries, last)
    show([found], {name: f"{{{name}:.3f}}" for name in found})
    return found


def untuned_s(manifest: Manifest) -> float:
    return manifest.build_s - manifest.steps_s["tune"] - manifest.steps_s.get("choose", 0.0)


# Shares of the rows that pass, and queries asked: a slow one takes a tenth of a second, and 99 % is of many.
SELECTIVITIES = {0.5: 200, 0.01: 500, 0.0001: 500}
FILTERING = ("ours", "exact", "bare")


def compare_filters(folder: Path) -> list[dict]:
    """Ask with three conditions, in turns, on one thread."""
    index = open_index(folder / "fastest" / "000001")
    images, held_out = np.load(folder / "images.npy"), np.load(folder / "held_out.npy")
    num_images = len(images)
    exact_index = ExactIndex(ids(0, num_images), images)
    prices = np.random.default_rng(5).random(num_images)
    rows = RowFilter(pa.table({"price": prices}))

    def contestants(where: str) -> dict[str, Find]:
        def bare(asked: np.ndarray) -> np.ndarray:
            passing = np.flatnonzero(rows.matching(where))
            return passing[faiss.knn(asked, images[passing], K, metric=faiss.METRIC_INNER_PRODUCT)[1]]

        return {
            "ours": lambda asked: index.search(asked, K, among=rows.matching(where), num_threads=1).rows,
            "exact": lambda asked: exact_index.search(asked, K, among=rows.matching(where)).rows,
            "bare": bare,
        }

    found = []
    for share, num_queries in SELECTIVITIES.items():
        finders, queries = contestants(f"price < {share}"), held_out[:num_queries]
        with faiss_build.threads(1):
            times = latencies_ms(finders, queries)
            exact = finders["bare"](queries)
            last = np.einsum("qe,qe->q", images[exact[:, -1]], queries)
            recall_at_10 = recall_by_score(finders["ours"](queries), images, queries, last)
        row = {"selectivity": share, "num_passing": int((prices < share).sum()), "recall_at_10": recall_at_10}
        row |= {f"{name}_p{q}_ms": float(np.percentile(times[name], q)) for name in FILTERING for q in (50, 99)}
        found.append(row)
    columns = {"selectivity": "{selectivity:.2%}", "rows": "{num_passing:,}", "recall@10": "{recall_at_10:.3f}"}
    columns |= {f"{name} p{q} ms": f"{{{name}_p{q}_ms:.2f}}" for name in FILTERING for q in (50, 99)}
    show(found, columns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_images", nargs="?", type=int, default=300_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["few directions"])
    parser.add_argument("--targets", nargs="+", type=float, default=[0.95, 0.9, 0.99], help="recalls; ours has the 1st")
    parser.add_argument("--k", nargs="+", type=int, default=[K])
    parser.add_argument("--peers", nargs="+", metavar="PYTHON", default=[sys.executable], help="interpreters to try")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="peers to measure")
    parser.add_argument("--folder", type=Path, help="where vectors and indexes are kept")
    parser.add_argument("--changes", action="store_true", help="also updates and filters, of the first shape")
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
            if arguments.changes and shape == arguments.shapes[0]:
                found |= {"filters": compare_filters(folder), "update": compare_update(folder)}
    print(json.dumps(found, default=str))


def machine() -> str:
    """The processor's name, and how many cores there are; one is used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"one core of {os.cpu_count()}, {model}, FAISS {faiss.__version__}"


if __name__ == "__main__":
    main()
