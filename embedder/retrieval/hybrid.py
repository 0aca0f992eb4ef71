"""Hybrid ranking: vectors, and BM25 over words of captions and of pictures, joined by reciprocal rank fusion.

It is exact, in blocks of captions.

Sources: Cormack, Clarke and Büttcher, SIGIR 2009 (fusion, the constant 60); Robertson and others' BM25 with Lucene's
idf, never negative; MaxScore (Turtle and Flood, 1995): terms that can't lift a caption among the best are looked up
only for captions that others lifted.

A publication without a word index gets one in the cache, next to copies of vector indexes. A cached folder is complete
or absent, so several processes may build at once; a damaged one is rebuilt. Purging deletes them, as they contain
captions.
"""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.ranking import Doubles, Ranking, RowNumbers
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import has_keywords, searched_column
from embedder.store_index import keep_words
from embedder.store_index.analyser import RULES, UNICODE, Analyser, hash_term
from embedder.store_index.index_versions import COPIES_FOLDER, make_copy, open_copy
from embedder.store_index.word_index import CURE, NO_ROW, WordIndex, build_words, open_word_index
from embedder.store_index.word_parts import Numbers, WordPart
from index.index_errors import RetrievalError
from index.vectors import Among, Floats, Mask, Rows, distinct, is_among

if TYPE_CHECKING:
    from index.search import Index

K1, B = 1.5, 0.75
DOCS_AT_ONCE = 1 << 17  # their arrays fit into the cache of a core
SHARE_SORTED = 3  # captions are sorted, not marked, if there are this many times fewer of them
SHARE_SCANNED = 8  # postings are looked up one by one if they outnumber the wanted captions this many times


@dataclass(frozen=True)
class _Term:
    """Term of a query: its hash, and idf times its count in the query, the most that it adds to a score."""

    number: int
    weight: float


class CaptionWords:
    """Ranking of rows by the words of their captions; safe for several threads."""

    def __init__(self, index: WordIndex) -> None:
        self._index = index
        self._analyser = Analyser(index.manifest.analyser)
        self._lock, self._known = Lock(), dict[int, int]()  # number of captions with a term whose lists were checked

    def ranking(self, text: str, depth: int, among: Mask | None = None) -> Rows:
        """Return up to `depth` rows whose captions share a term with the text, best first, equal ones by row.

        `among`, bool (rows of the table,), selects the rows allowed; None means all. Raises `RetrievalError` if a list
        of the index was altered.
        """
        terms = self._terms(text)
        best = _Best(depth)
        first = 0
        for part in self._index.parts if terms else ():
            rows = self._index.rows[first : first + part.num_docs]
            for start in range(0, part.num_docs, DOCS_AT_ONCE):
                stop = min(start + DOCS_AT_ONCE, part.num_docs)
                self._score(part, rows, start, stop, terms, among, best)
            first += part.num_docs
        return best.rows

    def is_same(self, text: str, caption: str) -> bool:
        """Whether a caption equals the text, ignoring case, punctuation and Unicode forms."""
        terms = self._analyser.query_terms(text)
        return bool(terms) and terms == self._analyser.query_terms(caption)

    def contains(self, text: str, phrase: str) -> bool:
        """Whether a text has all words of a phrase of several one after the other, by the rules of `is_same`."""
        wanted, found = self._analyser.query_terms(phrase), self._analyser.query_terms(text)
        starts = range(len(found) - len(wanted) + 1) if len(wanted) > 1 else ()
        return any(found[start : start + len(wanted)] == wanted for start in starts)

    def _terms(self, text: str) -> list[_Term]:
        found = []
        num_captions = self._index.manifest.num_captions
        for term, times in Counter(self._analyser.query_terms(text)).items():
            number = hash_term(term)
            if num_with := self._num_with(number):
                weight = times * np.log1p((num_captions - num_with + 0.5) / (num_with + 0.5))
                found.append((num_with, _Term(number, float(weight))))
        return [term for _, term in sorted(found, key=lambda each: (-each[1].weight, each[0], each[1].number))]

    def _num_with(self, number: int) -> int:
        """Count the captions with a term, without deleted ones."""
        with self._lock:
            if number in self._known:
                return self._known[number]
        total = first = 0
        for part in self._index.parts:
            start, stop = part.span(number)
            if stop > start:
                try:
                    part.check(number)
                except RetrievalError as error:
                    raise self._altered_error(error) from None
            if self._index.manifest.num_gone:
                rows = self._index.rows[first : first + part.num_docs]
                for at in range(start, stop, DOCS_AT_ONCE):
                    total += int(np.count_nonzero(rows[part.docs[at : min(at + DOCS_AT_ONCE, stop)]] != NO_ROW))
            else:
                total += stop - start
            first += part.num_docs
        with self._lock:
            self._known[number] = total
        return total

    def _altered_error(self, error: RetrievalError) -> RetrievalError:
        """Return the error of an altered list; a copy in this machine's cache is deleted, as building won't mend it."""
        folder, cure = self._index.folder, CURE
        if folder.is_relative_to(cache_folder(COPIES_FOLDER)):
            shutil.rmtree(folder, ignore_errors=True)
            cure = "this copy was deleted, so the next search makes another"
        return RetrievalError(f"{folder}: the word index was altered ({error}); {cure}")

    def _score(
        self,
        part: WordPart,
        rows: Numbers,
        start: int,
        stop: int,
        terms: Sequence[_Term],
        among: Mask | None,
        best: "_Best",
    ) -> None:
        """Score the captions of a part from `start` to `stop`, and add the best of them to `best`."""
        lists = [_list(part, term.number, start, stop) for term in terms]
        left = np.cumsum([term.weight for term in terms][::-1])[::-1]  # sums of each term and those after it
        num_needed = sum(1 for each in left if each >= best.least)
        needed = [docs for docs, _ in lists[:num_needed] if len(docs)]
        if not needed:
            return
        docs = _union(needed, start, stop)
        places = rows[docs]
        is_allowed = places != NO_ROW
        if among is not None:
            is_allowed &= among[np.where(is_allowed, places, 0)]
        docs, places = docs[is_allowed], places[is_allowed]
        manifest = self._index.manifest
        norms = K1 * (1 - B + B * part.lengths[docs] * (manifest.num_captions / max(1, manifest.num_terms)))
        scores = np.zeros(len(docs))
        for number, (term, (own, counts)) in enumerate(zip(terms, lists, strict=True)):
            if number >= num_needed and len(docs):
                kept = scores + left[number] >= best.least
                docs, places, norms, scores = docs[kept], places[kept], norms[kept], scores[kept]
            times = _counts_of(docs, own, counts, start, stop)
            scores += term.weight * times / (times + norms)
        best.add(scores, places)


