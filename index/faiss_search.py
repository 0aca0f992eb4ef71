"""FAISS: search an index, unfiltered or filtered, approximately or exactly.

Search parameters are passed with each call, so several threads can use one index.
"""

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import faiss
import numpy as np
from numpy.typing import NDArray

from index.disk_index import DiskIndex
from index.faiss_build import innermost
from index.index_errors import RetrievalError
from index.selector import Selector
from index.vectors import Floats, Rows, keep_best

# Rows that a filtered exact search decodes together: 16 MiB at 256 dimensions.
_BLOCK_ROWS = 16_384
_FEW_QUERIES = 8
# Rows skipped (1 ns each) in the time that fetching and decoding one takes (250 ns at 256 dimensions).
_SKIPPED_PER_FETCHED = 250


# FAISS's objects of search parameters, by index: to make them takes a fifth of a short search.
_READY: WeakKeyDictionary[faiss.Index, dict[tuple[tuple[str, int], ...], Any]] = WeakKeyDictionary()

_MAPPING = Lock()  # the map of rows is made once, although several threads may be the first to need it

FindAmong = Callable[[Floats, int, Selector], tuple[Floats, Rows]]
"""Queries (Q, E), k, the rows that may be found -> scores and rows, (Q, k)."""

Places = NDArray[np.int32]
"""Place of each row among the entries of all inverted lists, one list after the other."""


def search(
    index: faiss.Index | DiskIndex,
    queries: Floats,
    k: int,
    parameters: Mapping[str, int],
    selector: Selector | None = None,
) -> tuple[Floats, Rows]:
    """Find the k nearest rows: scores and row numbers, (Q, k), best first; row -1 where the index found none.

    `queries` is (Q, E) float32, C-contiguous; `parameters` are `ef_search` (HNSW), `nprobe` (IVF) and `k_factor`
    (re-ranking); `selector` is None for all rows.
    """
    if isinstance(index, DiskIndex):
        return index.search(queries, k, parameters, selector)
    if selector is None:
        ready = _READY.setdefault(index, {})
        key = tuple(parameters.items())
        params = ready[key] if key in ready else ready.setdefault(key, _parameters(index, parameters, None))
    else:
        params = _parameters(index, parameters, selector)
    scores, rows = index.search(queries, k, params=params)
    return scores, rows


def _parameters(index: faiss.Index, wanted: Mapping[str, int], selector: Selector | None) -> Any:
    index = faiss.downcast_index(index)
    among = {} if selector is None else {"sel": selector.faiss}
    if isinstance(index, faiss.IndexRefine):
        inner = _parameters(index.base_index, wanted, selector)
        return faiss.IndexRefineSearchParameters(
            k_factor=float(wanted.get("k_factor", 1)), **({} if inner is None else {"base_index_params": inner})
        )
    if isinstance(index, faiss.IndexPreTransform):
        inner = _parameters(index.index, wanted, selector)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=wanted["ef_search"], **among)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=min(wanted["nprobe"], index.nlist), **among)
    return faiss.SearchParameters(**among) if among else None


def search_exactly(
    index: faiss.Index | DiskIndex, queries: Floats, k: int, selector: Selector | None = None
) -> tuple[Floats, Rows]:
    """Find the k nearest rows by brute force at full width: scores and rows, (Q, k), best first.

    `queries` is (Q, E) float32, C-contiguous; k is at most the number of selected rows.
    """
    if isinstance(index, DiskIndex):
        return index.search_exactly(queries, k, selector)
    store = _full_width(index)
    if isinstance(store, faiss.IndexIVF):
        return search(store, queries, k, {"nprobe": store.nlist}, selector)
    if selector is None or _is_full_scan_cheaper(store, len(queries), selector):
        return search(store, queries, k, {}, selector)
    if len(queries) <= _FEW_QUERIES and isinstance(store, faiss.IndexFlat):
        some = faiss.SearchParameters(sel=faiss.IDSelectorArray(selector.rows))
        scores, rows = store.search(queries, k, params=some)
        return scores, rows
    return search_rows(partial(decode, store), queries, k, selector.rows)


