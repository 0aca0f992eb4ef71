"""Search over what a store has published: through its index, or exactly where it has none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embedder.once import made_once
from embedder.retrieval.catalogue import Catalogue
from embedder.retrieval.describing import NO_ROWS, Scored, describe_hits
from embedder.retrieval.exact import ExactIndex
from embedder.retrieval.folding import fold
from embedder.retrieval.grouping import ItemRows
from embedder.retrieval.hit import Hit
from embedder.retrieval.hits import Hits
from embedder.retrieval.hybrid import HybridRanker
from embedder.retrieval.index_store import open_version
from embedder.retrieval.indexing import pictures
from embedder.retrieval.options import SearchOptions
from embedder.retrieval.ranking import Arranged, Ranking, deepen
from embedder.retrieval.words_cache import open_words
from embedder.store.files import StoreFiles
from embedder.store.layout import Current
from embedder.store.tables import RecordTable

if TYPE_CHECKING:
    from index.search import Index

__all__ = ["Hit", "Searcher"]

Floats = np.ndarray[Any, np.dtype[np.float32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Profile = Literal["text", "image"]

# Grouping and folding leave fewer hits than rows, so they begin with more.
SPARE_DEPTH = 4
# Below this rank a row adds next to nothing to a fused sum (1/160 against 1/61 of the first).
HYBRID_DEPTH = 100


class Searcher:
    """Searches one published version; what it reads stays in memory. It may be asked from several threads."""

    def __init__(self, files: StoreFiles, current: Current, model_fingerprint: str) -> None:
        self.files, self.current, self.model_fingerprint = files, current, model_fingerprint

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
        among = self._among(options.where)
        num_rows = int((self._vectors.is_live if among is None else among).sum())

        def rank(which: list[int], depth: int) -> list[Ranking]:
            found = self._vectors.search(queries[which], depth, among=among, profile=profile)
            rankings = [
                _ranking(*each, is_whole=depth >= num_rows, min_score=options.min_score)
                for each in zip(found.rows, found.scores, strict=True)
            ]
            if texts is None or not options.hybrid:
                return rankings
            return self._hybrid.rank(
                rankings, queries[which], [texts[query] for query in which], depth, among, options.min_score
            )

        arranged = deepen(
            rank,
            lambda ranking: self._arrange(ranking, options),
            num_queries=len(queries),
            k=options.k,
            depth=self._depth(options),
        )
        return [self._describe(query, each, options, among) for query, each in zip(queries, arranged, strict=True)]

    def prepare(self) -> None:
        """Read what searches need; else the first one does."""
        _ = self._catalogue_rows, self._items

    def _depth(self, options: SearchOptions) -> int:
        leaves_fewer = options.fold is not None or (options.group and self._items.has_groups)
        depth = options.k * (SPARE_DEPTH if leaves_fewer else 1)
        return max(depth, HYBRID_DEPTH) if options.hybrid else depth

    def _among(self, where: str | None) -> Mask | None:
        """Which vectors may answer; bool (vectors,), or None for all that are live."""
        if where is None:
            return None
        fulfils = np.append(self._catalogue.matching(where), False)  # for the row -1, which nothing describes
        among: Mask = fulfils[self._catalogue_rows] & self._vectors.is_live
        return among

    def _arrange(self, ranking: Ranking, options: SearchOptions) -> Arranged:
        """One place a video, and near-duplicates under the best of them."""
        if options.group and self._items.has_groups:
            ranking = ranking.take(self._items.first_of_each(ranking.rows))
        if options.fold is None:
            return Arranged(ranking, [])
        places, duplicates = fold(self._vectors.vectors(ranking.rows), options.fold, options.k)
        return Arranged(ranking.take(places), [ranking.take(each) for each in duplicates])

    def _describe(self, query: Floats, arranged: Arranged, options: SearchOptions, among: Mask | None) -> Hits:
        """The first k as hits, with what the table says of them."""
        hits = arranged.hits.take(np.arange(min(options.k, len(arranged.hits.rows))))
        if len(hits.rows) == 0:
            return Hits([], note=self._why_nothing(query, options, among))
        may_answer = self._vectors.is_live if among is None else among
        segments = [
            self._segments(query, int(row), may_answer, options.min_score) if options.group else NO_ROWS
            for row in hits.rows
        ]
        return Hits(describe_hits(self._catalogue, self._catalogue_rows, hits, segments, arranged.duplicates))

    def _segments(self, query: Floats, row: int, may_answer: Mask, min_score: float | None) -> Scored:
        """The other segments of a hit's video, best first."""
        rows = self._items.others(row)
        rows = rows[may_answer[rows]]
        if len(rows) == 0:
            return NO_ROWS
        scores = self._vectors.vectors(rows) @ query
        order = np.lexsort((rows, -scores))
        kept = order if min_score is None else order[scores[order] >= min_score]
        return rows[kept], scores[kept]

    def _why_nothing(self, query: Floats, options: SearchOptions, among: Mask | None) -> str:
        num_live = len(self._vectors)
        if num_live == 0:
            return "the store holds no picture or video"
        if among is not None and not among.any():
            return f"none of {num_live:,} pictures and video segments fulfils the condition {options.where}"
        best = self._vectors.search(query[None], 1, among=among).scores[0, 0]
        return f"none has a score of {options.min_score} or more; the best is {best:.3f}"

    @made_once
    def _vectors(self) -> "Index | ExactIndex":
        if self.current.index is None:
            return ExactIndex(pictures(self._table.read(["item_id", "segment", "image_embedding"])).combine_chunks())
        return open_version(self.files, self.current.index, self.model_fingerprint)

    @made_once
    def _table(self) -> RecordTable:
        return RecordTable(self.files, "embeddings", self.current.embeddings)

    @made_once
    def _catalogue(self) -> Catalogue:
        return Catalogue(self._table)

    @made_once
    def _catalogue_rows(self) -> Rows:
        """The row of the catalogue that describes each vector."""
        return self._catalogue.rows_of(self._vectors.ids, self._vectors.is_live)

    @made_once
    def _items(self) -> ItemRows:
        return ItemRows(self._vectors.ids["item_id"])

    @made_once
    def _hybrid(self) -> HybridRanker:
        words = open_words(self._table, self._catalogue.rows["caption"])
        return HybridRanker(words, self._vectors, self._catalogue_rows, self._catalogue.rows.num_rows)


def _ranking(rows: Rows, scores: Floats, *, is_whole: bool, min_score: float | None) -> Ranking:
    is_there = rows >= 0
    ranking = Ranking(rows[is_there], scores[is_there], is_whole)
    return ranking if min_score is None else ranking.least(min_score)
