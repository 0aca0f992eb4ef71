"""Recall of an index against exact search.

recall@10 is the share of the ten exact nearest vectors that the index found. A different vector counts if its score
equals the tenth's, so that any of several equal vectors will do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np

from index.faiss_build import nearest_in_table
from index.held_out_queries import RecallQueries
from index.vectors import Floats, Mask, Rows, VectorTable, keep_best

NUM_NEIGHBOURS = 10
# Exact neighbours kept per query, so that ten are left after an update.
NUM_KEPT = 40
# float32 products of the same two vectors, summed in another order, differ by a few units of 6e-8.
SCORE_TOLERANCE = 1e-6

Search = Callable[[Floats, int], tuple[Floats, Rows]]
"""(queries, k) -> scores and rows, each (Q, k), best first."""


@dataclass(frozen=True)
class GroundTruth:
    """Exact nearest vectors of some queries.

    `scores` are (Q, K) float32, best first; minus infinity where there is none. `rows` are (Q, K) int64; -1 likewise.
    """

    queries: RecallQueries
    scores: Floats
    rows: Rows

    @property
    def num_wanted(self) -> int:
        """Number of neighbours that every query has, at most ten."""
        return min(NUM_NEIGHBOURS, int((self.rows >= 0).sum(axis=1).min(initial=NUM_NEIGHBOURS)))


def find_ground_truth(table: VectorTable, queries: RecallQueries, num_kept: int = NUM_KEPT) -> GroundTruth:
    """Find the exact neighbours of queries by brute force; a query from the table is not its own neighbour."""
    num_own = 0 if queries.own_rows is None else 1
    num_found = min(num_kept + num_own, table.num_vectors)
    return GroundTruth(queries, *without_own(*nearest_in_table(table, queries.vectors, num_found), queries))


def measure_recall(ground_truth: GroundTruth, search: Search, vectors_of: Callable[[Rows], Floats]) -> float:
    """Compute the share of the exact neighbours that a search finds, in [0, 1]; row -1 means nothing found.

    `vectors_of` returns the vectors of some rows, (n, E), to check if another row is as near as an exact one; if they
    are rounded, equal ones must be rounded alike.
    """
    wanted = ground_truth.num_wanted
    if wanted == 0 or not len(ground_truth.rows):  # a single vector has no neighbours to miss
        return 1.0
    num_own = 0 if ground_truth.queries.own_rows is None else 1
    found = without_own(*search(ground_truth.queries.vectors, wanted + num_own), ground_truth.queries)[1][:, :wanted]
    is_right = (found[:, :, None] == ground_truth.rows[:, None, :wanted]).any(axis=2) & (found >= 0)
    asked, places = np.nonzero(~is_right & (found >= 0))
    if len(asked):
        rows = np.stack([found[asked, places], ground_truth.rows[asked, wanted - 1]])
        vectors = vectors_of(rows.ravel()).reshape(*rows.shape, -1)
        scores = np.einsum("rne,ne->rn", vectors, ground_truth.queries.vectors[asked])
        # Not the rows above it: with exact vectors there are none, and with rounded ones they may be all that an index
        # finds.
        is_right[asked, places] = np.abs(scores[0] - scores[1]) <= SCORE_TOLERANCE
    return float(np.mean(is_right))


def measure_rounding(ground_truth: GroundTruth, table: VectorTable, code: faiss.Index) -> float:
    """Compute the recall that is left where rounded vectors order the nearest and as many after them, in [0, 1].

    `table` has the vectors of the ground truth, `code` is a trained index that rounds them.
    """
    wanted = ground_truth.num_wanted
    exact, rows = ground_truth.scores[:, : 2 * wanted], ground_truth.rows[:, : 2 * wanted]
    if not rows.size:
        return 1.0
    rounded = code.sa_decode(code.sa_encode(table.take(np.maximum(rows, 0).ravel())))
    scores = np.einsum("qke,qe->qk", rounded.reshape(*rows.shape, -1), ground_truth.queries.vectors)
    best = np.argsort(np.where(rows < 0, np.inf, -scores), axis=1, kind="stable")[:, :wanted]
    found = np.take_along_axis(exact, best, axis=1)
    return float(np.mean(found >= exact[:, wanted - 1 : wanted] - SCORE_TOLERANCE))


def update_ground_truth(
    ground_truth: GroundTruth, is_live: Mask, added: GroundTruth | None
) -> tuple[GroundTruth, Rows]:
    """Update the ground truth after rows were removed (`is_live`, bool (rows before,)) and added.

    `added` is the ground truth of only the new rows, numbered as in the new table; None without new rows. Also returns
    the numbers of the queries with fewer than ten known neighbours, which must be searched again.
    """
    stays = (ground_truth.rows >= 0) & is_live[ground_truth.rows]
    was_full = (ground_truth.rows >= 0).all(axis=1)
    # Nothing is known beyond the last neighbour of a full list: a new vector with a lower score may not be the next.
    worst_known = np.where(was_full, ground_truth.scores.min(axis=1, initial=np.inf), -np.inf)
    scores, rows = np.where(stays, ground_truth.scores, -np.inf), np.where(stays, ground_truth.rows, -1)
    if added is not None:
        scores, rows = np.hstack([scores, added.scores]), np.hstack([rows, added.rows])
    scores, rows = keep_best(scores, rows, ground_truth.rows.shape[1])
    is_known = (rows >= 0) & (scores >= worst_known[:, None])
    changed = GroundTruth(
        ground_truth.queries, np.where(is_known, scores, -np.inf).astype(np.float32), np.where(is_known, rows, -1)
    )
    return changed, np.flatnonzero(was_full & (is_known.sum(axis=1) < NUM_NEIGHBOURS))


def replace_answers(ground_truth: GroundTruth, numbers: Rows, scores: Floats, rows: Rows) -> GroundTruth:
    """Replace the neighbours of some queries, numbered (n,), by scores and rows (n, K), best first; K may change."""
    wider = [(0, 0), (0, max(0, scores.shape[1] - ground_truth.scores.shape[1]))]  # a table of few rows has grown
    new_scores = np.pad(ground_truth.scores, wider, constant_values=-np.inf)
    new_rows = np.pad(ground_truth.rows, wider, constant_values=-1)
    new_scores[numbers], new_rows[numbers] = -np.inf, -1
    new_scores[numbers, : scores.shape[1]], new_rows[numbers, : rows.shape[1]] = scores, rows
    return GroundTruth(ground_truth.queries, new_scores, new_rows)


def without_own(scores: Floats, rows: Rows, queries: RecallQueries) -> tuple[Floats, Rows]:
    """Take each query's own row, or else its last neighbour, out of (Q, K) scores and rows, best first."""
    if queries.own_rows is None:
        return scores, rows
    order = np.argsort(rows == queries.own_rows[:, None], axis=1, kind="stable")[:, : max(0, rows.shape[1] - 1)]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
