"""Search over a snapshot of a store: through its index, or exactly if it has none.

The vector of a query with several parts p (a text and an image) and negative examples n is

    q = sum of weight_p p / s(p)  -  not_weight * mean of n / s(n),  of unit norm

where s(v) is the standard deviation of the cosines of v with vectors of the store. In a model with a modality gap,
cosines with an image may vary several times as much as those with a text, and in a plain sum only the image would
decide the order. Divided by their deviations, parts of equal weight move the ranking equally.

Sources: Rocchio 1971, "Relevance feedback in information retrieval", for the mean of the examples and its sign; Liang
et al. 2022, "Mind the gap: understanding the modality gap in multi-modal contrastive learning".
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from embedder.errors import ConfigError
from embedder.retrieval.hit import Duplicate, Hit, Segment
from embedder.retrieval.hits import Hits
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.ranking import ArrangedRanking, Ranking, RowNumbers, Scored, best_segments, deepen, fold
from embedder.retrieval.row_metadata import RowMetadata
from embedder.retrieval.snapshot import Snapshot
from embedder.store.layout import SEARCHED_NAMES
from index.vectors import Among, Floats, Mask, Profile, Rows, check_vectors, count_among, is_among

# Grouping and folding leave fewer hits than rows, so they start with more rows.
SPARE_DEPTH = 4
# Below this rank a row adds little to a fused sum: 1/160, against 1/61 of the first.
HYBRID_DEPTH = 100
NO_ROWS: Scored = (np.empty(0, np.int64), np.empty(0, np.float32))


class Searcher:
    """Searcher of one snapshot; safe for several threads."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def search_batch(
        self,
        queries: Floats,
        options: SearchOptions,
        *,
        texts: Sequence[str] | None = None,
        profile: Profile = "text",
        away: Sequence[Floats | None] | None = None,
    ) -> list[Hits]:
        """Find the images and videos nearest to each query: one search for all, deeper ones for those that need them.

        `queries` are float32 (Q, E), L2-normalised, of the store's model; `texts` the same in words, required for
        hybrid search. The index is tuned for either `profile`, texts or images. `away` has each query's negative
        examples, float32 (N, E), which are never hits; None for none. `Hits.note` has the reason if there are no hits.
        Raises `ConfigError` if `options.where` is not a condition over the table's columns; `RetrievalError` if a
        vector is not of the model, or the index is damaged or of another model.
        """
        among = self.snapshot.filter_rows(options.where)
        num_rows = len(self.snapshot.vectors) if among is None else count_among(among)
        if num_rows == 0:
            return [Hits(note=self._why_none(options)) for _ in queries]
        apart = [None] * len(queries) if away is None else away

        def rank(which: list[int], depth: int) -> list[Ranking]:
            """Rank some queries by vectors and, in hybrid search, by words."""
            found = self.snapshot.vectors.search(queries[which], depth, among=among, profile=profile)
            rankings = [
                _ranking(*each, is_whole=depth >= num_rows, min_score=options.min_score)
                for each in zip(found.rows, found.scores, strict=True)
            ]
            if texts is not None and options.hybrid:
                words = [texts[query] for query in which]
                rankings = self.snapshot.hybrid.rank(rankings, queries[which], words, depth, among, options.min_score)
            return [self._without(apart[query], each) for query, each in zip(which, rankings, strict=True)]

        def arrange(ranking: Ranking) -> ArrangedRanking:
            return self._arrange(ranking, options)

        arranged = deepen(rank, arrange, num_queries=len(queries), k=options.k, depth=self._depth(options))
        return [self._describe(*each, options, among) for each in zip(queries, arranged, apart, strict=True)]

    def combine(self, wanted: Sequence[tuple[float, Floats]], away: Floats | None, options: SearchOptions) -> Floats:
        """Combine the parts of Q queries into vectors to search with, float32 (Q, E), by the vectors of the store.

        `wanted` has weight and vectors (Q, E) of each part; `away` (N, E) the negative examples of all queries, if any.
        Raises `ConfigError` if the parts of a query cancel each other out; `RetrievalError` if a vector is not of the
        model.
        """
        sample = self.snapshot.sample
        if len(sample):
            for vectors in [*(each for _, each in wanted), *([] if away is None else [away])]:
                check_vectors(vectors, "query", dim=sample.shape[1])
        return combine(wanted, away, options.not_weight, sample)

    def _depth(self, options: SearchOptions) -> int:
        leaves_fewer = options.fold is not None or (options.group and self.snapshot.items.has_groups)
        depth = options.k * (SPARE_DEPTH if leaves_fewer else 1)
        return max(depth, HYBRID_DEPTH) if options.hybrid else depth

    def _arrange(self, ranking: Ranking, options: SearchOptions) -> ArrangedRanking:
        if options.group:
            ranking = ranking.take(self.snapshot.items.first_of_each(ranking.rows))
        if options.fold is None:
            return ArrangedRanking(ranking, [])
        positions, duplicates = fold(self.snapshot.vectors.vectors(ranking.rows), options.fold, options.k)
        return ArrangedRanking(ranking.take(positions), [ranking.take(each) for each in duplicates])

    def _without(self, away: Floats | None, ranking: Ranking) -> Ranking:
        if away is None:
            return ranking
        return ranking.take(np.flatnonzero(is_apart(self.snapshot.vectors.vectors(ranking.rows), away)))

    def _describe(
        self, query: Floats, arranged: ArrangedRanking, away: Floats | None, options: SearchOptions, among: Among | None
    ) -> Hits:
        snapshot = self.snapshot
        hits = arranged.hits.take(np.arange(min(options.k, len(arranged.hits.rows))))
        if len(hits.rows) == 0 and away is not None:
            least = "" if options.min_score is None else f" with a score of {options.min_score} or more"
            return Hits(note=f"there is nothing{least} but the examples to stay away from")
        if len(hits.rows) == 0:
            best = snapshot.vectors.search(query[None], 1, among=among).scores[0, 0]
            return Hits(note=f"none has a score of {options.min_score} or more; the best is {best:.3f}")
        segments = [self._segments(query, int(row), away, options, among) for row in hits.rows]
        hits, segments = best_segments(hits, segments)
        found = describe_hits(snapshot.metadata, snapshot.metadata_rows, hits, segments, arranged.duplicates)
        # A segment that an approximate search missed may lift its video; fused ranks stay unchanged.
        return Hits(found if options.hybrid else sorted(found, key=lambda hit: -hit.score))

    def _segments(
        self, query: Floats, row: int, away: Floats | None, options: SearchOptions, among: Among | None
    ) -> Scored:
        rows = self.snapshot.items.others(row) if options.group else NO_ROWS[0]
        rows = rows[is_among(self.snapshot.vectors.is_live if among is None else among, rows)]
        rows = rows if away is None else rows[is_apart(self.snapshot.vectors.vectors(rows), away)]
        if len(rows) == 0:
            return NO_ROWS
        scores = self.snapshot.vectors.vectors(rows) @ query
        order = np.lexsort((rows, -scores))
        if options.min_score is not None:
            order = order[scores[order] >= options.min_score]
        return rows[order], scores[order]

    def _why_none(self, options: SearchOptions) -> str:
        num_live = len(self.snapshot.vectors)
        searched = self.snapshot.info.searched
        if num_live == 0:
            return f"the store holds no {SEARCHED_NAMES[searched]}"
        names = "images and video segments" if searched == "image" else "captions"
        return f"none of {num_live:,} {names} fulfils the condition {options.where}"