class _Best:
    """Best rows so far, best first, equal ones by row; `least` is the score that another row must reach."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._scores = np.empty(0)
        self.rows: Rows = np.empty(0, np.int64)
        self.least = 0.0

    def add(self, scores: Numbers, rows: Numbers) -> None:
        kept = scores >= self.least
        scores, rows = np.concatenate([self._scores, scores[kept]]), np.concatenate([self.rows, rows[kept]])
        if len(scores) > self._depth:
            limit = np.partition(scores, len(scores) - self._depth)[len(scores) - self._depth]
            scores, rows = scores[scores >= limit], rows[scores >= limit]
        order = np.lexsort((rows, -scores))[: self._depth]
        self._scores, self.rows = scores[order], rows[order].astype(np.int64)
        if len(order) == self._depth and self._depth:
            self.least = float(self._scores[-1])


def _list(part: WordPart, number: int, start: int, stop: int) -> tuple[Numbers, Numbers]:
    """Return the captions of a part from `start` to `stop` that contain a term, and the term's count in each."""
    first, last = part.span(number)
    docs = part.docs[first:last]
    low, high = np.searchsorted(docs, np.array([start, stop], docs.dtype))
    return docs[low:high], part.counts[first + low : first + high]


def _union(lists: Sequence[Numbers], start: int, stop: int) -> Numbers:
    if len(lists) == 1:
        return lists[0]
    if sum(map(len, lists)) * SHARE_SORTED < stop - start:
        return distinct(np.concatenate(lists))
    is_there = np.zeros(stop - start, np.bool_)
    for docs in lists:
        is_there[docs - start] = True
    return np.flatnonzero(is_there) + start


def _counts_of(docs: Numbers, own: Numbers, counts: Numbers, start: int, stop: int) -> Numbers:
    """Return how often captions contain a term; float64 (captions,)."""
    if len(own) == 0 or len(docs) == 0:
        return np.zeros(len(docs))
    if len(docs) * SHARE_SCANNED < len(own):
        places = np.minimum(np.searchsorted(own, docs.astype(own.dtype)), len(own) - 1)
        times: Numbers = np.where(own[places] == docs, counts[places], 0).astype(np.float64)
    else:
        here = np.zeros(stop - start, np.uint8)
        here[own - start] = counts
        times = here[docs - start].astype(np.float64)
    return times


def open_words(files: StoreFiles, table: RecordTable, column: str = "caption") -> CaptionWords:
    """Open the word index of one version's texts: published, cached, or newly built into the cache.

    Raises `RetrievalError` if the published index is damaged.
    """
    if column == searched_column(files) and keep_words.has_words(files, table.version):
        return CaptionWords(keep_words.open_words(files, table.version))
    # A hash of the content: no two part files of a store have the same name.
    marks = [part.key for part in table.parts() if part.deletion_vector is not None]
    own = [column] if column != "caption" else ["keywords"] if has_keywords(table.schema) else []
    content = [UNICODE, RULES, table.files.address, table.paths(), *([marks] if marks else []), *own]
    folder = f"words-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"

    def build(stage: Path) -> None:
        build_words(table, stage, Analyser(), column)

    try:
        return CaptionWords(open_copy(lambda: make_copy(folder, build), open_word_index))
    except (RetrievalError, OSError):
        pass  # nothing can be written here
    with tempfile.TemporaryDirectory(prefix="embedder-words-") as name:
        build(Path(name))
        return CaptionWords(open_word_index(Path(name)))  # stays open after its files are unlinked


