"""Our index built, or one opened and searched, in a process of its own: prints how much memory that took, as JSON.

    python -m retrieval_bench.processes build FOLDER OUT NUM_IMAGES
    python -m retrieval_bench.processes resident FOLDER PATH EFFORT      # what it grows by; a thousand captions

PATH is the folder of ours, or a file of FAISS, which is searched with the effort.
"""

import json
import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import psutil
import pyarrow as pa

from index.build import build_index
from index.search import open_index

BLOCK = 65_536


def build(folder: Path, out: Path, num_images: int) -> dict:
    """Build our index of the first images."""
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    manifest = build_index(
        blocks(folder, np.arange(num_images)),
        ids(0, num_images),
        out,
        model_fingerprint="hard vectors",
        embeddings_version=1,
        queries=np.load(folder / "captions.npy"),
    )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak_bytes, "manifest": manifest.model_dump()}


def resident(folder: Path, path: Path, effort: int) -> dict:
    """Open an index and ask a thousand captions."""
    queries = np.load(folder / "held_out.npy")
    faiss.omp_set_num_threads(1)
    before = psutil.Process().memory_info().rss
    if path.is_dir():
        index = open_index(path)
        index.search(queries, 10, num_threads=1)
    else:
        index = faiss.read_index(str(path))
        index.hnsw.efSearch = effort
        index.search(queries, 10)
    return {"resident_bytes": psutil.Process().memory_info().rss - before}


def blocks(folder: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Images by their rows, block by block; the file is mapped only while a block is read."""
    for start in range(0, len(rows), BLOCK):
        yield np.load(folder / "images.npy", mmap_mode="r")[rows[start : start + BLOCK]]


def ids(start: int, stop: int) -> pa.Table:
    numbers = np.arange(start, stop)
    return pa.table(
        {
            "item_id": [f"{number:09d}" for number in numbers],
            "segment": np.zeros(len(numbers), np.int32),
            "run_id": np.full(len(numbers), "run-1"),
        }
    )


if __name__ == "__main__":
    what, folder, path, number = sys.argv[1:]
    print(json.dumps({"build": build, "resident": resident}[what](Path(folder), Path(path), int(number))))
