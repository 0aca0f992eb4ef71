"""Steps of the benchmark, each in a process of its own: prints what it measured as one line of JSON.

python -m large_index_bench.steps build FOLDER '{"num_images": 200000, ...}'
"""

import json
import logging
import shutil
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from index.build import build_index
from index.constraints import Constraints
from index.search import open_index
from index.update import update_index
from large_index_bench.vectors import blocks
from retrieval_bench.measures import K, latencies_ms, recall

NUM_WARMING = 500
PASSING_SHARE = 1e-4
NUM_FILTERED = 100


def build(folder: Path, settings: dict) -> dict:
    """Build the index of the first images."""
    num_images, captions = settings["num_images"], np.load(folder / "captions.npy")
    shutil.rmtree(folder / "000001", ignore_errors=True)
    manifest = build_index(
        blocks(folder, settings["width"], 0, num_images),
        ids(0, num_images, "run-1"),
        folder / "000001",
        model_fingerprint="made vectors",
        embeddings_version=1,
        kind=settings["kind"],
        constraints=Constraints(settings["index_bytes"], settings["latency_ms"], settings["recall"]),
        queries=captions[settings["num_held_out"] :],
        build_bytes=settings["build_bytes"],
    )
    kept = ("design", "parameters", "recall_at_10", "latency_ms", "build_s", "steps_s", "memory_bytes", "size_bytes")
    trials = [trial.model_dump(exclude={"verdict", "is_efficient"}) for trial in manifest.trials]
    return manifest.model_dump(include=set(kept)) | {"trials": trials, "build_cpu_s": time.process_time()} | _peak()


def serve(folder: Path, settings: dict) -> dict:
    """Open the index, ask captions that it has not seen, one at a time, then through a filter."""
    faiss.omp_set_num_threads(1)
    started = time.perf_counter()
    index = open_index(folder / settings.get("version", "000001"))
    found = {"open_s": round(time.perf_counter() - started, 2)}
    held_out, exact = np.load(folder / "captions.npy")[: settings["num_held_out"]], np.load(folder / "exact.npy")
    for query in held_out[:NUM_WARMING]:
        index.search(query[None], K)
    asked = held_out[NUM_WARMING:]
    times = np.empty(len(asked))
    rows = np.empty((len(asked), K), np.int64)
    for number in range(len(asked)):
        started = time.perf_counter()
        rows[number] = index.search(asked[number : number + 1], K).rows[0]
        times[number] = (time.perf_counter() - started) * 1000
    found |= {"recall_at_10": round(recall(rows, exact[NUM_WARMING:]), 4), **_percentiles(times)}
    found["queries_per_s"] = round(1000 * len(times) / float(times.sum()), 1)
    if settings.get("filters", True):
        found["filter"] = filtered(folder, index, asked, settings)
    return found | _peak()


def filtered(folder: Path, index, asked: np.ndarray, settings: dict) -> dict:
    """Search through a filter that passes one row of ten thousand, beside exact search of those rows' float vectors."""
    num_images, width = settings["num_images"], settings["width"]
    wanted = max(K, int(num_images * PASSING_SHARE))
    passing = np.sort(np.random.default_rng(0).choice(num_images, wanted, replace=False)).astype(np.int64)
    images = np.memmap(folder / "images.f32", np.float32, "r", shape=(num_images, width))

    def ours(queries: np.ndarray) -> np.ndarray:
        return index.search(queries, K, among=passing).rows

    def exactly(queries: np.ndarray) -> np.ndarray:
        return passing[np.argsort(-(queries @ images[passing].T), axis=1, kind="stable")[:, :K]]

    times = latencies_ms({"ours": ours, "exact": exactly}, asked[:NUM_FILTERED])
    share = recall(ours(asked[:NUM_FILTERED]), exactly(asked[:NUM_FILTERED]))
    return {"num_passing": wanted, "recall_at_10": share, **{name: _percentiles(each) for name, each in times.items()}}


def update(folder: Path, settings: dict) -> dict:
    """Replace a hundredth of the images."""
    num_images, num_changed = settings["num_images"], settings["num_images"] // 100
    removed = np.zeros(num_images, bool)
    removed[np.random.default_rng(1).choice(num_images, num_changed, replace=False)] = True
    stop = num_images + num_changed
    out = folder / settings.get("version", "000002")
    shutil.rmtree(out, ignore_errors=True)
    manifest = update_index(
        folder / "000001",
        out,
        blocks(folder, settings["width"], num_images, stop),
        ids(num_images, stop, "run-2"),
        removed,
        embeddings_version=2,
    )
    return manifest.model_dump(include={"build_s", "steps_s", "recall_at_10"}) | _peak()


def ids(start: int, stop: int, run_id: str) -> pa.Table:
    """Ids of rows."""
    numbers = pc.utf8_lpad(pa.array(np.arange(start, stop)).cast(pa.string()), 10, "0")
    size = stop - start
    return pa.table({"item_id": numbers, "segment": np.zeros(size, np.int32), "run_id": pa.repeat(run_id, size)})


def _percentiles(times: np.ndarray) -> dict[str, float]:
    return {f"p{share}_ms": round(float(np.percentile(times, share)), 3) for share in (50, 99)}


def _peak() -> dict[str, int]:
    # Not `ru_maxrss`, which begins with that of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmHWM", "RssAnon")}
    return {"peak_rss_bytes": kib["VmHWM"] * 1024, "own_bytes": kib["RssAnon"] * 1024}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)
    step, folder, settings = sys.argv[1:]
    print(json.dumps({"build": build, "serve": serve, "update": update}[step](Path(folder), json.loads(settings))))