def _ranking(rows: Rows, scores: Floats, *, is_whole: bool, min_score: float | None) -> Ranking:
    is_found = rows >= 0
    kept = is_found if min_score is None else is_found & (scores >= min_score)
    return Ranking(rows[kept], scores[kept], is_whole or not kept[is_found].all())


def describe_hits(
    metadata: RowMetadata,
    metadata_rows: RowNumbers,
    hits: Ranking,
    segments: Sequence[Scored],
    duplicates: Sequence[Ranking],
) -> list[Hit]:
    """Build the hits of one query.

    `metadata_rows` maps rows of the index to rows of `metadata`. `hits` has a row for each hit, `segments` the other
    segments of its video, `duplicates` the rows folded under it (may be empty without folding).
    """
    folded = [(each.rows, each.scores) for each in duplicates] or [NO_ROWS] * len(segments)
    wanted = np.concatenate([hits.rows, *(rows for rows, _ in [*segments, *folded])])
    described = iter(metadata.describe(metadata_rows[wanted]))
    own = [next(described) for _ in hits.rows]
    segment_lists = [
        [Segment(row["start_s"], row["end_s"], score) for row, score in _with_scores(described, each)]
        for each in segments
    ]
    duplicate_lists = [
        [Duplicate(row["item_id"], score) for row, score in _with_scores(described, each)] for each in folded
    ]
    return [
        Hit(
            score=float(hits.scores[position]),
            segments=segment_lists[position],
            duplicates=duplicate_lists[position],
            rank_score=None if hits.rank_scores is None else float(hits.rank_scores[position]),
            words_rank=None if hits.words_ranks is None else int(hits.words_ranks[position]) or None,
            vector_rank=None if hits.vector_ranks is None else int(hits.vector_ranks[position]) or None,
            **description,
        )
        for position, description in enumerate(own)
    ]


