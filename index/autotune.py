"""Tuning of a built index: recall and latency by search parameters, and the cheapest that reach a recall."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from index import faiss_build, faiss_search
from index.designs import Design, Parameters
from index.disk_index import DiskIndex
from index.faiss_search import FindAmong
from index.held_out_queries import MAX_MEASURED, SAMPLED
from index.manifest import Point
from index.recall import NUM_NEIGHBOURS, GroundTruth, measure_recall
from index.selector import Selector
from index.vectors import Floats, Rows

_NUM_TIMED_ROWS = 4096
_NUM_TIMED_QUERIES = 50
_NUM_ROUNDS = 4  # of queries, where indexes are compared
_NUM_IN_TURN = 10
# Without text queries, the cheapest settings are skipped: vectors of the table find each other at settings where
# captions do not (HNSW of 100,000, ef_search 64: 1.00 for images, 0.92 for captions).
_NUM_SKIPPED_WITHOUT_TEXTS = 2
# If doubling the effort adds less than this to a recall above this, the codes have lost what is missing.
_AT_REST, _LEAST_AT_REST = 5e-4, 0.5
_NUM_HALVED = 2
CHANCE = 5e-3
"""Error of a recall measured with 500 queries."""
_RAISED = (1.25, 1.6, 2.0)  # efforts to try, of the one that others are judged with, if they find too little


@dataclass(frozen=True)
class GroundTruths:
    """Ground truth on one table: of the expected queries that tune and those that judge, and of images as queries."""

    asked: GroundTruth
    judged: GroundTruth
    images: GroundTruth


@dataclass(frozen=True)
class Meter:
    """Measurement of an index.

    Attributes:
        index: what is measured.
        design: its design.
        vectors_of: vectors of rows, (n, E), as exact as available.
        selector: rows that may be found; None means all.
        depth: share of the rows to re-rank that recall is measured with; below 1 for a sample of a larger table.
        limit_ms: latency beyond which no further effort is measured.
    """

    index: faiss.Index | DiskIndex
    design: Design
    vectors_of: Callable[[Rows], Floats]
    selector: Selector | None = None
    depth: float = 1.0
    limit_ms: float = math.inf

    def tune(self, ground_truth: GroundTruth, target: float, margin: float = 0.0) -> tuple[list[Point], Point]:
        """Measure search parameters, cheapest first; for each re-ranking factor up to the target recall and a margin.

        The largest factor comes first: if it misses the target, smaller ones do too, so they begin where it reached it.
        Where it is too slow, smaller ones may not be. Returns all measurements, and the fastest that reaches the
        target with the margin, or if none does the target, or the one with the highest recall.
        """
        points: list[Point] = []
        levels = (target + margin, target)
        num_skipped = _NUM_SKIPPED_WITHOUT_TEXTS if ground_truth.queries.kind == SAMPLED else 0
        for search_params in reversed([*self.design.search_params()]):
            num_skipped = min(num_skipped, len(search_params) - 1)
            measured = self._up_to(ground_truth, search_params[num_skipped:], levels[0])
            points += measured
            reached = (n for level in levels for n, point in enumerate(measured) if point.recall_at_10 >= level)
            if (first := next(reached, None)) is not None:
                num_skipped += first
            elif measured[-1].latency_ms <= self.limit_ms:
                break
        for level in levels:
            if enough := [point for point in points if point.recall_at_10 >= level]:
                return points, self._find_fastest(enough, ground_truth)
        return points, max(points, key=lambda point: (point.recall_at_10, -point.latency_ms))

    def _find_fastest(self, points: Sequence[Point], ground_truth: GroundTruth) -> Point:
        """Return the fastest point, timed once more in turns: its own time may be of a moment when all was slow."""
        if len(points) == 1:
            return points[0]
        times_ms = compare_ms([(self, point.parameters) for point in points], ground_truth)
        timed = [
            point.model_copy(update={"latency_ms": round(time_ms, 5)})
            for point, time_ms in zip(points, times_ms, strict=True)
        ]
        # While measuring, what is read stays in memory; later it may not.
        return min(timed, key=lambda point: point.latency_ms + self.design.reads_ms(point.parameters))

    def tune_from(
        self, ground_truth: GroundTruth, before: Parameters | None, target: float
    ) -> tuple[list[Point], Point]:
        """Keep search parameters of an earlier version that miss the target only by chance, else tune (also for None).

        The next parameters may take twice as long.
        """
        if before is not None:
            point = self.point(ground_truth, before)
            if point.recall_at_10 >= target - CHANCE:
                return [point], point
        return self.tune(ground_truth, target)

    def tune_finely(self, ground_truth: GroundTruth, target: float) -> tuple[list[Point], Point]:
        """Measure as `tune` does, with a margin, and then between the fastest that reaches it and half its effort.

        The margin is what recall is off by chance: others are asked than measured. Efforts double, so
        up to twice the time would be lost. Without texts nothing in between is measured, like the cheapest settings.
        """
        chance = CHANCE * math.sqrt(MAX_MEASURED / max(1, len(ground_truth.queries.vectors)))
        margin = min(chance, (1 - target) / 2)
        points, best = self.tune(ground_truth, target, margin)
        if best.recall_at_10 < target or ground_truth.queries.kind == SAMPLED:
            return points, best
        level = target + margin if best.recall_at_10 >= target + margin else target
        for name in best.parameters:
            low, high = best.parameters[name] // 2, best.parameters[name]
            for _ in range(_NUM_HALVED):
                tried = (low + high) // 2
                if tried in (low, high):
                    break
                points.append(self.point(ground_truth, best.parameters | {name: tried}))
                if points[-1].recall_at_10 >= level:
                    high, best = tried, self._find_fastest([best, points[-1]], ground_truth)
                else:
                    low = tried
        return points, best

    def share_at_target(
        self, points: Iterable[Point], chosen: Point, ground_truth: GroundTruth, target: float
    ) -> float:
        """Estimate the share of its latency with which `chosen` would just reach the target.

        It lies between `chosen` and the next lower effort of `points`, lower in one parameter. Efforts are measured in
        steps, and one design may find far more than the target with the first that reaches it, another just as much.
        What isn't found is taken to fall geometrically with time.
        """
        below = [
            point
            for point in points
            if point.recall_at_10 < target and len(point.parameters.items() - chosen.parameters.items()) == 1
        ]
        if not below or not target < chosen.recall_at_10 < 1:
            return 1.0
        lower = max(below, key=lambda point: point.recall_at_10)
        lower_ms, chosen_ms = compare_ms([(self, lower.parameters), (self, chosen.parameters)], ground_truth)
        missing = [1 - lower.recall_at_10, 1 - target, 1 - chosen.recall_at_10]
        share = math.log(missing[0] / missing[1]) / math.log(missing[0] / missing[2])
        lower_share = min(1.0, lower_ms / chosen_ms)
        return lower_share + share * (1 - lower_share)

    def judge(self, chosen: Point, ground_truth: GroundTruth, target: float) -> Point:
        """Measure chosen search parameters on queries that they were not chosen by; raise them if they miss the target.

        Returns the first that reaches it, at most twice the effort, else the one with the highest recall.
        """
        first = self.point(ground_truth, chosen.parameters)
        return self.raise_effort(first, ground_truth, target) if chosen.recall_at_10 >= target else first

    def raise_effort(self, first: Point, ground_truth: GroundTruth, target: float) -> Point:
        """Measure up to twice the effort of a point until the target is reached; else return the highest recall."""
        points = [first]
        for factor in _RAISED:
            if points[-1].recall_at_10 >= target or points[-1].latency_ms > self.limit_ms:
                break
            raised = {name: math.ceil(factor * value) for name, value in first.parameters.items()}
            if raised == points[-1].parameters:
                break
            points.append(self.point(ground_truth, raised))
        return points[-1] if points[-1].recall_at_10 >= target else max(points, key=lambda point: point.recall_at_10)

    def _up_to(self, ground_truth: GroundTruth, search_params: list[Parameters], target: float) -> list[Point]:
        """Measure search parameters until one reaches the target, or more effort brings nothing."""
        points: list[Point] = []
        for parameters in search_params:
            points.append(self.point(ground_truth, parameters))
            last, before = points[-1].recall_at_10, points[-2].recall_at_10 if len(points) > 1 else 0.0
            is_at_rest = last > _LEAST_AT_REST and last - before < _AT_REST
            if last >= target or is_at_rest or points[-1].latency_ms > self.limit_ms:
                break
        return points

    def point(self, ground_truth: GroundTruth, parameters: Parameters) -> Point:
        """Measure recall, and the time of a query on one thread, with given search parameters."""
        shallower = dict(parameters)
        if "k_factor" in parameters:
            shallower["k_factor"] = max(1, round(self.depth * parameters["k_factor"]))

        recall = 1.0
        if not self.design.is_exact:
            recall = measure_recall(ground_truth, lambda queries, k: self.find(queries, k, shallower), self.vectors_of)
        timed = ground_truth.queries.vectors[:_NUM_TIMED_QUERIES]
        times_s = self.times_s(timed, parameters)
        latency_ms = statistics.median(times_s) * 1000 if times_s else 0.0
        return Point(parameters=parameters, recall_at_10=recall, latency_ms=round(latency_ms, 5))

    def times_s(self, queries: Floats, parameters: Parameters) -> list[float]:
        """Measure the seconds of each of some queries (Q, E), alone on one thread."""
        return self._times_s(lambda query: self.find(query[None], NUM_NEIGHBOURS, parameters), queries)

    def find(self, queries: Floats, k: int, parameters: Parameters) -> tuple[Floats, Rows]:
        """Search the index, as `faiss_search.search` does; of fewer than k rows, all are found."""
        return faiss_search.search(self.index, queries, min(k, self.index.ntotal), parameters, self.selector)

    def row_us(self, find: FindAmong) -> float:
        """Measure the microseconds per row of a search that scores only the rows of a filter, on one thread."""
        mask = np.zeros(self.index.ntotal, dtype=bool)
        mask[:: -(-len(mask) // _NUM_TIMED_ROWS)] = True
        selector = Selector(mask)
        query = faiss_search.vectors(self.index, np.zeros(1, np.int64))
        times_s = self._times_s(lambda _: find(query, NUM_NEIGHBOURS, selector), range(3))
        return round(min(times_s) / selector.num_rows * 1e6, 5)

    def _times_s(self, run: Callable[[Any], object], arguments: Iterable[Any]) -> list[float]:
        """Measure time of the processor, which other processes don't lengthen; where the disk is read, of the clock."""
        clock = time.perf_counter if self.design.on_disk else time.thread_time
        times_s = []
        with faiss_build.threads(1):
            for argument in arguments:
                started = clock()
                run(argument)
                times_s.append(clock() - started)
        return times_s


