"""Exact search over the vectors of a table, with the interface of `index.search.Index`.

An in-memory FAISS index would hold a second copy of the vectors and need a manifest with made-up figures. Of equal
scores at the k-th place it takes any; this takes the first rows.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from index.vectors import Among, Floats, Mask, Neighbours, Rows, check_vectors

QUERIES_AT_ONCE = 32  # with 300,000 vectors, a 40 MB block of scores


class ExactIndex:
    """Vectors in memory, searched exactly; fast enough for some hundred thousand.

    `ids` has `item_id` and `segment` of each vector. `is_live`, bool (rows,), is all true: a table has no masked rows.
    """

    def __init__(self, ids: pa.Table, vectors: Floats) -> None:
        """Keep the vectors, float32 (rows, E), with `item_id` and `segment` of each."""
        self.ids = ids
        self.is_live: Mask = np.ones(ids.num_rows, np.bool_)
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def dim(self) -> int:
        """Width of a vector."""
        return int(self._vectors.shape[1])

    def places(self) -> None:
        """Return none: a row's vector lies where its number says."""

    def vectors(self, rows: Rows) -> Floats:
        """Return the vectors of some rows, float32 (n, E)."""
        return self._vectors[rows]

    def search(self, queries: Floats, k: int = 10, *, among: Among | None = None, profile: str = "text") -> Neighbours:
        """Find the k nearest vectors of each query (float32 (Q, E), unit norm), among all rows unless `among` is given.

        `profile`, the kind of the queries, makes no difference here. Returns (Q, min(k, rows allowed)) scores and rows,
        best first; equal scores are ordered by row. Raises `RetrievalError` if the queries have another width, are not
        finite or not of unit norm.
        """
        allowed: Rows | None = None
        if among is not None:
            allowed = np.flatnonzero(among) if among.dtype == np.bool_ else among.astype(np.int64, copy=False)
        width = min(k, len(self) if allowed is None else len(allowed))
        if width == 0:
            return Neighbours(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64))
        check_vectors(queries, "queries", dim=self._vectors.shape[1])
        vectors = self._vectors if allowed is None else self._vectors[allowed]
        scores, rows = [], []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            for of_query in queries[start : start + QUERIES_AT_ONCE] @ vectors.T:
                best = largest(of_query, width)
                scores.append(of_query[best])
                rows.append(best if allowed is None else allowed[best])
        shape = (len(queries), width)
        return Neighbours(np.reshape(scores, shape).astype(np.float32), np.reshape(rows, shape).astype(np.int64))


def largest(values: np.ndarray[Any, np.dtype[Any]], k: int) -> Rows:
    """Return the positions of the k largest values, largest first; equal ones in their order."""
    k = min(k, len(values))
    if k == 0:
        return np.empty(0, np.int64)
    least = np.partition(values, len(values) - k)[len(values) - k]
    positions = np.flatnonzero(values >= least)
    return positions[np.argsort(-values[positions], kind="stable")[:k]]
