"""Scan of the rows that pass a filter by their projections, a fraction of a vector each, for text queries."""

import ctypes
from collections.abc import Callable
from functools import cached_property, partial

import faiss
import numpy as np
from numpy.typing import NDArray

from index.disk_index import DiskIndex
from index.faiss_build import innermost
from index.faiss_search import decode, search_exactly, search_rows, vectors
from index.selector import Selector
from index.vectors import Floats, Rows

# Rows to re-rank at full width, as a multiple of k: it costs little, and projections order only roughly.
_SCORED_AGAIN = 16

VectorsOf = Callable[[Rows], Floats]


class RowScan:
    """Scan of the rows of one index, which must not change meanwhile."""

    def __init__(self, index: faiss.Index | DiskIndex) -> None:
        self._index = index

    def find(self, queries: Floats, k: int, selector: Selector) -> tuple[Floats, Rows]:
        """Find the k nearest of the selected rows: scores and rows, (Q, k), best first.

        Uses projections if the index stores them by row, and exact search otherwise or if few rows are left. `queries`
        (Q, E) float32 must be of texts: projections keep the directions in which those vary. k is at most the number of
        selected rows.
        """
        if self._projected is None or k * _SCORED_AGAIN >= selector.num_rows:
            return search_exactly(self._index, queries, k, selector)
        project, projections_of = self._projected
        _, candidates = search_rows(projections_of, project.apply(queries), k * _SCORED_AGAIN, selector.rows)
        best_scores, best_rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        for place, rows in enumerate(candidates):
            scores = vectors(self._index, rows) @ queries[place]
            best = np.argsort(-scores, kind="stable")[:k]
            best_scores[place], best_rows[place] = scores[best], rows[best]
        return best_scores, best_rows

    @cached_property
    def _projected(self) -> tuple[faiss.VectorTransform, VectorsOf] | None:
        """Return the projection, and a function for rows' projected vectors; None without one, or with only codes."""
        if isinstance(self._index, DiskIndex):
            return None
        index = faiss.downcast_index(self._index)
        if isinstance(index, faiss.IndexRefine):
            index = faiss.downcast_index(index.base_index)
        if not isinstance(index, faiss.IndexPreTransform):
            return None
        project = faiss.downcast_VectorTransform(index.chain.at(0))
        inner = innermost(index)
        if isinstance(inner, faiss.IndexHNSW):
            inner = faiss.downcast_index(inner.storage)
        if isinstance(inner, faiss.IndexIVFFlat | faiss.IndexIVFScalarQuantizer):
            return project, _ListedVectors(inner).of
        return (project, partial(decode, inner)) if isinstance(inner, faiss.IndexFlatCodes) else None


class _ListedVectors:
    """Vectors of inverted lists by row, read in place; FAISS returns one per call, a microsecond each.

    The addresses take twelve bytes per row. Lists that grow are moved, so the index must not change.
    """

    def __init__(self, index: faiss.IndexIVF) -> None:
        self._index = index  # keeps alive the memory that is read
        self._addresses: Rows = np.empty(index.ntotal, np.int64)
        self._lists = np.empty(index.ntotal, np.dtype("<i4"))
        for number in range(index.nlist):
            size = index.invlists.list_size(number)
            if size:
                rows = faiss.rev_swig_ptr(index.invlists.get_ids(number), size)
                first = faiss.rev_swig_ptr(index.invlists.get_codes(number), 1).ctypes.data
                self._addresses[rows] = first + index.code_size * np.arange(size)
                self._lists[rows] = number

    def of(self, rows: Rows) -> Floats:
        """Fetch the vectors of some rows, (n, width) float32."""
        if len(rows) == 0:
            return np.empty((0, self._index.d), np.float32)
        codes = self._codes(self._addresses[rows])
        if isinstance(self._index, faiss.IndexIVFFlat):
            return codes.view(np.float32)
        # FAISS decodes codes that follow the number of their list, whose centroid they are relative to.
        numbers = self._lists[rows].view(np.uint8).reshape(len(rows), -1)[:, : self._index.coarse_code_size()]
        decoded: Floats = self._index.sa_decode(np.hstack([numbers, codes]))
        return decoded

    def _codes(self, addresses: Rows) -> NDArray[np.uint8]:
        """Copy the codes at some addresses, (n, code size)."""
        size, first = self._index.code_size, int(addresses.min())
        span = int(addresses.max()) - first
        memory = (ctypes.c_char * (span + size)).from_address(first)
        starts = np.ndarray((span + 1,), np.dtype((np.void, size)), memory, strides=(1,))
        return starts[addresses - first].view(np.uint8).reshape(len(addresses), size)
