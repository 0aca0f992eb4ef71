"""Build of one version of an index from vectors and ids: choose, add, measure, write, publish."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa

from index import disk_build, faiss_build
from index.atomic_folder import sweep_leftovers, whole_folder
from index.autotune import GroundTruths, Meter
from index.choose import DesignSearch
from index.constraints import Constraints, Measures, OnMissed, excess, missed_text, nearest, no_design_text, rank
from index.design_trials import Projections
from index.designs import Design, parse_design
from index.disk_files import remove_files
from index.disk_index import DiskIndex
from index.held_out_queries import CAPTIONS, SplitQueries, sampled_queries, split_queries
from index.ids import check_ids
from index.index_errors import ConstraintsMissedError
from index.list_reach import Projection
from index.manifest import DesignTrial, Manifest
from index.recall import find_ground_truth
from index.selector import Selector
from index.step_timer import StepTimer
from index.vectors import Floats, VectorTable, collect_vectors, vectors_text
from index.version_files import TunedIndex, VersionContents, VersionOrigin, write_version

LOG = logging.getLogger(__name__)

Fill = Callable[[Design, VectorTable, Projection | None], faiss.Index]
"""Builds an index of a design with every vector of a table, in order, with a projection if the design has one."""

_SPOOL_NAME = "vectors.f32"
_NUM_IMAGE_QUERIES = 100
_MAX_BUILT = 3  # designs built on the whole table before exact search, or the nearest of them again


def build_index(
    vectors: Iterable[Floats] | Floats,
    ids: pa.Table,
    out: str | Path,
    *,
    model_fingerprint: str,
    embeddings_version: int,
    kind: str = "auto",
    constraints: Constraints | None = None,
    queries: Floats | None = None,
    query_kind: str = CAPTIONS,
    measure_all: bool = False,
    num_threads: int | None = None,
    fill: Fill | None = None,
    build_bytes: int = disk_build.DEFAULT_BUILD_BYTES,
    on_missed: OnMissed = "publish",
) -> Manifest:
    """Build an index and publish it as the folder `out`, which must not exist, atomically; raises a RetrievalError.

    Without a limit of latency or memory there always is an index: exact search at worst. With one that no design keeps,
    the nearest is built, and the manifest's `missed` says what it misses. At most four indexes are built. Memory
    is bounded by the index itself (by one part of a design on disk), one block of vectors and a sample for training.

    Args:
        vectors: (N, E) float32 of unit norm, or a stream of such blocks, read once; a stream is kept in a file next to
            `out` while the build runs (N x E x 4 bytes).
        ids: `item_id` and `segment` of each vector, in the same order; `run_id` to make updates possible.
        out: the folder to make.
        model_fingerprint: of the vectors' model; a search with another is refused.
        embeddings_version: version of the table of the vectors.
        kind: `flat`, `hnsw`, `ivf`, a design as `index.designs` writes it, or `auto` to choose by measuring.
        constraints: limits that the choice must keep; by default a recall@10 of 0.95.
        queries: (Q, E), embeddings of captions: half to learn from, a quarter to tune with, and a quarter to measure
            the recall that is reported; else vectors of the table.
        query_kind: name of the queries in the manifest.
        measure_all: whether to measure all candidates even if exact search will do.
        num_threads: threads of FAISS; None for all cores; 1 gives the same file every time.
        fill: trains and fills the index of a design; by default in this process, as always for designs in parts.
        build_bytes: memory for the build of a design in parts; it decides how many rows a part has.
        on_missed: `publish` the nearest design where none keeps the constraints, else raise a ConstraintsMissedError.
    """
    timer = StepTimer()
    out = Path(out)
    constraints = constraints or Constraints()
    sweep_leftovers(out.parent)
    with whole_folder(out) as folder, faiss_build.threads(num_threads):
        spool = folder / _SPOOL_NAME
        with timer.step("collect"):
            table = collect_vectors(vectors, spool)
        ids = check_ids(ids, table.num_vectors)
        split = split_queries(table, queries, query_kind)
        projections = Projections(split.learned, table)
        with timer.step("exact answers"):
            ground_truths = _find_ground_truths(table, split)
        search = DesignSearch(table, ground_truths.asked, projections, kind, constraints, measure_all)

        def make(design: Design) -> faiss.Index | DiskIndex:
            if design.in_parts:
                return disk_build.build(design, table, split.learned, folder, build_bytes)
            return (fill or faiss_build.build)(design, table, projections.of(design))

        built, missed, trials = _build_best(search, ground_truths, make, folder, timer, on_missed)
        origin = VersionOrigin(
            embeddings_version=embeddings_version,
            model_fingerprint=model_fingerprint,
            num_built=table.num_vectors,
            built_recall_at_10=built.point.recall_at_10,
            target_recall=constraints.recall,
            trials=trials,
            missed=missed,
        )
        contents = VersionContents(ids, np.ones(ids.num_rows, np.bool_))
        manifest = write_version(folder, built, contents, origin, table.mean(), timer)
        spool.unlink(missing_ok=True)
    return manifest


def _find_ground_truths(table: VectorTable, split: SplitQueries) -> GroundTruths:
    tuned = find_ground_truth(table, split.tuned)
    judged = tuned if split.judged is split.tuned else find_ground_truth(table, split.judged)
    return GroundTruths(tuned, judged, find_ground_truth(table, sampled_queries(table, _NUM_IMAGE_QUERIES)))


def _build_best(
    search: DesignSearch,
    ground_truths: GroundTruths,
    make: Callable[[Design], faiss.Index | DiskIndex],
    folder: Path,
    timer: StepTimer,
    on_missed: OnMissed,
) -> tuple[TunedIndex, str | None, tuple[DesignTrial, ...]]:
    """Build designs, best first, until one keeps the constraints (a requested one does), else the nearest.

    Returns the index, what it misses (None for nothing), and the measurements before. Raises a ConstraintsMissedError
    where none keeps the constraints unless `on_missed` is `publish`.
    """
    constraints, missed = search.constraints, dict[str, str]()
    found: dict[Design, Measures] = {}

    def build(design: Design) -> TunedIndex:
        LOG.info(f"building {design} of {vectors_text(search.table.num_vectors)}")
        with timer.step("build"):
            index = make(design)
        limit_ms = math.inf if constraints.latency_ms is None or not search.trials else 2 * constraints.latency_ms
        meter = Meter(index, design, search.table.take, limit_ms=limit_ms)
        with timer.step("tune"), faiss_build.failures_named(design, "search it, whole and by a filter"):
            curve, best = meter.tune_finely(ground_truths.asked, constraints.recall)
            if ground_truths.judged is not ground_truths.asked:
                best = meter.judge(best, ground_truths.judged, constraints.recall)
            filtered = replace(meter, selector=Selector(np.ones(index.ntotal, np.bool_)))
            filtered.find(ground_truths.asked.queries.vectors[:1], 1, best.parameters)
        return TunedIndex(meter, tuple(curve), best, ground_truths)

    designs = search.designs()
    while len(found) < _MAX_BUILT:
        with timer.step("choose"):
            design = next(designs, None)
        if design is None:
            break
        built = build(design)
        if not search.trials:
            return built, None, ()
        point, num_bytes = built.point, faiss_build.num_bytes(built.meter.index)
        misses = missed_text(point, num_bytes, constraints)
        if misses is None:
            return built, None, search.judge_trials(str(design), missed)
        LOG.info(f"{design} misses the constraints on the whole table: {misses}")
        if isinstance(built.meter.index, DiskIndex):
            remove_files(built.meter.index, folder)
        missed[str(design)] = misses
        found[design] = (point.recall_at_10, point.latency_ms, num_bytes)
    if constraints.latency_ms is None and rank(search.trials[:1], constraints):  # exact search, however slow
        return build(exact := Design("Flat")), None, search.judge_trials(str(exact), missed)
    if on_missed != "publish":
        raise ConstraintsMissedError(_none_text(search, missed))
    if found:
        design = min(found, key=lambda each: excess(found[each], constraints))
    else:
        design = parse_design(nearest(search.trials, constraints).design)
    built = build(design)
    misses = missed_text(built.point, faiss_build.num_bytes(built.meter.index), constraints)
    if misses:
        LOG.warning(
            f"index: none of {len(search.trials)} designs keeps the constraints; the nearest, {design}: {misses}"
        )
    return built, misses, search.judge_trials(str(design), missed)


def _none_text(search: DesignSearch, missed: Mapping[str, str]) -> str:
    if not missed:
        return no_design_text(search.trials, search.constraints)
    return (
        f"index: of {vectors_text(search.table.num_vectors)}, "
        f"{'; '.join(f'{design} has {misses}' for design, misses in missed.items())}: none keeps the constraints as on "
        "the sample; loosen recall, latency or memory, or name a design with kind"
    )
