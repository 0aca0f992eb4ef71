"""Tuning of a built index: recall and latency by search parameters, and the cheapest that reach a recall."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from index.designs import Design, Parameters
from index.manifest import Point
from index.queries import SAMPLED, RecallQueries, sampled_queries
from index.recall import NUM_NEIGHBOURS, GroundTruth, find_ground_truth, measure_recall
from index.vectors import Floats, Rows, VectorTable

if TYPE_CHECKING:
    import faiss

    from index.faiss_search import FindAmong, Selector

_NUM_IMAGE_QUERIES = 100
_NUM_TIMED_ROWS = 4096
_NUM_TIMED_QUERIES = 50
# Without texts as queries, the cheapest settings are skipped: vectors of the table find each other at settings where
# captions do not (HNSW of 100,000, ef_search 64: 1.00 for images, 0.92 for captions).
_NUM_SKIPPED_WITHOUT_TEXTS = 2


@dataclass(frozen=True)
class GroundTruths:
    """Ground truth on one table: of the expected queries, and of images as queries."""

    asked: GroundTruth
    images: GroundTruth


def find_ground_truths(table: VectorTable, asked: RecallQueries) -> GroundTruths:
    """Find the ground truth of both kinds of queries, each in one pass over the table."""
    from index import faiss_build

    images = sampled_queries(table, _NUM_IMAGE_QUERIES)
    return GroundTruths(
        find_ground_truth(table, asked, faiss_build.nearest_in_table),
        find_ground_truth(table, images, faiss_build.nearest_in_table),
    )


@dataclass(frozen=True)
class Meter:
    """Measurement of an index.

    Attributes:
        index: the index.
        design: its design.
        vectors_of: gives the vectors of rows, (n, E), as exact as they are available.
        selector: rows that may be found; None for all.
    """

    index: "faiss.Index"
    design: Design
    vectors_of: Callable[[Rows], Floats]
    selector: "Selector | None" = None

    def curve(self, ground_truth: GroundTruth, target: float) -> list[Point]:
        """Measure search parameters, the cheapest first; for each factor of re-ranking up to the target recall."""
        points: list[Point] = []
        for search_params in self.design.search_params():
            num_skipped = (
                min(_NUM_SKIPPED_WITHOUT_TEXTS, len(search_params) - 1) if ground_truth.queries.kind == SAMPLED else 0
            )
            for parameters in search_params[num_skipped:]:
                points.append(self.point(ground_truth, parameters))
                if points[-1].recall_at_10 >= target:
                    break
        return points

    def point(self, ground_truth: GroundTruth, parameters: Parameters) -> Point:
        """Measure recall, and the time of a query on one thread, with given search parameters."""
        from index import faiss_build, faiss_search

        def find(queries: Floats, k: int) -> tuple[Floats, Rows]:
            return faiss_search.search(self.index, queries, min(k, self.index.ntotal), parameters, self.selector)

        recall = measure_recall(ground_truth, find, self.vectors_of)
        times_s = []
        with faiss_build.threads(1):
            for query in ground_truth.queries.vectors[:_NUM_TIMED_QUERIES]:
                started = time.perf_counter()
                find(query[None], NUM_NEIGHBOURS)
                times_s.append(time.perf_counter() - started)
        latency_ms = statistics.median(times_s) * 1000 if times_s else 0.0
        return Point(parameters=parameters, recall_at_10=recall, latency_ms=round(latency_ms, 5))

    def row_us(self, find: "FindAmong") -> float:
        """Measure the microseconds per row of a search that scores the rows of a filter alone, on one thread."""
        from index import faiss_build, faiss_search

        mask = np.zeros(self.index.ntotal, dtype=bool)
        mask[:: -(-len(mask) // _NUM_TIMED_ROWS)] = True
        selector = faiss_search.Selector(mask)
        query = faiss_search.vectors(self.index, np.zeros(1, np.int64))
        times_s = []
        with faiss_build.threads(1):
            for _ in range(3):
                started = time.perf_counter()
                find(query, NUM_NEIGHBOURS, selector)
                times_s.append(time.perf_counter() - started)
        return round(min(times_s) / selector.num_rows * 1e6, 5)


def best_point(points: list[Point], target: float) -> Point:
    """Choose the fastest that reaches the target, or the one with the highest recall."""
    enough = [point for point in points if point.recall_at_10 >= target]
    if enough:
        return min(enough, key=lambda point: point.latency_ms)
    return max(points, key=lambda point: (point.recall_at_10, -point.latency_ms))
