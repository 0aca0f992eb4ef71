"""Rankings of the index's rows for one query, best first; arithmetic alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from index.vectors import Floats, Rows

Doubles = np.ndarray[Any, np.dtype[np.float64]]
RowNumbers = np.ndarray[Any, np.dtype[np.int32]] | Rows
"""Row in one numbering for each row of another one, -1 where there is none; in 4 bytes each where they fit."""
Scored = tuple[Rows, Floats]
"""Rows of the index and their cosines, best first."""


def row_numbers(num_rows: int, num_numbered: int) -> RowNumbers:
    """Make room for the numbers of some rows, none of them known yet.

    Args:
        num_rows: that have a number each.
        num_numbered: rows that are numbered.
    """
    if num_numbered <= np.iinfo(np.int32).max:
        return np.full(num_rows, -1, np.int32)
    return np.full(num_rows, -1, np.int64)


@dataclass(frozen=True)
class Ranking:
    """Rows found by a search of some depth, best first.

    Attributes:
        rows: int64 (n,).
        scores: float32 (n,), cosines with the query.
        is_whole: no deeper search finds more.
        rank_scores: float64 (n,), the order of hybrid search; None where the cosines give the order.
        words_ranks: int64 (n,), rank by words, from 1; 0 where a row is not in it.
        vector_ranks: int64 (n,), rank by vectors in the same way.
    """

    rows: Rows
    scores: Floats
    is_whole: bool
    rank_scores: Doubles | None = None
    words_ranks: Rows | None = None
    vector_ranks: Rows | None = None

    def take(self, positions: Rows) -> "Ranking":
        """Rows at some positions, in their order."""
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
    """A ranking that is grouped and folded.

    Attributes:
        hits: one row for each hit.
        duplicates: for each hit, the rows folded under it; empty where nothing is to be folded.
    """

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

    Args:
        rank: gives the rankings of some queries at a depth.
        arrange: groups and folds a ranking, which leaves fewer hits than rows.
        num_queries: Q.
        k: hits wanted of each query.
        depth: of the first search.
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
