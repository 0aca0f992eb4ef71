"""Filtered search against exact search over what passes the filter; evaluating the filter counts in both."""

from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa

from embedder.retrieval.filters import RowFilter
from index import engine
from index.search import open_index
from retrieval_bench.measures import K, latencies_ms, recall, table

SELECTIVITIES = (0.5, 0.01, 0.0001)
NUM_QUERIES = 400


def compare_filters(folder: Path, num_pictures: int) -> list[dict]:
    """Ask with three conditions, ours and exact search in turns, on one thread."""
    index = open_index(folder / "index" / "000001")
    pictures = np.array(np.load(folder / "pictures.npy", mmap_mode="r")[:num_pictures])
    queries = np.load(folder / "held_out.npy")[:NUM_QUERIES]
    prices = np.random.default_rng(5).random(num_pictures)
    rows = RowFilter(pa.table({"price": prices}))
    found = []
    for share in SELECTIVITIES:
        where = f"price < {share}"

        def ours(asked: np.ndarray, where: str = where) -> np.ndarray:
            return index.search(asked, K, among=rows.matching(where), num_threads=1).rows

        def exact(asked: np.ndarray, where: str = where) -> np.ndarray:
            passing = np.flatnonzero(rows.matching(where))
            return passing[faiss.knn(asked, pictures[passing], K, metric=faiss.METRIC_INNER_PRODUCT)[1]]

        with engine.threads(1):
            times = latencies_ms({"ours": ours, "exact": exact}, queries)
            recall_at_10 = recall(ours(queries), exact(queries))
        found.append(
            {
                "selectivity": share,
                "num_passing": int((prices < share).sum()),
                "recall_at_10": recall_at_10,
                **{f"{name}_p{q}_ms": float(np.percentile(each, q)) for name, each in times.items() for q in (50, 99)},
            }
        )
    heading = ["selectivity", "rows", "recall@10", "ours p50 ms", "ours p99", "exact p50 ms", "exact p99"]
    lines = [
        [
            f"{each['selectivity']:.2%}",
            f"{each['num_passing']:,}",
            f"{each['recall_at_10']:.3f}",
            *(f"{each[f'{name}_p{q}_ms']:.2f}" for name in ("ours", "exact") for q in (50, 99)),
        ]
        for each in found
    ]
    table([heading, *lines])
    return found
