"""FAISS, and the only module that imports it; others import this one inside functions.

Source: faiss-cpu 1.15. Search parameters travel with each call, so one index serves many threads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np

from index.choose import TRAINING_VECTORS_PER_LIST, IndexChoice
from index.vectors import Floats, Rows, VectorTable

VERSION: str = faiss.__version__
TRAINING_SEED = 0
READ_BYTES = 8 << 20


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Let FAISS use so many threads inside the block; None leaves it as it is (all cores)."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def build(choice: IndexChoice, table: VectorTable) -> faiss.Index:
    """Make the chosen index and put every vector of the table into it, in order.

    With one thread the same table gives the same index, byte for byte; several threads link an HNSW graph in any order.
    """
    index = _make(choice, table.dim)
    if not index.is_trained:
        num_training = TRAINING_VECTORS_PER_LIST * choice.build["num_lists"]
        index.train(table.take(table.sample(num_training, TRAINING_SEED)))
    for block in table.blocks():
        index.add(np.ascontiguousarray(block))
    return index


def _make(choice: IndexChoice, dim: int) -> faiss.Index:
    if choice.kind == "flat":
        return faiss.IndexFlatIP(dim)
    if choice.kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, choice.build["links"], faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = choice.build["ef_construction"]
        return index
    quantizer = faiss.IndexFlatIP(dim)
    index = faiss.IndexIVFFlat(quantizer, dim, choice.build["num_lists"], faiss.METRIC_INNER_PRODUCT)
    index.cp.spherical = True  # centroids of unit norm, as the vectors are
    index.cp.min_points_per_centroid = 1  # a handful of vectors is no reason for a warning on standard error
    return index


def search(index: faiss.Index, queries: Floats, k: int, parameters: Mapping[str, int]) -> tuple[Floats, Rows]:
    """Find the k nearest rows: scores and row numbers, (Q, k), best first; row -1 where the index found none.

    Args:
        index: any that `build` makes.
        queries: (Q, E) float32, C-contiguous.
        k: at least 1, at most the number of vectors.
        parameters: may hold `ef_search` (HNSW) or `nprobe` (IVF); others are ignored.
    """
    return _search(index, queries, k, _search_parameters(index, parameters))


def search_exactly(index: faiss.Index, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """Find the k nearest rows by comparing each query with every vector of the same index."""
    if isinstance(index, faiss.IndexHNSW):
        return _search(index.storage, queries, k, None)
    if isinstance(index, faiss.IndexIVF):
        return _search(index, queries, k, faiss.SearchParametersIVF(nprobe=index.nlist))
    return _search(index, queries, k, None)


def _search_parameters(index: faiss.Index, parameters: Mapping[str, int]) -> faiss.SearchParameters | None:
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=parameters["ef_search"])
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
    return None


def _search(
    index: faiss.Index, queries: Floats, k: int, parameters: faiss.SearchParameters | None
) -> tuple[Floats, Rows]:
    scores, rows = index.search(queries, k, params=parameters)
    return scores, rows


def nearest_in_table(table: VectorTable, queries: Floats, k: int) -> Rows:
    """Find the k nearest rows of a table by brute force, streaming it: (Q, k) row numbers, best first."""
    best_scores = np.empty((len(queries), 0), dtype=np.float32)
    best_rows = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for block in table.blocks():
        scores, rows = faiss.knn(
            queries, np.ascontiguousarray(block), min(k, len(block)), metric=faiss.METRIC_INNER_PRODUCT
        )
        scores, rows = np.hstack([best_scores, scores]), np.hstack([best_rows, rows + start])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best_scores, best_rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        start += len(block)
    return best_rows


def write(index: faiss.Index, path: Path) -> None:
    """Write the index file."""
    faiss.write_index(index, str(path))


def read(file: BinaryIO) -> faiss.Index:
    """Read an index from an open file, whose content the caller has checked: an index file is code.

    Raises:
        RuntimeError: FAISS does not know the format.
    """
    return faiss.read_index(faiss.PyCallbackIOReader(file.read, READ_BYTES))
