"""Hybrid ranking by vectors and caption words, by reciprocal rank fusion.

Source: Cormack, Clarke and Büttcher, *Reciprocal rank fusion outperforms Condorcet and individual rank learning
methods*, SIGIR 2009; the constant 60 is theirs.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from embedder.retrieval.bm25 import CaptionWords
from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.ranking import Doubles, Ranking, RowNumbers
from index.vectors import Among, Floats, Mask, Rows, is_among

if TYPE_CHECKING:
    from index.search import Index

RRF_K = 60
MOST = 2 / (RRF_K + 1)
EXACT_DEPTH = 20  # first captions by words that may be the query itself

Captions = Callable[[Rows], Sequence[str | None]]
"""Captions of some rows of the table."""


class HybridRanker:
    """Ranker of one snapshot's rows by vectors and words."""

    def __init__(
        self, words: CaptionWords, vectors: "Index | ExactIndex", vector_rows: RowNumbers, captions: Captions
    ) -> None:
        """Join the two numberings of rows.

        Args:
            words: numbers rows as the table does.
            vectors: has another order, and lacks rows without an image.
            vector_rows: row of the vector for each row of the table, -1 where it has none.
            captions: of the table.
        """
        self._words, self._vectors, self._vector_rows, self._captions = words, vectors, vector_rows, captions
        self._has_vector: Mask = vector_rows >= 0

    def rank(
        self,
        rankings: Sequence[Ranking],
        queries: Floats,
        texts: Sequence[str],
        depth: int,
        among: Among | None,
        min_score: float | None,
    ) -> list[Ranking]:
        """Fuse the ranking of each query by vectors with its ranking by words.

        Args:
            rankings: by vectors, Q of them.
            queries: float32 (Q, E).
            texts: the same Q queries.
            depth: length of the ranking by words.
            among: the rows of vectors that are allowed; by default all that are live.
            min_score: the least cosine of either ranking's rows.
        """
        allowed = self._allowed_rows(among)
        found = [self._words.ranking(text, depth, allowed) for text in texts]
        return [
            self._fuse(ranking, query, rows, self._num_exact(text, rows), min_score)
            for ranking, query, text, rows in zip(rankings, queries, texts, found, strict=True)
        ]

    def _num_exact(self, text: str, rows: Rows) -> int:
        """Number of the first captions that are the query itself, but for case and punctuation."""
        captions = self._captions(rows[:EXACT_DEPTH]) if len(rows) else []
        return sum(1 for _ in takewhile(lambda caption: self._words.is_same(text, caption or ""), captions))

    def _allowed_rows(self, among: Among | None) -> Mask:
        """Mask of the rows of the table that are allowed."""
        if among is None:
            return self._has_vector
        allowed = self._has_vector.copy()
        allowed[allowed] = is_among(among, self._vector_rows[allowed])
        return allowed

    def _fuse(
        self, ranking: Ranking, query: Floats, table_rows: Rows, num_exact: int, min_score: float | None
    ) -> Ranking:
        by_words = self._vector_rows[table_rows].astype(np.int64)
        scores = self._vectors.vectors(by_words) @ query
        exact = by_words[:num_exact]
        if min_score is not None:
            by_words, scores = by_words[scores >= min_score], scores[scores >= min_score]
            exact = exact[np.isin(exact, by_words)]
        rows, sums = reciprocal_rank_fusion([by_words, ranking.rows])  # equal sums are ordered by words
        sums = np.where(np.isin(rows, exact), MOST, sums)  # a caption that is the query counts as first in both
        order = np.argsort(-sums, kind="stable")
        rows, sums = rows[order], sums[order]
        known = dict(zip(by_words.tolist(), scores.tolist(), strict=True))
        known |= dict(zip(ranking.rows.tolist(), ranking.scores.tolist(), strict=True))
        return Ranking(
            rows,
            np.array([known[row] for row in rows.tolist()], np.float32),
            ranking.is_whole,
            sums,
            _ranks(rows, by_words),
            _ranks(rows, ranking.rows),
        )


def _ranks(rows: Rows, ranked: Rows) -> Rows:
    """Rank of each row in a ranking, from 1; 0 where it isn't in it."""
    ranks = {row: rank for rank, row in enumerate(ranked.tolist(), start=1)}
    return np.array([ranks.get(row, 0) for row in rows.tolist()], np.int64)


def reciprocal_rank_fusion(rankings: Sequence[Rows]) -> tuple[Rows, Doubles]:
    """Order all rows of some rankings by the sum of 1 / (60 + rank) over the rankings that have them.

    Args:
        rankings: rows, best first; each row at most once in one ranking.

    Returns:
        The rows, best first, and their sums. Equal sums are ordered as the first ranking has them, those that it lacks
        after it, by row.
    """
    rows, positions = np.unique(np.concatenate([np.empty(0, np.int64), *rankings]), return_inverse=True)
    sums = np.zeros(len(rows))
    first_ranks = np.full(len(rows), np.inf)
    start = 0
    for number, ranking in enumerate(rankings):
        own = positions[start : start + len(ranking)]
        ranks = 1.0 + np.arange(len(ranking))
        sums[own] += 1 / (RRF_K + ranks)
        if number == 0:
            first_ranks[own] = ranks
        start += len(ranking)
    order = np.lexsort((rows, first_ranks, -sums))
    return rows[order], sums[order]
