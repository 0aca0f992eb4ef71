"""Recall of an index: the rank of each query's right item among its hits, and the share of the exact answer found."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.evaluation.exact import TIE, ExactNeighbours, Ints
from embedder.evaluation.images import ImageTable
from index.vectors import Floats

if TYPE_CHECKING:
    from index.search import Index, Neighbours

Search = Callable[[Floats, int], "Neighbours"]


class IndexedItems:
    """Item and row of the table of each row of an index."""

    def __init__(self, index: "Index", images: ImageTable) -> None:
        self._images = images
        self._items = images.numbers_of(index.ids["item_id"])
        self._segments = index.ids["segment"].to_numpy().astype(np.int64)

    def items(self, rows: Ints) -> Ints:
        """Items of rows of the index, of any shape; -1 for row -1."""
        return np.where(rows >= 0, self._items[np.maximum(rows, 0)], -1)

    def table_rows(self, rows: Ints) -> Ints:
        """Rows of the table for rows of the index, of any shape; -1 where it has none."""
        flat = rows.reshape(-1)
        found = self._images.rows_of(self.items(flat), self._segments[np.maximum(flat, 0)])
        return found.reshape(rows.shape)


def find_items(
    search: Search, queries: Floats, rows: IndexedItems, num_items: int, num_rows: int
) -> tuple[Floats, Ints]:
    """Search so deep that each query finds `num_items` different items, or all there are.

    A clip's segments count as one answer, so more rows may be needed than items.

    Args:
        search: `(queries, k) -> Neighbours`.
        queries: float32 (Q, E).
        rows: items of the index's rows.
        num_items: at least 1.
        num_rows: rows that the index has.

    Returns:
        Scores and items of the hits, (Q, k), best first; item -1 where there is none.
    """
    depth = min(num_items, num_rows)
    hits = search(queries, depth)
    while depth < num_rows and (_num_different(rows.items(hits.rows)) < num_items).any():
        depth = min(2 * depth, num_rows)
        hits = search(queries, depth)
    return hits.scores, rows.items(hits.rows)


def _num_different(items: Ints) -> Ints:
    """Number of different items in each row; int64 (Q,)."""
    ordered = np.sort(items, axis=1)
    is_new = np.diff(ordered, axis=1, prepend=-1) != 0
    return np.asarray((is_new & (ordered >= 0)).sum(axis=1), np.int64)


def ranks_among(scores: Floats, items: Ints, queries: Ints, right_items: Ints, num_items: int) -> Ints:
    """Number of wrong items before each query's best right one among its hits; `num_items` where it is not found.

    Ties count against the index, as they do in exact search.

    Args:
        scores: float32 (Q, k) of the hits.
        items: int64 (Q, k), -1 for none.
        queries: int64 (R,), numbers of queries.
        right_items: int64 (R,), an item that is right for it.
        num_items: more than any item's number.
    """
    numbers = np.arange(len(items))[:, None] * num_items
    is_right = np.isin(numbers + items, queries * num_items + right_items) & (items >= 0)
    own = np.where(is_right, scores, -np.inf).max(axis=1, initial=-np.inf)
    is_ahead = (scores > (own - TIE)[:, None]) & ~is_right & (items >= 0)
    ahead = _num_different(np.where(is_ahead, items, -1))
    return np.where(np.isfinite(own), ahead, num_items)


def found_shares(found_scores: Floats, exact: ExactNeighbours, k: int) -> Any:
    """recall@k of each query: share of the exact top k that stands among the first k hits; float32 (Q,).

    A hit counts when its exact score reaches that of the k-th, so among equal vectors any will do.

    Args:
        found_scores: float32 (Q, >= k), exact scores of the hits in the index's order, -inf for none.
        exact: the exact answer, of at least k rows where there are so many.
        k: at least 1.
    """
    k = min(k, exact.scores.shape[1])
    return (found_scores[:, :k] >= exact.scores[:, k - 1 : k] - TIE).mean(axis=1)
