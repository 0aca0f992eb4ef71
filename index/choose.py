"""Which kind of index a table gets, and with what parameters: arithmetic on its size, nothing else.

What the sizes rest on, measured on two cores with `N` pictures of 256 dimensions and captions as queries (captions
lie off the distribution of the pictures, which makes approximate search several times harder for them):

    N = 100,000    exact: 9 ms a query, one thread | HNSW: 29 s to build, recall 0.97 at ef_search 128, 0.3 ms
                   IVF: 3 s to build, but 0.68 at a quarter of the lists, and 0.88 at half of them

So exact search as long as a query waits about ten milliseconds; then HNSW, whose recall holds for captions; IVF only
where a graph takes too long to build, and then with many lists read.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from index.errors import RetrievalError
from index.manifest import Kind

KindWish = Literal["auto", "flat", "hnsw", "ivf"]

# A query reads every vector once: 128 MiB at 12 GB/s are 11 ms. That is 131,072 vectors of 256 dimensions.
MAX_FLAT_BYTES = 128 << 20
# A graph took 0.3 ms a vector at 100,000 and 0.5 at 300,000 on two busy cores: by that, half an hour for so many.
# Extrapolated: neither a graph nor lists of more than 300,000 were measured.
MAX_HNSW_VECTORS = 4_000_000

HNSW_LINKS = 32
HNSW_EF_CONSTRUCTION = 100  # 40 builds 3 times as fast and finds 0.85 where 100 finds 0.97; 200 finds 0.98
HNSW_EF_SEARCH = (64, 128, 256, 512, 1024)
IVF_LIST_SHARES = (16, 8, 4, 2, 1)  # one part in so many of the lists is read
TRAINING_VECTORS_PER_LIST = 64  # FAISS asks for 39 at least

# Without real queries the first, cheap candidates are skipped: vectors of the table find each other at settings
# where captions do not (HNSW of 100,000, ef_search 64: 1.00 for pictures, 0.92 for captions).
NUM_SKIPPED_WITHOUT_QUERIES = 2


@dataclass(frozen=True)
class IndexChoice:
    """A kind, the parameters it is built with, and the candidates it may be searched with, the fastest first."""

    kind: Kind
    build: dict[str, int]
    candidates: tuple[dict[str, int], ...]
    reason: str


def choose_kind(num_vectors: int, dim: int, *, kind: KindWish = "auto") -> IndexChoice:
    """Choose the index for a table.

    Args:
        num_vectors: rows of the table, at least 1.
        dim: width of a vector.
        kind: a wish, or `auto` to choose by size.

    Raises:
        RetrievalError: the kind is unknown.
    """
    if kind not in get_args(KindWish):
        raise RetrievalError(f"index kind {kind!r} is unknown; write one of {', '.join(get_args(KindWish))}")
    if kind != "auto":
        return _with_parameters(kind, num_vectors, "asked for")
    size_bytes = num_vectors * dim * 4
    if size_bytes <= MAX_FLAT_BYTES:
        return _with_parameters(
            "flat", num_vectors, f"{size_bytes:,} bytes of vectors: exact search takes milliseconds"
        )
    if num_vectors <= MAX_HNSW_VECTORS:
        return _with_parameters(
            "hnsw", num_vectors, f"{num_vectors:,} vectors: a graph finds captions' neighbours fast"
        )
    return _with_parameters("ivf", num_vectors, f"{num_vectors:,} vectors: a graph would take too long to build")


def _with_parameters(kind: Kind, num_vectors: int, reason: str) -> IndexChoice:
    if kind == "flat":
        return IndexChoice(kind, {}, ({},), reason)
    if kind == "hnsw":
        build = {"links": HNSW_LINKS, "ef_construction": HNSW_EF_CONSTRUCTION}
        return IndexChoice(kind, build, tuple({"ef_search": value} for value in HNSW_EF_SEARCH), reason)
    num_lists = count_lists(num_vectors)
    probes = sorted({max(1, num_lists // share) for share in IVF_LIST_SHARES})
    return IndexChoice(kind, {"num_lists": num_lists}, tuple({"nprobe": value} for value in probes), reason)


def count_lists(num_vectors: int) -> int:
    """Give the lists of an IVF: the power of two nearest to 4 sqrt(N), as far as there are vectors to train them."""
    wanted = 1 << round(math.log2(4 * math.sqrt(num_vectors)))
    return max(1, min(wanted, num_vectors // TRAINING_VECTORS_PER_LIST))
