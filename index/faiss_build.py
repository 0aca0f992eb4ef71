"""FAISS: make, train, fill, write and read an index.

Only this module, `selector`, `faiss_search`, `faiss_scan`, `faiss_merge`, `disk_build` and `disk_index` call FAISS.
Source: faiss-cpu 1.15.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np

from index.designs import HNSW_EF_CONSTRUCTION, Design
from index.disk_index import DiskIndex
from index.index_errors import RetrievalError
from index.list_reach import Projection, learn_reach, split_reach
from index.vectors import Floats, Rows, VectorTable, keep_best, vectors_text

VERSION: str = faiss.__version__
TRAINING_SEED = 0
READ_BYTES = 8 << 20
WRITTEN_BYTES = 1 << 20
OPQ_ROUNDS = 10
OPQ_TRAINING_VECTORS = 16_384
_LEFT_OUT = 0.1  # percent of the distances from a centroid beyond the last level, at either end
# FAISS's way to scan codes of 4 bits: list by list, candidates in a reservoir. Its own choice, which sorts the lists of
# all queries first, took a fifth longer for one query and as long for 64.
_SCAN = 11
_AS_BEFORE = nullcontext()


def threads(num_threads: int | None) -> AbstractContextManager[None]:
    """Set the number of FAISS's threads inside the block; None keeps the current one (all cores)."""
    before = faiss.omp_get_max_threads()
    return _AS_BEFORE if num_threads is None or num_threads == before else _other_threads(num_threads, before)


@contextmanager
def _other_threads(num_threads: int, before: int) -> Iterator[None]:
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def build(design: Design, table: VectorTable, projection: Projection | None = None) -> faiss.Index:
    """Make an index of the design and add every vector of the table, in order.

    With one thread the same table gives the same index, byte for byte; several threads link an HNSW graph in any order.
    """
    index = train(design, table, projection)
    with failures_named(design, f"add {vectors_text(table.num_vectors)} to it"):
        add(index, table.blocks())
    return index


def train(design: Design, table: VectorTable, projection: Projection | None = None) -> faiss.Index:
    """Make an empty index of the design and train it on a sample of the table.

    Raises a RetrievalError if FAISS can't make or train it for this table.
    """
    index = _make(design, table.dim, projection)
    if not index.is_trained:
        with failures_named(design, f"train it on {vectors_text(table.num_vectors)}"), by_distance(index):
            sample = table.take(table.sample(design.num_training, TRAINING_SEED))
            index.train(sample)
            _set_levels(innermost(index), sample, projection, is_transformed=_find_inside(index) is not None)
    return index


def _set_levels(lists: faiss.Index, sample: Floats, projection: Projection | None, *, is_transformed: bool) -> None:
    """Space the 16 levels of a number's code evenly over what its distances from the centroids span.

    FAISS puts levels where most vectors are. Those that answer a query are at the ends, and beyond the last levels all
    look alike. Constant numbers get how far each list reaches. Does nothing to codes of several numbers, of whole
    vectors, or behind a transform that FAISS trains (OPQ, PCA); `sample` is (n, E).
    """
    if not _has_code_a_number(lists) or (projection is None and is_transformed):
        return
    vectors = np.ascontiguousarray(sample) if projection is None else projection.apply(sample)
    width = vectors.shape[1]
    padded = np.pad(vectors, ((0, 0), (0, lists.d - width)), constant_values=1)
    centroids, owners = lists.quantizer.reconstruct_n(0, lists.nlist), lists.quantizer.search(padded, 1)[1][:, 0]
    first, last = np.percentile(padded - centroids[owners], (_LEFT_OUT, 100 - _LEFT_OUT), axis=0)
    levels = np.linspace(first, last, lists.pq.ksub, axis=1, dtype=np.float32)
    if projection is not None and lists.d > width:
        reach = learn_reach(centroids[:, :width], owners, vectors, projection.apply(projection.queries))
        centroids[:, width:], levels[width:] = split_reach(reach)
        lists.quantizer.reset()
        lists.quantizer.add(centroids)
    faiss.copy_array_to_vector(levels.ravel(), lists.pq.centroids)


def _has_code_a_number(lists: faiss.Index) -> bool:
    return isinstance(lists, faiss.IndexIVFPQFastScan) and lists.by_residual and lists.pq.dsub == 1


