"""Filtered search against exact search over what passes the filter; evaluating the filter counts in each.

Exact search is what a store without an index does, and beside it the bare loop that somebody would write with FAISS.
"""

from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa

from embedder.retrieval.filters import RowFilter
from embedder.retrieval.flat_index import ExactIndex
from embedder.store.arrow_tensors import pack_vectors
from index import faiss_build
from index.search import open_index
from retrieval_bench.build_ours import ids
from retrieval_bench.measures import K, latencies_ms, recall, table

# Shares of the rows that pass, and queries asked: a slow one takes a tenth of a second, and 99 % is of many.
SELECTIVITIES = {0.5: 200, 0.01: 1000, 0.0001: 1000}


def compare_filters(folder: Path, num_pictures: int) -> list[dict]:
    """Ask with three conditions, in turns, on one thread."""
    index = open_index(folder / "index" / "000001")
    pictures = np.array(np.load(folder / "pictures.npy", mmap_mode="r")[:num_pictures])
    held_out = np.load(folder / "held_out.npy")
    column = pack_vectors(pictures, np.ones(num_pictures, bool))
    exact_index = ExactIndex(ids(0, num_pictures).append_column("image_embedding", column))
    prices = np.random.default_rng(5).random(num_pictures)
    rows = RowFilter(pa.table({"price": prices}))
    found = []
    for share, num_queries in SELECTIVITIES.items():
        where, queries = f"price < {share}", held_out[:num_queries]

        def ours(asked: np.ndarray, where: str = where) -> np.ndarray:
            return index.search(asked, K, among=rows.matching(where), num_threads=1).rows

        def exact(asked: np.ndarray, where: str = where) -> np.ndarray:
            return exact_index.search(asked, K, among=rows.matching(where)).rows

        def bare(asked: np.ndarray, where: str = where) -> np.ndarray:
            passing = np.flatnonzero(rows.matching(where))
            return passing[faiss.knn(asked, pictures[passing], K, metric=faiss.METRIC_INNER_PRODUCT)[1]]

        contestants = {"ours": ours, "exact": exact, "bare": bare}
        with faiss_build.threads(1):
            times = latencies_ms(contestants, queries)
            recall_at_10 = recall(ours(queries), bare(queries))
        found.append(
            {
                "selectivity": share,
                "num_passing": int((prices < share).sum()),
                "recall_at_10": recall_at_10,
                **{f"{name}_p{q}_ms": float(np.percentile(each, q)) for name, each in times.items() for q in (50, 99)},
            }
        )
    heading = ["selectivity", "rows", "recall@10", *(f"{name} {q} ms" for name in times for q in ("p50", "p99"))]
    lines = [
        [
            f"{each['selectivity']:.2%}",
            f"{each['num_passing']:,}",
            f"{each['recall_at_10']:.3f}",
            *(f"{each[f'{name}_p{q}_ms']:.2f}" for name in times for q in (50, 99)),
        ]
        for each in found
    ]
    table([heading, *lines])
    return found
