"""Rankings of the index's rows for one query, best first: deepened, grouped by item, near-duplicates folded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from index.vectors import Floats, Rows

Doubles = np.ndarray[Any, np.dtype[np.float64]]
RowNumbers = np.ndarray[Any, np.dtype[np.int32]] | Rows
"""For each row in one numbering, its row in another, or -1; 4 bytes each if they fit."""
Scored = tuple[Rows, Floats]
"""Rows of the index and their cosines, best first."""


def row_numbers(num_rows: int, num_numbered: int) -> RowNumbers:
    """Allocate row numbers, all still unset."""
    if num_numbered <= np.iinfo(np.int32).max:
        return np.full(num_rows, -1, np.int32)
    return np.full(num_rows, -1, np.int64)


@dataclass(frozen=True)
class Ranking:
    """Rows found by a search of some depth, int64 (n,), best first, with their cosines, float32 (n,).

    `is_whole`: no deeper search finds more. `rank_scores`, float64 (n,), is the order of hybrid search; None if cosines
    give the order. `words_ranks` and `vector_ranks`, int64 (n,), are from 1; 0 if a row is not in that ranking.
    """

    rows: Rows
    scores: Floats
    is_whole: bool
    rank_scores: Doubles | None = None
    words_ranks: Rows | None = None
    vector_ranks: Rows | None = None

    def take(self, positions: Rows) -> "Ranking":
        """Return the rows at some positions, in that order."""
        return Ranking(
            self.rows[positions],
            self.scores[positions],
            self.is_whole,
            None if self.rank_scores is None else self.rank_scores[positions],
            None if self.words_ranks is None else self.words_ranks[positions],
            None if self.vector_ranks is None else self.vector_ranks[positions],
        )


@dataclass(frozen=True)
class ArrangedRanking:
    """A ranking that is grouped and folded: a row per hit, and the rows folded under it (empty without folding)."""

    hits: Ranking
    duplicates: list[Ranking]


def deepen(
    rank: Callable[[list[int], int], Sequence[Ranking]],
    arrange: Callable[[Ranking], ArrangedRanking],
    *,
    num_queries: int,
    k: int,
    depth: int,
) -> list[ArrangedRanking]:
    """Search deeper, twice as deep each time, until each query has k hits or there is nothing more to find.

    `rank` gives the rankings of some queries at a depth; `arrange` groups and folds one, which leaves fewer hits than
    rows.
    """
    arranged: dict[int, ArrangedRanking] = {}
    pending = list(range(num_queries))
    while pending:
        for query, ranking in zip(pending, rank(pending, depth), strict=True):
            arranged[query] = arrange(ranking)
        hits = {query: arranged[query].hits for query in pending}
        pending = [query for query in pending if len(hits[query].rows) < k and not hits[query].is_whole]
        depth *= 2
    return [arranged[query] for query in range(num_queries)]


ROUNDING = 1e-6  # difference between a cosine from a search and the same one from the vector
# Rounding error of products of float32 vectors of unit norm; equal vectors should reach a cosine of 1.
TOLERANCE = 1e-6


class ItemRows:
    """Rows of each video."""

    def __init__(self, ids: pa.Table) -> None:
        """Number the items from the `item_id` and `segment` of each row; those with one row need no lookup."""
        videos = pc.unique(ids["item_id"].filter(pc.greater(ids["segment"], 0)))
        self.has_groups = len(videos) > 0
        if self.has_groups:
            numbers = pc.fill_null(pc.index_in(ids["item_id"], value_set=videos), -1).to_numpy().astype(np.int64)
            # Each image has its own number.
            self._items: Rows = np.where(numbers < 0, len(videos) + np.arange(len(numbers)), numbers)
            self._by_video: Rows = np.flatnonzero(numbers >= 0)
            self._by_video = self._by_video[np.argsort(numbers[self._by_video], kind="stable")]
            self._starts: Rows = np.searchsorted(numbers[self._by_video], np.arange(len(videos) + 1))

    def first_of_each(self, rows: Rows) -> Rows:
        """Return the positions in `rows` where an item occurs for the first time."""
        if not self.has_groups:
            return np.arange(len(rows))
        _, first = np.unique(self._items[rows], return_index=True)
        positions: Rows = np.sort(first)
        return positions

    def others(self, row: int) -> Rows:
        """Return the other rows of the video that a row belongs to; none for an image."""
        if not self.has_groups or self._items[row] >= len(self._starts) - 1:
            return np.empty(0, np.int64)
        start, stop = self._starts[self._items[row] :][:2]
        rows = self._by_video[start:stop]
        others: Rows = rows[rows != row]
        return others


def best_segments(hits: Ranking, segments: list[Scored]) -> tuple[Ranking, list[Scored]]:
    """Replace each video's row by its best segment, which an approximate search may have missed."""
    rows, scores, others = hits.rows.copy(), hits.scores.copy(), list(segments)
    for position, (other_rows, other_scores) in enumerate(segments):
        if len(other_rows) and other_scores[0] > scores[position] + ROUNDING:
            behind = int(np.searchsorted(-other_scores, -scores[position]))
            others[position] = (
                np.insert(other_rows, behind, rows[position])[1:],
                np.insert(other_scores, behind, scores[position])[1:],
            )
            rows[position], scores[position] = other_rows[0], other_scores[0]
    return replace(hits, rows=rows, scores=scores), others


def fold(vectors: Floats, least_cosine: float, k: int) -> tuple[Rows, list[Rows]]:
    """Keep the first k vectors that are not near a better kept one, and list the duplicates of each.

    `vectors`, float32 (n, E), are best first; a quantised index gives norms of only about 1. Returns the positions
    kept, and for each the positions of its duplicates. A vector near several belongs to the best.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    left = np.arange(len(vectors))
    kept: list[int] = []
    duplicates: list[Rows] = []
    while len(left) and len(kept) < k:
        is_near = directions[left] @ directions[left[0]] >= least_cosine - TOLERANCE
        is_near[0] = True
        kept.append(left[0])
        duplicates.append(left[is_near][1:])
        left = left[~is_near]
    return np.array(kept, np.int64), duplicates