def rerank_with(base: faiss.Index, design: Design, table: VectorTable) -> faiss.Index:
    """Add re-ranking, as `build` does, to an index of every vector, which may serve several designs."""
    rerank = train_reranking(design, table)
    add(rerank, table.blocks())
    return faiss.IndexRefine(base, rerank)


def train_reranking(design: Design, table: VectorTable) -> faiss.Index:
    """Make an empty index of the codes that a design re-ranks with, and train it on a sample of the table."""
    with failures_named(design, f"train it on {vectors_text(table.num_vectors)}"):
        rerank = faiss.index_factory(table.dim, design.rerank, faiss.METRIC_INNER_PRODUCT)
        rerank.train(table.take(table.sample(design.num_training, TRAINING_SEED)))
    return rerank


@contextmanager
def failures_named(design: Design, action: str) -> Iterator[None]:
    """Turn FAISS's errors inside the block into one line that names the design and the action."""
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:
        reason = "".join(str(error).splitlines()[:1]).rsplit(": ", maxsplit=1)[-1] or type(error).__name__
        raise RetrievalError(
            f"index design {design}: FAISS {VERSION} can't {action} ({reason}); choose another"
        ) from None


def add(index: faiss.Index, blocks: Iterable[Floats]) -> None:
    """Append blocks of vectors, each (n, E)."""
    with by_distance(index):
        for block in blocks:
            index.add(np.ascontiguousarray(block))


@contextmanager
def by_distance(index: faiss.Index) -> Iterator[None]:
    """Train and fill inverted lists of projected vectors by the nearest centroid inside the block.

    Such vectors have any norm, and it says how well they answer, but FAISS groups them only by their direction. Where
    they are grouped by distance, and lists are searched in the order of the centroids' products with the query, as few
    as a third of the vectors have to be read. To centroids of unit norm, which earlier releases made, the nearest is
    the same as the one with the largest product. Does nothing without lists, or where a graph holds the centroids.
    """
    lists = _find_inside(index)
    centroids = faiss.downcast_index(lists.quantizer) if isinstance(lists, faiss.IndexIVF) else None
    if lists is None or not isinstance(centroids, faiss.IndexFlat):
        yield
        return
    is_trained = centroids.ntotal > 0
    nearest = _nearest(centroids.reconstruct_n(0, centroids.ntotal), lists.d, _count_constant(index))
    lists.cp.spherical, lists.quantizer = False, nearest
    try:
        yield
    finally:
        lists.quantizer = centroids
    if not is_trained and nearest.ntotal:
        centroids.add(nearest.reconstruct_n(0, nearest.ntotal))


def _nearest(centroids: Floats, dim: int, num_constant: int) -> faiss.Index:
    """Make an index that finds the nearest of centroids, (L, dim), possibly none, by all but the constant numbers."""
    whole, width = faiss.IndexFlatL2(dim), dim - num_constant
    whole.add(centroids)
    if not num_constant or not len(centroids):
        return whole
    varying = faiss.IndexFlatL2(width)
    varying.add(np.ascontiguousarray(centroids[:, :width]))
    without_constant = faiss.IndexPreTransform(linear(np.eye(width, dim, dtype=np.float32)), varying)
    return faiss.IndexRefine(without_constant, whole)  # the second gives FAISS the whole centroid


def _count_constant(index: faiss.Index) -> int:
    """Count the ones that a projection appends to every vector; 0 in older indexes. The bias of PCA has none."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return _count_constant(index.base_index)
    if not isinstance(index, faiss.IndexPreTransform):
        return 0
    transform = faiss.downcast_VectorTransform(index.chain.at(0))
    if not isinstance(transform, faiss.LinearTransform):
        return 0
    return int(np.count_nonzero(faiss.vector_to_array(transform.b) == 1)) if transform.have_bias else 0


def _find_inside(index: faiss.Index) -> faiss.Index | None:
    """Return the structure inside re-ranking and projection; None without a projection."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return _find_inside(index.base_index)
    return innermost(index) if isinstance(index, faiss.IndexPreTransform) else None


def _make(design: Design, dim: int, projection: Projection | None) -> faiss.Index:
    constant, factory, width = 0, design.factory, design.projection or dim
    if projection is not None and design.has_code_a_number:
        constant = projection.num_constant
        factory = factory.replace(f"PQ{width}x", f"PQ{width + constant}x")
    with failures_named(design, f"make it for {dim} dimensions"):
        index = faiss.index_factory(width + constant, factory, faiss.METRIC_INNER_PRODUCT)
        rerank = faiss.index_factory(dim, design.rerank, faiss.METRIC_INNER_PRODUCT) if design.rerank else None
    set_up(index)
    if projection is not None:
        index = faiss.IndexPreTransform(linear(projection.matrix, constant), index)
    if rerank is None:
        return index
    with failures_named(design, "re-rank what it finds"):
        return faiss.IndexRefine(index, rerank)  # whose Python object keeps its parts alive