def _is_full_scan_cheaper(store: faiss.Index, num_queries: int, selector: Selector) -> bool:
    """Whether scanning all rows and skipping those outside the filter beats fetching and scoring only the others.

    Fetching pays off for many queries, which share it, and for few rows; float vectors are scored in place.
    """
    if num_queries > _FEW_QUERIES or isinstance(store, faiss.IndexFlat):
        return False
    return selector.num_rows * _SKIPPED_PER_FETCHED > selector.num_total


def vectors(index: faiss.Index | DiskIndex, rows: Rows) -> Floats:
    """Fetch the vectors of some rows, (n, E), with the precision of the index's codes."""
    if isinstance(index, DiskIndex):
        return index.vectors(rows)
    prepare(index)
    return decode(_full_width(index), rows)


def decode(store: faiss.Index, rows: Rows) -> Floats:
    """Fetch and decode the vectors of some rows, (n, E), from an index that stores them by row."""
    if not isinstance(store, faiss.IndexFlatCodes):
        found: Floats = store.reconstruct_batch(np.ascontiguousarray(rows, dtype=np.int64))
        return found
    # All codes in one call: one by one, as reconstruct_batch does, costs a microsecond each.
    size = store.code_size
    codes = faiss.rev_swig_ptr(store.codes.data(), store.ntotal * size).reshape(store.ntotal, size).take(rows, axis=0)
    decoded: Floats = codes.view(np.float32) if isinstance(store, faiss.IndexFlat) else store.sa_decode(codes)
    return decoded


def search_rows(vectors_of: Callable[[Rows], Floats], queries: Floats, k: int, rows: Rows) -> tuple[Floats, Rows]:
    """Fetch and score only some rows, (n,): scores and rows, (Q, min(k, n)), best first.

    `vectors_of` returns the vectors of rows, (n, E); `queries` is (Q, E) float32, C-contiguous.
    """
    best_scores, best_rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        scores, places = faiss.knn(queries, vectors_of(block), min(k, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
        if len(rows) == len(block):
            return scores, block[places]
        best_scores, best_rows = keep_best(np.hstack([best_scores, scores]), np.hstack([best_rows, block[places]]), k)
    return best_scores, best_rows


def has_lists(index: faiss.Index | DiskIndex) -> bool:
    """Whether whole vectors lie in inverted lists, not by row."""
    return not isinstance(index, DiskIndex) and isinstance(_full_width(index), faiss.IndexIVF)


def list_places(index: faiss.Index) -> Places:
    """Return the place of each row, int32 (rows,), of an index that `has_lists`."""
    store = _full_width(index)
    places, start = np.empty(store.ntotal, np.int32), 0
    for number in range(store.nlist):
        if size := store.invlists.list_size(number):
            places[faiss.rev_swig_ptr(store.invlists.get_ids(number), size)] = np.arange(start, start + size)
            start += size
    return places


class ListedRows:
    """Vectors of inverted lists by row, found by known places: nothing is made for all rows, as `prepare` does."""

    def __init__(self, index: faiss.Index, places: Places) -> None:
        """Keep the places, as `list_places` returns them."""
        self._store, self._places = _full_width(index), places
        self._starts = np.cumsum([0, *(self._store.invlists.list_size(n) for n in range(self._store.nlist))])

    def vectors(self, rows: Rows) -> Floats:
        """Fetch the vectors of some rows, (n, E); RetrievalError if another row, or none, lies at the place of one."""
        places, lists = self._places[rows].astype(np.int64), self._store.invlists
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        found = np.empty((len(rows), self._store.d), np.float32)
        for vector, row, place, number in zip(found, rows.tolist(), places, numbers.tolist(), strict=True):
            offset = int(place - self._starts[number])
            if not 0 <= place < self._starts[-1] or lists.get_single_id(number, offset) != row:
                raise RetrievalError(f"row {row:,} of the index is not at its place; run `embedder index build`")
            self._store.reconstruct_from_offset(number, offset, faiss.swig_ptr(vector))
        return found


def _full_width(index: faiss.Index) -> faiss.Index:
    """Return the part of an index that stores whole vectors, by row."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return faiss.downcast_index(index.refine_index)
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSW):
        return faiss.downcast_index(inner.storage)
    return inner


def prepare(index: faiss.Index | DiskIndex) -> None:
    """Map rows to entries of inverted lists, 8 bytes a row, unless that is done; else the first `vectors` does."""
    if has_lists(index):
        with _MAPPING:
            _full_width(index).make_direct_map()
