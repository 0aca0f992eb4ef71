"""Trials of candidate designs: built on a sample of the table, and measured with the expected queries.

Some designs project vectors onto the directions in which text queries vary. A caption's vector encodes the meaning of
an image, an image's vector also its look. Directions in which no query varies do not change the order of any answer;
leaving them out makes vectors several times shorter at the same recall, and the best few are re-scored at full width.

Source: Tepper et al. 2023, "LeanVec: Searching vectors faster by making them fit", out-of-distribution queries; here
with one projection for both sides, the leading eigenvectors of the queries' second moments.
"""

import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from index import disk_build, faiss_build
from index.autotune import Meter, compare_ms
from index.designs import Design, Kind, Parameters, candidate_designs, count_lists, count_part_lists
from index.disk_index import DiskIndex
from index.held_out_queries import SAMPLING_SEED, sampled_queries
from index.index_errors import RetrievalError
from index.list_reach import Projection
from index.manifest import DesignTrial, Point
from index.recall import GroundTruth, find_ground_truth, measure_rounding
from index.vectors import Floats, VectorTable, vectors_text

_SAMPLE_SEED = 2
# Exponent by which a query's time grows with the table's size, at constant recall; 1 for a scan. On hard vectors
# (`scripts/bench_retrieval.py`), between 50,000 and 1,000,000, graphs took 0.3 to 0.5 and lists 0.1.
_GROWTH: dict[Kind, float] = {"flat": 1.0, "ivf": 0.4, "hnsw": 0.4}

# On a sample, fewer rows are re-ranked to measure recall, by these powers of its share of the table: more rows of a
# larger table come before a near one by their codes. Among the best 640 by product codes of 48 bytes were 0.88, 0.84
# and 0.98 of the ten nearest of 200,000 (192 dimensions, three shapes); of a sixth of the rows 0.98, 0.99 and 0.99;
# and with shares to the powers 1 and 0.5, 0.83, 0.80, 0.93 and 0.92, 0.93, 0.98. Among 40 by 48 of the 192 directions
# 0.98, 0.98 and 0.68, and to the power 0.5 0.96, 0.99 and 0.70. By 4 bits a number of projections, 60 of 200,000 held
# what 36 of an eighth and 30 of a twentieth of the rows did: 0.98 (128 dimensions, "nonlinear look").
_SMALL_CODES_DEPTH, _DEPTH = 0.75, 0.5
_SLOWER = 5.0  # times the fastest: what is slower is not measured again
_KEPT_SAMPLES = 4  # times the sample's bytes: built designs that are kept to be measured again
_COMPARED_S = 0.2  # that the fastest are compared for, at least: quick ones are asked in a moment, which may be slow
_SLOW = 2.0  # times the latency asked for, or of exact search: beyond that, no further effort is measured

# Shares of the queries' second moment that a width may keep: the lower lose something, which re-ranking recovers.
_KEPT_SHARES = (0.9, 0.95, 0.98, 0.9995)
_WIDTH_STEP = 16  # AVX-512 compares 16 floats at a time
# Above this share of E, a projection saves too little to be worth its error.
_MAX_WIDTH_SHARE = 0.6
_NUM_MEASURED = 4096  # vectors of the table that show which of their numbers carry the most
_QUERIES_PER_DIRECTION = 4  # minimum to estimate a direction

LOG = logging.getLogger(__name__)


class QueryDirections:
    """Directions in which queries vary, strongest first."""

    def __init__(self, queries: Floats) -> None:
        """Find the directions of expected queries, (Q, E) of unit norm; recall must be measured on others."""
        self._num_queries = len(queries)
        moments = queries.T.astype(np.float64) @ queries.astype(np.float64)
        strengths, directions = np.linalg.eigh(moments)
        self._strengths, self._directions = strengths[::-1], directions[:, ::-1]

    def matrix(self, width: int) -> Floats:
        """Compute the projection onto the strongest directions, (width, E), with orthonormal rows."""
        return np.ascontiguousarray(self._directions[:, :width].T, dtype=np.float32)

    def useful_widths(self) -> tuple[int, ...]:
        """Return the widths worth trying, ascending; none if there are too few queries, or all directions matter."""
        widths = _useful_widths(self._strengths)
        return tuple(width for width in widths if width * _QUERIES_PER_DIRECTION <= self._num_queries)