def set_up(index: faiss.Index) -> None:
    """Set what FAISS's factory notation can't express, before an index is trained."""
    if isinstance(index, faiss.IndexPreTransform):
        rotation = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(rotation, faiss.OPQMatrix):  # the defaults take minutes for little gain
            rotation.niter, rotation.max_train_points = OPQ_ROUNDS, OPQ_TRAINING_VECTORS
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    if isinstance(inner, faiss.IndexIVF):
        inner.cp.min_points_per_centroid = 1  # silences the warning on standard error about few vectors
    if _has_code_a_number(inner):
        inner.pq.cp.niter = 1  # half of the training: `_set_levels` sets what it finds
    _set_scan(inner)


def _set_scan(inner: faiss.Index) -> None:
    """Set how codes of 4 bits are scanned, which no file holds."""
    if isinstance(inner, faiss.IndexIVFFastScan):
        inner.implem = _SCAN


def linear(projection: Floats, num_constant: int = 0) -> faiss.LinearTransform:
    """Make the transform of a matrix, (width, E), which may append numbers that are 1 in every vector."""
    width, dim = projection.shape
    transform = faiss.LinearTransform(dim, width + num_constant, num_constant > 0)
    faiss.copy_array_to_vector(np.pad(projection, ((0, num_constant), (0, 0))).ravel(), transform.A)
    if num_constant:
        faiss.copy_array_to_vector(np.repeat(np.array([0, 1], np.float32), (width, num_constant)), transform.b)
    transform.is_trained = True
    return transform


def innermost(index: faiss.Index) -> faiss.Index:
    """Return the structure inside re-ranking and projection."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return innermost(index.base_index)
    if isinstance(index, faiss.IndexPreTransform):
        return innermost(index.index)
    return index


def nearest_in_table(table: VectorTable, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """Find the k nearest rows of a table by brute force, block by block: scores and rows, (Q, k), best first.

    `queries` is (Q, E) float32, C-contiguous; k is at most N.
    """
    best_scores = np.empty((len(queries), 0), dtype=np.float32)
    best_rows = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for block in table.blocks():
        vectors = np.ascontiguousarray(block)
        scores, rows = faiss.knn(queries, vectors, min(k, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
        best_scores, best_rows = keep_best(np.hstack([best_scores, scores]), np.hstack([best_rows, rows + start]), k)
        start += len(block)
    return best_scores, best_rows


def imbalance(index: faiss.Index | DiskIndex) -> float:
    """Compute the imbalance of inverted lists, the factor by which it slows a search; 1.0 for other structures."""
    if isinstance(index, DiskIndex):
        return index.imbalance()
    inner = innermost(index)
    return float(inner.invlists.imbalance_factor()) if isinstance(inner, faiss.IndexIVF) else 1.0


def num_bytes(index: faiss.Index | DiskIndex) -> int:
    """Count the bytes that an index takes in memory: the size of its file, if all of it is in memory."""
    if isinstance(index, DiskIndex):
        return index.num_bytes()
    counted = 0

    def count(data: bytes) -> None:
        nonlocal counted
        counted += len(data)

    faiss.write_index(index, faiss.PyCallbackIOWriter(count, READ_BYTES))  # no copy of the whole index
    return counted


def write(index: faiss.Index, path: Path) -> None:
    """Write the index file; OSError if the disk is full: FAISS's own writer loses the last bytes without a word."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexIVF):  # the map from rows to entries is rebuilt when the index is read
        inner.set_direct_map_type(faiss.DirectMap.NoMap)
    with path.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, WRITTEN_BYTES))


def read(file: BinaryIO) -> faiss.Index:
    """Read an index from a file whose hash is checked (FAISS trusts index files); raises RuntimeError if malformed."""
    index = faiss.read_index(faiss.PyCallbackIOReader(file.read, READ_BYTES))
    _set_scan(innermost(index))
    return index


def map_file(path: Path) -> faiss.Index:
    """Map an index file, once for all processes, and for good if it is deleted; RuntimeError if it is no index."""
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    _set_scan(innermost(index))
    return index
