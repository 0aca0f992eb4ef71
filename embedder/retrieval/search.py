"""Search over what a store has published: through its index, or exactly where it has none."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from embedder.retrieval.build_hits import NO_ROWS, describe_hits
from embedder.retrieval.grouping import best_segments
from embedder.retrieval.hit import Hit
from embedder.retrieval.hits import Hits
from embedder.retrieval.near_duplicates import fold
from embedder.retrieval.options import SearchOptions
from embedder.retrieval.ranking import ArrangedRanking, Ranking, Scored, deepen
from embedder.retrieval.snapshot import Snapshot
from embedder.store.files import StoreFiles
from embedder.store.layout import Current

__all__ = ["Hit", "Searcher"]

Floats = np.ndarray[Any, np.dtype[np.float32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Profile = Literal["text", "image"]

# Grouping and folding leave fewer hits than rows, so they begin with more.
SPARE_DEPTH = 4
# Below this rank a row adds little to a fused sum: 1/160, against 1/61 of the first.
HYBRID_DEPTH = 100


class Searcher:
    """Searches one published version. It may be asked from several threads."""

    def __init__(self, files: StoreFiles, current: Current, model_fingerprint: str) -> None:
        self.version = Snapshot(files, current, model_fingerprint)

    def search(self, vector: Floats, k: int = 10) -> Hits:
        """The k pictures and videos nearest to one vector, best first; fewer where there are fewer.

        Args:
            vector: float32 (E,), L2-normalised, of the store's model.
            k: at least 1.

        Raises:
            index.RetrievalError: k is below 1, or the index is damaged or of another model.
        """
        return self.search_batch(np.asarray(vector)[None], SearchOptions(k=k))[0]

    def search_batch(
        self,
        queries: Floats,
        options: SearchOptions,
        *,
        texts: Sequence[str] | None = None,
        profile: Profile = "text",
    ) -> list[Hits]:
        """Answer several queries at once: one search of the index for all, deeper ones for those that need them.

        Args:
            queries: float32 (Q, E), L2-normalised, of the store's model.
            options: the same for all.
            texts: the Q queries in words; hybrid search needs them.
            profile: whether the queries are vectors of texts or of pictures; the index is tuned for either.

        Returns:
            Hits for each query, best first; where there are none, they tell why.

        Raises:
            ConfigError: the condition in `options.where` is no condition over the table's columns.
            RetrievalError: a vector is not one of the model, or the index is damaged or of another model.
        """
        among = self.version.among(options.where)
        num_rows = int((self.version.vectors.is_live if among is None else among).sum())
        if num_rows == 0:
            return [Hits(note=self._why_nobody(options)) for _ in queries]

        def rank(which: list[int], depth: int) -> list[Ranking]:
            """Candidates of some queries, by vectors and, in hybrid search, by words."""
            found = self.version.vectors.search(queries[which], depth, among=among, profile=profile)
            rankings = [
                _ranking(*each, is_whole=depth >= num_rows, min_score=options.min_score)
                for each in zip(found.rows, found.scores, strict=True)
            ]
            if texts is None or not options.hybrid:
                return rankings
            words = [texts[query] for query in which]
            return self.version.hybrid.rank(rankings, queries[which], words, depth, among, options.min_score)

        def arrange(ranking: Ranking) -> ArrangedRanking:
            return self._arrange(ranking, options)

        arranged = deepen(rank, arrange, num_queries=len(queries), k=options.k, depth=self._depth(options))
        return [self._describe(query, each, options, among) for query, each in zip(queries, arranged, strict=True)]

    def prepare(self, like: "Searcher | None" = None) -> None:
        """Read what searches need, and those that another searcher had; else the first one does."""
        self.version.prepare(like.version if like is not None else None)

    def _depth(self, options: SearchOptions) -> int:
        """How many rows to look at first."""
        leaves_fewer = options.fold is not None or (options.group and self.version.items.has_groups)
        depth = options.k * (SPARE_DEPTH if leaves_fewer else 1)
        return max(depth, HYBRID_DEPTH) if options.hybrid else depth

    def _arrange(self, ranking: Ranking, options: SearchOptions) -> ArrangedRanking:
        """One place a video, and near-duplicates under the best of them."""
        if options.group:
            ranking = ranking.take(self.version.items.first_of_each(ranking.rows))
        if options.fold is None:
            return ArrangedRanking(ranking, [])
        places, duplicates = fold(self.version.vectors.vectors(ranking.rows), options.fold, options.k)
        return ArrangedRanking(ranking.take(places), [ranking.take(each) for each in duplicates])

    def _describe(self, query: Floats, arranged: ArrangedRanking, options: SearchOptions, among: Mask | None) -> Hits:
        """The first k as hits, with what the table says of them."""
        version = self.version
        hits = arranged.hits.take(np.arange(min(options.k, len(arranged.hits.rows))))
        if len(hits.rows) == 0:
            best = version.vectors.search(query[None], 1, among=among).scores[0, 0]
            return Hits(note=f"none has a score of {options.min_score} or more; the best is {best:.3f}")
        segments = [self._segments(query, int(row), options, among) for row in hits.rows]
        hits, segments = best_segments(hits, segments)
        found = describe_hits(version.catalogue, version.catalogue_rows, hits, segments, arranged.duplicates)
        # A segment that an approximate search missed may lift its video; fused ranks stay as they are.
        return Hits(found if options.hybrid else sorted(found, key=lambda hit: -hit.score))

    def _segments(self, query: Floats, row: int, options: SearchOptions, among: Mask | None) -> Scored:
        """The other segments of a hit's video that may answer."""
        rows = self.version.items.others(row) if options.group else NO_ROWS[0]
        rows = rows[(self.version.vectors.is_live if among is None else among)[rows]]
        if len(rows) == 0:
            return NO_ROWS
        scores = self.version.vectors.vectors(rows) @ query
        order = np.lexsort((rows, -scores))
        if options.min_score is not None:
            order = order[scores[order] >= options.min_score]
        return rows[order], scores[order]

    def _why_nobody(self, options: SearchOptions) -> str:
        num_live = len(self.version.vectors)
        if num_live == 0:
            return "the store holds no picture or video"
        return f"none of {num_live:,} pictures and video segments fulfils the condition {options.where}"


def _ranking(rows: Rows, scores: Floats, *, is_whole: bool, min_score: float | None) -> Ranking:
    is_there = rows >= 0
    ranking = Ranking(rows[is_there], scores[is_there], is_whole)
    return ranking if min_score is None else ranking.least(min_score)
