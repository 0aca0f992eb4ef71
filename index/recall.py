"""How much of the exact answer an index finds, measured on real queries where there are any.

recall@10: of the ten exact nearest vectors, the share that the index found. A found vector counts when its score
reaches that of the tenth, so that among equal vectors any will do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from index.vectors import Floats, Rows, VectorTable, check_vectors

NUM_NEIGHBOURS = 10
MAX_QUERIES = 500
SAMPLING_SEED = 1
SAMPLED = "sampled"
# Scores are compared in float64, where the same two vectors give the same product to 1e-16.
SCORE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RecallQueries:
    """The queries that recall is measured on.

    Attributes:
        vectors: (Q, E).
        kind: what they are: `sampled`, or the name that the caller gave them.
        own_rows: (Q,) row of each query in the table, which no search of it may count; None for queries from outside.
    """

    vectors: Floats
    kind: str
    own_rows: Rows | None = None


def choose_queries(table: VectorTable, given: Floats | None, kind: str) -> RecallQueries:
    """Take at most MAX_QUERIES of the given queries, spread evenly; where there are none, vectors of the table.

    Raises:
        RetrievalError: the given queries have another width, or are not finite or not of unit norm.
    """
    if given is None or len(given) == 0:
        rows = table.sample(MAX_QUERIES, SAMPLING_SEED)
        return RecallQueries(table.take(rows), SAMPLED, rows)
    check_vectors(given, "queries", dim=table.dim)
    chosen = np.linspace(0, len(given) - 1, min(len(given), MAX_QUERIES)).round().astype(np.int64)
    return RecallQueries(np.ascontiguousarray(given[chosen]), kind)


class RecallMeter:
    """Knows the exact answers for one table, and compares what an index finds with them."""

    def __init__(
        self, table: VectorTable, queries: RecallQueries, nearest: Callable[[VectorTable, Floats, int], Rows]
    ) -> None:
        """Find the exact answers.

        Args:
            table: the vectors that are indexed.
            queries: what to ask.
            nearest: brute force, `(table, queries, k) -> rows (Q, k)`.
        """
        self._table, self._queries = table, queries
        self._num_own = 0 if queries.own_rows is None else 1
        # A query that is itself in the table has one neighbour less.
        self._k = min(NUM_NEIGHBOURS, table.num_vectors - self._num_own)
        exact = self._without_own(nearest(table, queries.vectors, self._k + self._num_own))
        self._exact_scores = self._score(exact)

    def measure(self, search: Callable[[Floats, int], Rows]) -> float:
        """Give the share of the exact neighbours that `search(queries, k) -> rows (Q, k)` finds, in [0, 1]."""
        if self._k == 0:  # a single vector, asked for its neighbours: there is nothing to miss
            return 1.0
        found = self._without_own(search(self._queries.vectors, self._k + self._num_own))
        worst_wanted = self._exact_scores.min(axis=1, keepdims=True)
        return float(np.mean(self._score(found) >= worst_wanted - SCORE_TOLERANCE))

    def _without_own(self, rows: Rows) -> Rows:
        if self._queries.own_rows is None:
            return rows
        is_own = rows == self._queries.own_rows[:, None]
        order = np.argsort(is_own, axis=1, kind="stable")[:, : self._k]
        return np.take_along_axis(rows, order, axis=1)

    def _score(self, rows: Rows) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Score (Q, k) rows in float64; a row of -1 scores minus infinity."""
        vectors = self._table.take(np.maximum(rows, 0).ravel()).reshape(*rows.shape, self._table.dim)
        scores = np.einsum("qe,qke->qk", self._queries.vectors.astype(np.float64), vectors.astype(np.float64))
        return np.where(rows >= 0, scores, -np.inf)
