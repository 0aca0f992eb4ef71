"""FAISS: make, train, fill, write and read an index.

Only this module and `faiss_search`, `faiss_scan`, `faiss_parts` import it; others import these inside functions.
Source: faiss-cpu 1.15.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np

from index.designs import HNSW_EF_CONSTRUCTION, Design
from index.errors import RetrievalError
from index.vectors import Floats, Rows, VectorTable

VERSION: str = faiss.__version__
TRAINING_SEED = 0
READ_BYTES = 8 << 20
OPQ_ROUNDS = 10
OPQ_TRAINING_VECTORS = 16_384


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Let FAISS use so many threads inside the block; None leaves it as it is (all cores)."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def build(design: Design, table: VectorTable, projection: Floats | None = None) -> faiss.Index:
    """Make an index of the design and put every vector of the table into it, in order.

    With one thread the same table gives the same index, byte for byte; several threads link an HNSW graph in any order.

    Args:
        design: what to make.
        table: the vectors, (N, E).
        projection: (width, E), where the design has one.
    """
    index = train(design, table, projection)
    add(index, table.blocks())
    return index


def train(design: Design, table: VectorTable, projection: Floats | None = None) -> faiss.Index:
    """Make an index of the design that knows the table's distribution, and holds nothing yet.

    Raises:
        RetrievalError: FAISS can't make or train it for this table.
    """
    index = _make(design, table.dim, projection)
    if index.is_trained:
        return index
    try:
        index.train(table.take(table.sample(design.num_training, TRAINING_SEED)))
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rsplit(": ", maxsplit=1)[-1]
        raise RetrievalError(
            f"index design {design}: FAISS {VERSION} can't train it on {table.num_vectors:,} vectors ({reason}); "
            "choose another"
        ) from None
    return index


def add(index: faiss.Index, blocks: Iterable[Floats]) -> None:
    """Put vectors behind those that are there."""
    for block in blocks:
        index.add(np.ascontiguousarray(block))


def _make(design: Design, dim: int, projection: Floats | None) -> faiss.Index:
    width = design.projection or dim
    try:
        index = faiss.index_factory(width, design.factory, faiss.METRIC_INNER_PRODUCT)
        rerank = faiss.index_factory(dim, design.rerank, faiss.METRIC_INNER_PRODUCT) if design.rerank else None
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rsplit(": ", maxsplit=1)[-1]
        raise RetrievalError(
            f"index design {design}: FAISS {VERSION} can't make it for {dim} dimensions ({reason}); choose another"
        ) from None
    _set_up(index)
    if projection is not None:
        index = _projecting(_linear(projection), index)
    return index if rerank is None else _reranking(index, rerank)


def _set_up(index: faiss.Index) -> None:
    if isinstance(index, faiss.IndexPreTransform):
        rotation = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(rotation, faiss.OPQMatrix):  # the defaults take minutes, and gain little
            rotation.niter, rotation.max_train_points = OPQ_ROUNDS, OPQ_TRAINING_VECTORS
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    if isinstance(inner, faiss.IndexIVF):
        inner.cp.min_points_per_centroid = 1  # a handful of vectors is no reason for a warning on standard error


def _linear(projection: Floats) -> faiss.LinearTransform:
    width, dim = projection.shape
    linear = faiss.LinearTransform(dim, width, False)
    faiss.copy_array_to_vector(projection.ravel(), linear.A)
    linear.is_trained = True
    return linear


def _projecting(linear: faiss.LinearTransform, index: faiss.Index) -> faiss.Index:
    """Let an index see projections; what is made frees its parts, as one that was read from a file does."""
    made = faiss.IndexPreTransform(linear, index)
    linear.this.disown()
    index.this.disown()
    made.own_fields = True
    return made


def _reranking(index: faiss.Index, rerank: faiss.Index) -> faiss.Index:
    """Let the best of an index be scored again by another; what is made frees both."""
    made = faiss.IndexRefine(index, rerank)
    index.this.disown()
    rerank.this.disown()
    made.own_fields = made.own_refine_index = True
    return made


def innermost(index: faiss.Index) -> faiss.Index:
    """Give the structure inside re-ranking and projection."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return innermost(index.base_index)
    if isinstance(index, faiss.IndexPreTransform):
        return innermost(index.index)
    return index


def nearest_in_table(table: VectorTable, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """Find the k nearest rows of a table by brute force, streaming it: scores and rows, (Q, k), best first."""
    best_scores = np.empty((len(queries), 0), dtype=np.float32)
    best_rows = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for block in table.blocks():
        scores, rows = nearest(queries, np.ascontiguousarray(block), min(k, len(block)))
        scores, rows = np.hstack([best_scores, scores]), np.hstack([best_rows, rows + start])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best_scores, best_rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        start += len(block)
    return best_scores, best_rows


def nearest(queries: Floats, vectors: Floats, k: int) -> tuple[Floats, Rows]:
    """Find the k nearest of some vectors by brute force: scores and rows, (Q, k), best first."""
    scores, rows = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


def imbalance(index: faiss.Index) -> float:
    """How unevenly inverted lists are filled: 1.0 for evenly, and as many times slower a search is; 1.0 for others."""
    inner = innermost(index)
    return float(inner.invlists.imbalance_factor()) if isinstance(inner, faiss.IndexIVF) else 1.0


def num_bytes(index: faiss.Index) -> int:
    """Count the bytes that an index takes, in memory as in its file."""
    return len(faiss.serialize_index(index))


def write(index: faiss.Index, path: Path) -> None:
    """Write the index file."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexIVF):  # where each row lies is found again when it is read
        inner.set_direct_map_type(faiss.DirectMap.NoMap)
    faiss.write_index(index, str(path))


def read(file: BinaryIO) -> faiss.Index:
    """Read an index from an open file, whose content the caller has checked: an index file is code.

    Raises:
        RuntimeError: FAISS does not know the format.
    """
    return faiss.read_index(faiss.PyCallbackIOReader(file.read, READ_BYTES))


def map_file(path: Path) -> faiss.Index:
    """Map an index file, so that its vectors come into memory as searches touch them, and once for all processes.

    Raises:
        RuntimeError: FAISS does not know the format.
    """
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
