"""What common indexes find for pictures and for captions: the trap into which tuning with pictures leads."""

from pathlib import Path

import faiss
import numpy as np

from retrieval_bench.comparison import exact_rows
from retrieval_bench.measures import K, recall, table

NUM_QUERIES = 500
INDEXES = (("IVF2048,Flat", "nprobe", 16), ("HNSW32", "efSearch", 64))


def show_the_trap(folder: Path, num_pictures: int) -> list[dict]:
    """Recall@10 of two indexes at a setting that is right for pictures."""
    pictures = np.array(np.load(folder / "pictures.npy", mmap_mode="r")[:num_pictures])
    asked = {
        "pictures": pictures[np.random.default_rng(1).integers(0, num_pictures, NUM_QUERIES)],
        "captions": np.load(folder / "held_out.npy")[:NUM_QUERIES],
    }
    exact = {name: exact_rows(folder, num_pictures, queries) for name, queries in asked.items()}
    found = []
    for key, setting, value in INDEXES:
        index = faiss.index_factory(pictures.shape[1], key, faiss.METRIC_INNER_PRODUCT)
        index.train(pictures[:: max(1, num_pictures // 131_072)])
        index.add(pictures)
        setattr(index.hnsw if key.startswith("HNSW") else index, setting, value)
        recalls = {name: recall(index.search(queries, K)[1], exact[name]) for name, queries in asked.items()}
        found.append({"index": f"{key} at {setting} {value}"} | recalls)
    rows = [[each["index"], f"{each['pictures']:.3f}", f"{each['captions']:.3f}"] for each in found]
    table([["recall@10", "pictures", "captions"], *rows])
    print(flush=True)
    return found