def _with_scores(described: Iterator[dict[str, Any]], scored: Scored) -> Iterator[tuple[dict[str, Any], float]]:
    for score in scored[1].tolist():
        yield next(described), score


EXAMPLE_COSINE = 0.995
"""Cosine from which on a vector counts as the example itself: one computed in bfloat16 is off by less than 0.001."""
MIN_SPREAD = 1e-6  # less: all vectors are equal, or there is only one
MIN_NORM = 1e-3  # of a sum, as a share of its terms' norms; anything below is rounding


def combine(wanted: Sequence[tuple[float, Floats]], away: Floats | None, not_weight: float, sample: Floats) -> Floats:
    """Combine the parts of Q queries into vectors, float32 (Q, E), of unit norm.

    `wanted` has weight and vectors (Q, E) of each part, `away` (N, E) the negative examples of all queries, if any;
    `not_weight` is that of all examples together. `sample` (S, E) are vectors of the store. Raises `ConfigError` if the
    parts of a query cancel each other out.
    """
    terms = [weight * vectors / cosine_deviation(vectors, sample)[:, None] for weight, vectors in wanted]
    if away is not None:
        terms.append(-not_weight * np.mean(away / cosine_deviation(away, sample)[:, None], axis=0, keepdims=True))
    total = np.sum(np.broadcast_arrays(*terms), axis=0)
    norms = np.linalg.norm(total, axis=1, keepdims=True)
    if (norms <= MIN_NORM * sum(np.linalg.norm(term, axis=1, keepdims=True) for term in terms)).any():
        raise ConfigError(
            "the query and what it stays away from cancel each other out; search with something else, or give a "
            "smaller not_weight"
        )
    return np.asarray(total / norms, np.float32)


def cosine_deviation(vectors: Floats, sample: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the standard deviation of each vector's (n, E) cosines with a sample (S, E) of the store, float64 (n,).

    With fewer than two sample vectors, all deviations are 1.
    """
    if len(sample) < 2:
        return np.ones(len(vectors))
    # One by one: in a matrix product, the last bits of a vector's result depend on the batch.
    found = np.array([(sample @ vector).std(dtype=np.float64) for vector in vectors])
    return np.where(found < MIN_SPREAD, 1.0, found)


def is_apart(vectors: Floats, away: Floats) -> Mask:
    """Whether each vector (n, E), of norm about 1, differs from all examples (N, E), of unit norm; bool (n,)."""
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    apart: Mask = ((vectors / norms) @ away.T < EXAMPLE_COSINE).all(axis=1)
    return apart