def _useful_widths(strengths: Any) -> tuple[int, ...]:
    """Return widths that keep most of the second moment, ascending; `strengths` (E,) are its shares by direction."""
    kept = np.cumsum(strengths) / strengths.sum()
    steps = {-(-(int(np.searchsorted(kept, share)) + 1) // _WIDTH_STEP) for share in _KEPT_SHARES}
    return tuple(_WIDTH_STEP * step for step in sorted(steps) if _WIDTH_STEP * step <= _MAX_WIDTH_SHARE * len(kept))


class Projections:
    """Projections of designs onto what queries ask for, learned from queries (L, E), which may be empty.

    Without enough of them, vectors of the table show whether their first numbers carry the most (Matryoshka).
    """

    def __init__(self, learned: Floats, table: VectorTable) -> None:
        self.learned, self._table = learned, table

    @cached_property
    def _directions(self) -> QueryDirections | None:
        return QueryDirections(self.learned) if len(self.learned) else None

    def candidates(self) -> tuple[Design, ...]:
        """List the designs to measure for the table, exact search first."""
        size = self._table.num_vectors, self._table.dim
        widths = self._directions.useful_widths() if self._directions else ()
        if widths:
            return candidate_designs(*size, widths)
        sample = self._table.take(self._table.sample(_NUM_MEASURED, SAMPLING_SEED))
        return candidate_designs(*size, _useful_widths(np.square(sample, dtype=np.float64).sum(axis=0)), first=True)

    def of(self, design: Design) -> Projection | None:
        """Compute a design's projection, if any; raises a RetrievalError without learning queries."""
        if design.projection is None:
            return None
        dim = self._table.dim
        if design.projection > dim:
            raise RetrievalError(f"index design {design}: vectors have {dim} dimensions; project onto fewer")
        if design.first:
            return Projection(np.eye(design.projection, dim, dtype=np.float32), self.learned)
        if self._directions is None:
            raise RetrievalError(
                f"index design {design}: it projects onto what text queries ask for, and there are no captions to "
                "learn that from; give queries, or choose a design without LeanVec"
            )
        return Projection(self._directions.matrix(design.projection), self.learned)


@dataclass(frozen=True)
class _Kept:
    """A measured index: `share` of its latency is what a trial says, of one that just reaches the recall."""

    meter: Meter
    share: float
    latency_ms: float
    num_bytes: int


class DesignTrials:
    """Trials on one sample; consecutive designs that differ only in re-ranking share what they re-rank."""

    def __init__(
        self,
        table: VectorTable,
        num_rows: int,
        answers: GroundTruth,
        projections: Projections,
        target: float,
        latency_ms: float | None = None,
    ) -> None:
        """Draw a sample; the exact answers in it are found by the first measurement.

        Args:
            table: the vectors.
            num_rows: rows of the sample.
            answers: exact ones of the whole table to the queries that recall is measured with.
            projections: of designs that have one.
            target: recall to reach.
            latency_ms: asked for; None if only exact search's matters.
        """
        rows = table.sample(num_rows, _SAMPLE_SEED)
        self._sample, self._num_vectors = VectorTable(len(rows), table.dim, table.take(rows)), table.num_vectors
        asked = answers.queries if answers.queries.own_rows is None else sampled_queries(self._sample)
        self._asked, self._target = asked, target
        self._table, self._answers, self._lost = table, answers, dict[str, float]()
        self._projections, self._latency_ms, self._exact_ms = projections, latency_ms, math.inf
        self._last: tuple[Design, faiss.Index, float] | None = None
        self._kept: dict[str, _Kept] = {}

    @cached_property
    def _ground_truth(self) -> GroundTruth:
        return find_ground_truth(self._sample, self._asked)

    def measure(self, design: Design) -> DesignTrial:
        """Build a design with fewer lists, and measure the cheapest search parameters that reach the recall."""
        LOG.info(f"measuring {design} on {vectors_text(self._sample.num_vectors)}")
        with self._build(design) as (on_sample, index, build_s):
            of_table = self._sample.num_vectors / self._num_vectors
            limit_ms = _SLOW * self._exact_ms
            if self._latency_ms is not None:
                limit_ms = _SLOW * self._latency_ms * of_table ** _GROWTH[design.kind]
            is_coarse = design.has_small_codes and design.projection is None
            depth = of_table ** (_SMALL_CODES_DEPTH if is_coarse else _DEPTH)
            meter = Meter(index, on_sample, self._sample.take, depth=depth, limit_ms=limit_ms)
            lost = self._rounding_lost(design)
            # Finer steps make lists of whole vectors look faster on a sample than they are.
            tune = meter.tune_finely if design.has_projected_codes else meter.tune
            target = min(1.0, self._target + lost)
            points, point = tune(self._ground_truth, target)
            if design.is_exact:
                self._exact_ms = point.latency_ms
            share = 1.0
            if design.has_projected_codes:
                share = meter.share_at_target(points, point, self._ground_truth, target)
            measured = {
                "recall_at_10": max(0.0, point.recall_at_10 - lost),
                "latency_ms": round(share * point.latency_ms, 5),
            }
            growth = _growth(on_sample, point.parameters)
            trial = _trial(design, index, point.model_copy(update=measured), build_s, self._num_vectors, growth)
        if not design.on_disk:
            self._keep(trial, meter, share)
        return trial

    def compare(self, trials: Sequence[DesignTrial]) -> list[DesignTrial]:
        """Measure the latency of designs again, in turns: a machine that others use may be half as fast for seconds.

        Those that are slower by far, lie on disk, or whose index isn't kept stay as they are. Afterwards none is kept.
        """
        most_ms = _SLOWER * min((trial.latency_ms for trial in trials), default=0.0)
        compared = [trial for trial in trials if trial.design in self._kept and 0 < trial.latency_ms <= most_ms]
        found: dict[str, DesignTrial] = {}
        if len(compared) > 1:
            indexes = [(self._kept[trial.design].meter, trial.parameters) for trial in compared]
            times_ms = compare_ms(indexes, self._ground_truth, least_s=_COMPARED_S)
            for trial, latency_ms in zip(compared, times_ms, strict=True):
                found[trial.design] = _with_latency(trial, latency_ms * self._kept[trial.design].share)
        self._kept.clear()
        return [found.get(trial.design, trial) for trial in trials]

    def _keep(self, trial: DesignTrial, meter: Meter, share: float) -> None:
        """Keep an index to compare it later; the slowest are let go if together they take too much memory."""
        self._kept[trial.design] = _Kept(meter, share, trial.latency_ms, faiss_build.num_bytes(meter.index))
        most_bytes = _KEPT_SAMPLES * self._sample.num_vectors * self._sample.dim * 4
        while sum(each.num_bytes for each in self._kept.values()) > most_bytes:
            costs = {name: (each.num_bytes > most_bytes, each.latency_ms) for name, each in self._kept.items()}
            del self._kept[max(costs, key=lambda name: costs[name])]

    def _rounding_lost(self, design: Design) -> float:
        """Compute how much more recall the rounding of re-ranked vectors takes on the table, where they lie closer."""
        if design.rerank is None:
            return 0.0
        if design.rerank not in self._lost:
            code = faiss_build.train_reranking(design, self._sample)
            of_sample = measure_rounding(self._ground_truth, self._sample, code)
            self._lost[design.rerank] = max(0.0, of_sample - measure_rounding(self._answers, self._table, code))
        return self._lost[design.rerank]

    @contextmanager
    def _build(self, design: Design) -> Iterator[tuple[Design, faiss.Index | DiskIndex, float]]:
        """Build a candidate; yields the design with fewer lists, the index, and the build's seconds."""
        on_sample, started = _with_fewer_lists(design, self._sample.num_vectors), time.perf_counter()
        if not design.in_parts:
            index, base_s = self._build_in_memory(on_sample)
            yield on_sample, index, base_s + time.perf_counter() - started
            return
        with tempfile.TemporaryDirectory(prefix="index-trial-") as folder:
            size = disk_build.DEFAULT_BUILD_BYTES
            parts = disk_build.build(on_sample, self._sample, self._projections.learned, Path(folder), size)
            yield on_sample, parts, time.perf_counter() - started

    def _build_in_memory(self, design: Design) -> tuple[faiss.Index, float]:
        """Return the index of a design and its build's seconds, reusing the last design's base if it is the same."""
        projection = self._projections.of(design)
        if design.rerank is None:
            return faiss_build.build(design, self._sample, projection), 0.0
        base, earlier_s = replace(design, rerank=None), 0.0
        if self._last is not None and self._last[0] == base:
            earlier_s = self._last[2]
        else:
            self._last, started = None, time.perf_counter()  # first frees its memory
            built = faiss_build.build(base, self._sample, projection)
            self._last = (base, built, time.perf_counter() - started)
        return faiss_build.rerank_with(self._last[1], design, self._sample), earlier_s


def _trial(
    design: Design,
    index: faiss.Index | DiskIndex,
    point: Point,
    build_s: float,
    num_vectors: int,
    growth: float,
) -> DesignTrial:
    """Extrapolate a measurement on a sample to a table of `num_vectors`; `growth` is the exponent of a query's time."""
    size = num_vectors / index.ntotal
    expected_ms = point.latency_ms * size**growth + design.reads_ms(point.parameters)
    return DesignTrial(
        design=str(design),
        num_vectors=index.ntotal,
        parameters=point.parameters,
        recall_at_10=point.recall_at_10,
        latency_ms=point.latency_ms,
        expected_latency_ms=round(expected_ms, 5),
        expected_bytes=round(faiss_build.num_bytes(index) * size),
        expected_disk_bytes=round(num_vectors * design.row_code_bytes(index.d)) if design.on_disk else None,
        build_s=round(build_s, 3),
        is_efficient=False,
        verdict="",
    )


def _growth(design: Design, parameters: Parameters) -> float:
    """Return the exponent of a query's time: that of a scan where it looks into all lists, as without structure.

    With half of the lists of 4,000 vectors, three times as many took the time to the power of 0.4 to 0.6.
    """
    usual = _GROWTH[design.kind]
    share = min(1.0, parameters["nprobe"] / design.num_lists) if design.num_lists else 0.0
    return usual + (1 - usual) * share**2


def _with_latency(trial: DesignTrial, latency_ms: float) -> DesignTrial:
    expected_ms = trial.expected_latency_ms * latency_ms / trial.latency_ms
    return trial.model_copy(update={"latency_ms": round(latency_ms, 5), "expected_latency_ms": round(expected_ms, 5)})


def _with_fewer_lists(design: Design, num_vectors: int) -> Design:
    """Reduce the lists of a design to the number for a sample of this size."""
    if not design.num_lists:
        return design
    fewer = count_part_lists(num_vectors) if design.has_fast_scan else count_lists(num_vectors)
    return replace(design, factory=design.factory.replace(f"IVF{design.num_lists}", f"IVF{fewer}"))