def compare_ms(
    indexes: Sequence[tuple[Meter, Parameters]], ground_truth: GroundTruth, *, least_s: float = 0.0
) -> list[float]:
    """Measure the milliseconds of a query of several indexes on one thread, each with its search parameters.

    They take turns, each with ten queries, because a machine that others use may be half as fast for some seconds, or
    for a moment. Each turn begins with ten others that aren't timed: indexes evict each other from the cache, which
    slows graphs by half and scans not at all, and nothing does so while one index is searched. What counts is the
    median of how each turn of an index compares with those of all at the same queries.

    Args:
        indexes: what is compared.
        ground_truth: has the queries.
        least_s: seconds that are measured for at least, besides a few rounds.
    """
    queries = ground_truth.queries.vectors[:_NUM_TIMED_QUERIES]
    if not len(queries):
        return [0.0] * len(indexes)
    turns = np.array_split(queries, max(1, len(queries) // _NUM_IN_TURN))
    rounds: list[list[list[float]]] = []
    until_s = time.monotonic() + least_s
    while len(rounds) < _NUM_ROUNDS or time.monotonic() < until_s:
        rounds.append([])
        for before, turn in zip([turns[-1], *turns], turns, strict=False):
            asked = np.concatenate([before, turn])
            rounds[-1].append([statistics.median(each.times_s(asked, to)[len(before) :]) for each, to in indexes])
    times_ms = 1000 * np.array(rounds)  # (rounds, turns, indexes)
    of_all_ms = np.exp(np.log(times_ms).mean(axis=2))
    relative = np.median(times_ms / of_all_ms[:, :, None], axis=(0, 1))
    return [float(each) for each in relative * np.median(of_all_ms, axis=1).min()]
