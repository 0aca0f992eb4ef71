"""Filtered search against exact search over what passes the filter; evaluating the filter counts in each.

Exact search is what a store without an index does, and beside it the bare loop that somebody would write with FAISS.
"""

from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa

from embedder.retrieval.filters import RowFilter
from embedder.retrieval.flat_index import ExactIndex
from embedder.store.tables.arrow_tensors import pack_vectors
from harness import show
from index import faiss_build
from index.search import open_index
from retrieval_bench.measures import Find, K, latencies_ms, recall
from retrieval_bench.processes import ids

# Shares of the rows that pass, and queries asked: a slow one takes a tenth of a second, and 99 % is of many.
SELECTIVITIES = {0.5: 200, 0.01: 1000, 0.0001: 1000}
CONTESTANTS = ("ours", "exact", "bare")


def compare_filters(folder: Path, num_images: int) -> list[dict]:
    """Ask with three conditions, in turns, on one thread."""
    index = open_index(folder / "index" / "000001")
    images = np.array(np.load(folder / "images.npy", mmap_mode="r")[:num_images])
    held_out = np.load(folder / "held_out.npy")
    column = pack_vectors(images, np.ones(num_images, bool))
    exact_index = ExactIndex(ids(0, num_images).append_column("image_embedding", column))
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
            recall_at_10 = recall(finders["ours"](queries), finders["bare"](queries))
        found.append(
            {
                "selectivity": share,
                "num_passing": int((prices < share).sum()),
                "recall_at_10": recall_at_10,
                **{f"{name}_p{q}_ms": float(np.percentile(times[name], q)) for name in CONTESTANTS for q in (50, 99)},
            }
        )
    columns = {"selectivity": "{selectivity:.2%}", "rows": "{num_passing:,}", "recall@10": "{recall_at_10:.3f}"}
    columns |= {f"{name} p{q} ms": f"{{{name}_p{q}_ms:.2f}}" for name in CONTESTANTS for q in (50, 99)}
    show(found, columns)
    return found
