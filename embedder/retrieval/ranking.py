"""What answers one query before it is described: rows of the index, best first; arithmetic alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Scored = tuple[Rows, Floats]
"""Rows of the index and their cosines, best first."""


@dataclass(frozen=True)
class Ranking:
    """The rows that a search of some depth brought up, best first.

    Attributes:
        rows: int64 (n,).
        scores: float32 (n,), cosines with the query.
        is_whole: no deeper search brings up more.
        rank_scores: float64 (n,), what hybrid search orders by; None where the cosines do.
        words_ranks: int64 (n,), place in the ranking by words, from 1; 0 where a row is not in it.
    """

    rows: Rows
    scores: Floats
    is_whole: bool
    rank_scores: Doubles | None = None
    words_ranks: Rows | None = None

    def least(self, score: float) -> "Ranking":
        """What has at least some cosine, of a ranking by cosines; whole, too, where it falls below that."""
        kept = np.flatnonzero(self.scores >= score)
        return self.take(kept, is_whole=self.is_whole or len(kept) < len(self.scores))

    def take(self, places: Rows, *, is_whole: bool | None = None) -> "Ranking":
        """Some places of it, in their order."""
        return Ranking(
            self.rows[places],
            self.scores[places],
            self.is_whole if is_whole is None else is_whole,
            None if self.rank_scores is None else self.rank_scores[places],
            None if self.words_ranks is None else self.words_ranks[places],
        )


@dataclass(frozen=True)
class ArrangedRanking:
    """A ranking that is grouped and folded.

    Attributes:
        hits: one place a hit.
        duplicates: for each hit, what was folded under it; empty where nothing is to be folded.
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
        arrange: leaves fewer hits than the ranking has rows.
        num_queries: Q.
        k: hits that a query should get.
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
