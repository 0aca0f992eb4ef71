"""Measurements of the published index: ranks and recall of its answers, latency by search setting, and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil

from embedder.placement.hardware import num_cpus
from embedder.plugins.evaluate.evaluate_report import CurvePoint, IndexFigures, Latency
from embedder.plugins.evaluate.exact import TIE, ExactNeighbours, Ints, RelevantPairs
from embedder.plugins.evaluate.published_images import ImageTable
from embedder.plugins.evaluate.query_sets import QuerySet
from embedder.plugins.evaluate.retrieval_metrics import mean, recalls
from embedder.plugins.evaluate.timing import time_each, time_throughput
from embedder.retrieval.model_columns import match_keys
from embedder.retrieval.store_api import Store
from embedder.store_index.index_versions import open_version
from index.designs import Parameters, parse_design
from index.manifest import Manifest
from index.search import Index
from index.vectors import Floats, Neighbours

CURVE_DEPTH = 10
RERANKING = "k_factor"

Search = Callable[[Floats, int], Neighbours]


@dataclass(frozen=True)
class EffortTrial:
    """One timed search setting of the index, with the latency of one query.

    `rows` are the rows of the table found, int64 (Q, k), -1 for none.
    """

    parameters: Parameters
    latency: Latency
    rows: Ints


@dataclass(frozen=True)
class IndexAnswers:
    """Answers of the index, of version `number`, to all queries.

    `resident_bytes` is the growth of this process by opening and searching it. `ranks`, int64 (Q,), are the wrong items
    before the right one among the hits, or the number of items if it was not found; `rows`, int64 (Q, k), what a plain
    search found; `trials` the settings of the curve.
    """

    number: int
    index: Index
    resident_bytes: int
    ranks: Ints
    rows: Ints
    trials: list[EffortTrial]

    def pairs(self) -> RelevantPairs:
        """Pairs of each query and a row found, whose exact scores are wanted."""
        rows = np.hstack([self.rows, *(trial.rows for trial in self.trials)])
        return RelevantPairs(np.repeat(np.arange(len(rows)), rows.shape[1]), rows.reshape(-1))

    def exact_scores(self, exact: ExactNeighbours) -> list[Floats]:
        """Exact scores of the rows that the plain search found, and of those of each trial; float32 (Q, k) each."""
        widths = [self.rows.shape[1], *(trial.rows.shape[1] for trial in self.trials)]
        return np.split(exact.asked_scores.reshape(len(self.rows), -1), np.cumsum(widths)[:-1], axis=1)


def ask_index(
    store: Store, number: int, images: ImageTable, query_set: QuerySet, right_items: Ints, depth: int
) -> IndexAnswers:
    """Open a version of the index and search it with all queries.

    `right_items` is the number of each right answer's item, int64 (R,); `depth` is the deepest k that is reported.
    """
    before = psutil.Process().memory_info().rss
    opened = open_version(store.files, number, store.info.model_fingerprint)
    hits = opened.search(query_set.vectors, depth)
    resident = psutil.Process().memory_info().rss - before
    rows = IndexedItems(opened, images)
    # One more than is reported, to see whether the right item ties with all that follow.
    scores, items = find_items(opened.search, query_set.vectors, rows, depth + 1, len(opened))
    return IndexAnswers(
        number=number,
        index=opened,
        resident_bytes=max(0, resident),
        ranks=ranks_among(scores, items, query_set.queries, right_items, len(images.item_ids)),
        rows=rows.table_rows(hits.rows),
        trials=[_try(opened, parameters, query_set.vectors, rows) for parameters in search_settings(opened.manifest)],
    )


def search_settings(manifest: Manifest) -> list[Parameters]:
    """Search settings to compare, the least effort first; only the published one if there is no choice.

    Re-ranking is as published. The efforts of graph or lists are those that the design can be built with, and the
    published one.
    """
    published = manifest.parameters
    others = [
        effort
        for efforts in parse_design(manifest.design).search_params()
        for effort in efforts
        if effort != published and effort.get(RERANKING) == published.get(RERANKING)
    ]
    return sorted([published, *others], key=lambda effort: [effort[name] for name in sorted(effort)])


def _try(index: Index, parameters: Parameters, vectors: Floats, rows: "IndexedItems") -> EffortTrial:
    search = partial(index.search, k=CURVE_DEPTH, parameters=parameters)
    one_by_one = [vectors[number : number + 1] for number in range(len(vectors))]
    latency = time_each(partial(search, num_threads=1), one_by_one)
    return EffortTrial(parameters, latency, rows.table_rows(search(vectors).rows))


def index_figures(answers: IndexAnswers, exact: ExactNeighbours, vectors: Floats, ks: Sequence[int]) -> IndexFigures:
    """Collect the figures, for the depths `ks`, and time searches at the usual depth."""
    index, manifest = answers.index, answers.index.manifest

    def search(queries: Floats, num_threads: int) -> object:
        return index.search(queries, CURVE_DEPTH, num_threads=num_threads)

    found_scores, *trial_scores = answers.exact_scores(exact)
    curve = [
        CurvePoint(
            parameters=trial.parameters,
            is_published=trial.parameters == manifest.parameters,
            recall_at_10=mean(found_shares(scores, exact, CURVE_DEPTH)),
            **trial.latency.model_dump(exclude={"num_queries"}),
        )
        for trial, scores in zip(answers.trials, trial_scores, strict=True)
    ]
    return IndexFigures(
        number=answers.number,
        design=manifest.design,
        parameters=manifest.parameters,
        num_vectors=len(index),
        r_at=recalls(answers.ranks, ks),
        recall_at={k: mean(found_shares(found_scores, exact, k)) for k in ks},
        num_masked=manifest.num_masked,
        size_bytes=manifest.size_bytes,
        memory_bytes=manifest.memory_bytes,
        resident_bytes=answers.resident_bytes,
        one_thread=next(trial.latency for trial in answers.trials if trial.parameters == manifest.parameters),
        throughput=[time_throughput(search, vectors, number) for number in sorted({1, num_cpus()})],
        curve=curve,
    )


class IndexedItems:
    """Item and row of the table for each row of an index."""

    def __init__(self, index: "Index", images: ImageTable) -> None:
        self._items = images.numbers_of(index.ids["item_id"])
        self._table_rows = match_keys(index.ids, images.keys)

    def items(self, rows: Ints) -> Ints:
        """Items of rows of the index, of any shape; -1 for row -1."""
        return np.where(rows >= 0, self._items[np.maximum(rows, 0)], -1)

    def table_rows(self, rows: Ints) -> Ints:
        """Rows of the table for rows of the index, of any shape; -1 for an index row without one."""
        return np.where(rows >= 0, self._table_rows[np.maximum(rows, 0)], -1)


def find_items(
    search: Search, queries: Floats, rows: IndexedItems, num_items: int, num_rows: int
) -> tuple[Floats, Ints]:
    """Search deep enough that each query finds `num_items` different items, or all there are.

    A clip's segments count as one answer, so more rows may be needed than items. `num_rows` is the size of the index.
    Returns scores and items of the hits, (Q, k), best first; item -1 where there is none.
    """
    depth = min(num_items, num_rows)
    hits = search(queries, depth)
    while depth < num_rows and (_num_different(rows.items(hits.rows)) < num_items).any():
        depth = min(2 * depth, num_rows)
        hits = search(queries, depth)
    return hits.scores, rows.items(hits.rows)


def _num_different(items: Ints) -> Ints:
    ordered = np.sort(items, axis=1)
    is_new = np.diff(ordered, axis=1, prepend=-1) != 0
    return np.asarray((is_new & (ordered >= 0)).sum(axis=1), np.int64)


def ranks_among(scores: Floats, items: Ints, queries: Ints, right_items: Ints, num_items: int) -> Ints:
    """Number of wrong items before each query's best right one among its hits; `num_items` if it is not found.

    Ties count against the index, as in exact search. The hits' `scores` are float32 (Q, k), their `items` int64 (Q, k),
    -1 for none. `queries` and `right_items` are the right answers, int64 (R,) each.
    """
    numbers = np.arange(len(items))[:, None] * num_items
    is_right = np.isin(numbers + items, queries * num_items + right_items) & (items >= 0)
    own = np.where(is_right, scores, -np.inf).max(axis=1, initial=-np.inf)
    is_ahead = (scores > (own - TIE)[:, None]) & ~is_right & (items >= 0)
    ahead = _num_different(np.where(is_ahead, items, -1))
    return np.where(np.isfinite(own), ahead, num_items)


def found_shares(found_scores: Floats, exact: ExactNeighbours, k: int) -> Any:
    """recall@k of each query: share of the exact top k that is among the first k hits; float32 (Q,).

    A hit counts if its exact score reaches that of the k-th, so any of several equal vectors will do. `found_scores`
    are the exact scores of the hits in the index's order, float32 (Q, >= k), -inf for none. `exact` has at least k
    rows, or all.
    """
    k = min(k, exact.scores.shape[1])
    return (found_scores[:, :k] >= exact.scores[:, k - 1 : k] - TIE).mean(axis=1)