RRF_K = 60
MOST = 2 / (RRF_K + 1)
EXACT_DEPTH = 20  # best texts by words that are checked for being the query itself, or for holding it

Texts = Callable[[Rows], Sequence[str | None]]
"""Function from rows of the table to their texts."""


@dataclass(frozen=True)
class SearchedWords:
    """Word index of captions, or of the words that a further model read in pictures.

    `places` has the table's row of each of the further model's rows, or -1; None for captions, whose rows are the
    table's.
    """

    words: CaptionWords
    texts: Texts
    places: RowNumbers | None = None

    def rank(self, text: str, depth: int, allowed: Mask) -> tuple[Rows, Rows]:
        """Return the table's rows by their words, best first, and those of them that say just what the query says.

        These are captions that equal it, near the head of the ranking, and pictures that show it as a phrase.
        """
        rows = self.words.ranking(text, depth, allowed)
        if self.places is not None:
            rows = self.places[rows].astype(np.int64)
        best = rows[:EXACT_DEPTH]  # not only the head: keywords behind a caption may put another before it
        texts = self.texts(best) if len(best) else []
        is_captions = self.places is None
        says_it = [
            self.words.is_same(text, each or "") if is_captions else self.words.contains(each or "", text)
            for each in texts
        ]
        return rows, best[np.array(says_it, np.bool_)]


class HybridRanker:
    """Ranker of one snapshot's rows by vectors and words."""

    def __init__(self, words: Sequence[SearchedWords], vectors: "Index | ExactIndex", vector_rows: RowNumbers) -> None:
        """Join two numberings of rows: that of the table, which `words` give, and that of `vectors`.

        `vectors` has another order and lacks rows without an image; `vector_rows` has the vector of each row of the
        table, or -1.
        """
        self._words, self._vectors, self._vector_rows = words, vectors, vector_rows
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
        """Fuse the ranking of each of Q queries by vectors with its ranking by words, which has at most `depth` rows.

        `queries` is float32 (Q, E), `texts` the same queries. `among` selects rows of vectors; None means all live
        ones. `min_score` is the least cosine of a row of either ranking.
        """
        rows = self._allowed_rows(among)
        allowed = [rows if own.places is None else np.append(rows, np.False_)[own.places] for own in self._words]
        return [
            self._fuse(ranking, query, *self._rank_by_words(text, depth, allowed), min_score)
            for ranking, query, text in zip(rankings, queries, texts, strict=True)
        ]

    def _rank_by_words(self, text: str, depth: int, allowed: Sequence[Mask]) -> tuple[Rows, Rows]:
        """Return the best rows by the words of all texts, and those that say just what the query says."""
        found = [own.rank(text, depth, mask) for own, mask in zip(self._words, allowed, strict=True)]
        if len(found) == 1:
            return found[0]
        rows, _ = reciprocal_rank_fusion([rows for rows, _ in found])
        return rows[:depth], np.concatenate([exact for _, exact in found])

    def _allowed_rows(self, among: Among | None) -> Mask:
        if among is None:
            return self._has_vector
        allowed = self._has_vector.copy()
        allowed[allowed] = is_among(among, self._vector_rows[allowed])
        return allowed

    def _fuse(
        self, ranking: Ranking, query: Floats, table_rows: Rows, exact_rows: Rows, min_score: float | None
    ) -> Ranking:
        by_words = self._vector_rows[table_rows].astype(np.int64)
        scores = self._vectors.vectors(by_words) @ query
        exact = self._vector_rows[exact_rows].astype(np.int64)
        if min_score is not None:
            by_words, scores = by_words[scores >= min_score], scores[scores >= min_score]
            exact = exact[np.isin(exact, by_words)]
        rows, sums = reciprocal_rank_fusion([by_words, ranking.rows])  # ties are ordered by words
        is_exact = np.isin(rows, exact)
        sums = np.where(is_exact, MOST, sums)  # what says just the query counts as first in both
        order = np.lexsort((~is_exact, -sums))  # and is before what is
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
    ranks = {row: rank for rank, row in enumerate(ranked.tolist(), start=1)}
    return np.array([ranks.get(row, 0) for row in rows.tolist()], np.int64)


def reciprocal_rank_fusion(rankings: Sequence[Rows]) -> tuple[Rows, Doubles]:
    """Order all rows of some rankings by the sum of 1 / (60 + rank) over the rankings that have them, best first.

    A row may occur once per ranking. Ties are ordered as in the first ranking; rows that it lacks follow, by row.
    Returns the rows and their sums.
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
