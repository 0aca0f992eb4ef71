"""How much of the exact answer an index finds.

recall@10: of the ten exact nearest vectors, the share that the index found. A found vector counts when its score
reaches that of the tenth, so that among equal vectors any will do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from index.queries import RecallQueries
from index.vectors import Floats, Mask, Rows, VectorTable

NUM_NEIGHBOURS = 10
# Exact neighbours that are kept of each query: after an update those that are left must still be ten.
NUM_KEPT = 40
# float32 products of the same two vectors, summed in another order, differ by a few units of 6e-8.
SCORE_TOLERANCE = 1e-6

Search = Callable[[Floats, int], tuple[Floats, Rows]]
"""(queries, k) -> scores and rows, each (Q, k), best first."""
Nearest = Callable[[VectorTable, Floats, int], tuple[Floats, Rows]]
"""Brute force over a table: (table, queries, k) -> scores and rows, each (Q, k), best first."""


@dataclass(frozen=True)
class Truth:
    """The exact nearest vectors of some queries.

    Attributes:
        queries: what was asked.
        scores: (Q, K) float32, best first; minus infinity where there is none.
        rows: (Q, K) int64; -1 where there is none.
    """

    queries: RecallQueries
    scores: Floats
    rows: Rows

    @property
    def num_wanted(self) -> int:
        """Neighbours that a query has at least, ten at most."""
        return min(NUM_NEIGHBOURS, int((self.rows >= 0).sum(axis=1).min(initial=NUM_NEIGHBOURS)))


def find_truth(table: VectorTable, queries: RecallQueries, nearest: Nearest, num_kept: int = NUM_KEPT) -> Truth:
    """Find the exact neighbours of the queries in a table; a query that is itself in the table is none of its own."""
    num_own = 0 if queries.own_rows is None else 1
    num_found = min(num_kept + num_own, table.num_vectors)
    scores, rows = nearest(table, queries.vectors, num_found)
    return Truth(queries, *_without_own(scores, rows, queries))


def measure_recall(truth: Truth, search: Search, vectors_of: Callable[[Rows], Floats]) -> float:
    """Give the share of the exact neighbours that a search finds, in [0, 1].

    Args:
        truth: the exact neighbours.
        search: what is measured; row -1 where it found none.
        vectors_of: gives the vectors of some rows, (n, E), to tell whether another row is as near as a wanted one.
    """
    wanted = truth.num_wanted
    if wanted == 0 or not len(truth.rows):  # a single vector, asked for its neighbours: there is nothing to miss
        return 1.0
    num_own = 0 if truth.queries.own_rows is None else 1
    found = _without_own(*search(truth.queries.vectors, wanted + num_own), truth.queries)[1][:, :wanted]
    is_right = (found[:, :, None] == truth.rows[:, None, :wanted]).any(axis=2) & (found >= 0)
    for query in np.flatnonzero(~is_right.all(axis=1)):
        places = np.flatnonzero(~is_right[query] & (found[query] >= 0))
        rows = np.append(found[query, places], truth.rows[query, wanted - 1])
        scores = vectors_of(rows) @ truth.queries.vectors[query]
        is_right[query, places] = scores[:-1] >= scores[-1] - SCORE_TOLERANCE
    return float(np.mean(is_right))


def change_truth(truth: Truth, is_live: Mask, added: Truth | None) -> tuple[Truth, Rows]:
    """Give the truth after some rows went and others came, and which queries must be asked anew.

    Args:
        truth: of the table before.
        is_live: bool (rows before,).
        added: of the new rows alone, numbered as in the new table.

    Returns:
        The truth, and the numbers of the queries of which fewer than ten neighbours are still known.
    """
    stays = (truth.rows >= 0) & is_live[truth.rows]
    was_full = (truth.rows >= 0).all(axis=1)
    # Beyond the last that was kept of a full list nothing is known: a new vector behind it may not be the next.
    worst_known = np.where(was_full, truth.scores.min(axis=1, initial=np.inf), -np.inf)
    scores, rows = np.where(stays, truth.scores, -np.inf), np.where(stays, truth.rows, -1)
    if added is not None:
        scores, rows = np.hstack([scores, added.scores]), np.hstack([rows, added.rows])
    order = np.argsort(-scores, axis=1, kind="stable")[:, : truth.rows.shape[1]]
    scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    is_known = (rows >= 0) & (scores >= worst_known[:, None])
    changed = Truth(truth.queries, np.where(is_known, scores, -np.inf).astype(np.float32), np.where(is_known, rows, -1))
    return changed, np.flatnonzero(was_full & (is_known.sum(axis=1) < NUM_NEIGHBOURS))


def replace_answers(truth: Truth, numbers: Rows, scores: Floats, rows: Rows) -> Truth:
    """Give the truth with new answers to some of its queries; they may be shorter or longer than those kept."""
    wider = [(0, 0), (0, max(0, scores.shape[1] - truth.scores.shape[1]))]  # a table of few rows has grown
    new_scores = np.pad(truth.scores, wider, constant_values=-np.inf)
    new_rows = np.pad(truth.rows, wider, constant_values=-1)
    new_scores[numbers], new_rows[numbers] = -np.inf, -1
    new_scores[numbers, : scores.shape[1]], new_rows[numbers, : rows.shape[1]] = scores, rows
    return Truth(truth.queries, new_scores, new_rows)


def _without_own(scores: Floats, rows: Rows, queries: RecallQueries) -> tuple[Floats, Rows]:
    if queries.own_rows is None:
        return scores, rows
    order = np.argsort(rows == queries.own_rows[:, None], axis=1, kind="stable")[:, : max(0, rows.shape[1] - 1)]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
