"""Update of an index without a full build: add new rows, mask removed ones, and measure the recall again."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa

from index import disk_build, faiss_build, faiss_search
from index.atomic_folder import sweep_leftovers, whole_folder
from index.autotune import CHANCE, GroundTruths, Meter
from index.designs import parse_design
from index.disk_files import link_files
from index.disk_index import DiskIndex
from index.ids import check_ids
from index.index_errors import RebuildNeededError
from index.manifest import QUERIES_NAME, TEMPLATE_NAME, Manifest, read_manifest
from index.recall import NUM_KEPT, GroundTruth, find_ground_truth, replace_answers, update_ground_truth, without_own
from index.selector import Selector
from index.step_timer import StepTimer
from index.vectors import Floats, Mask, VectorTable, collect_vectors, vectors_text
from index.version_files import (
    TunedIndex,
    VersionContents,
    VersionOrigin,
    bind_version,
    read_contents,
    read_index,
    read_queries,
    write_version,
)

MAX_MASKED_SHARE = 0.25  # searches visit masked rows, too, so they take longer by their share
MAX_GROWTH = 2.0  # times the vectors that the structure was built for
MAX_IMBALANCE_GROWTH = 1.5
MAX_RECALL_LOSS = 0.01  # compared to the last full build

_SPOOL_NAME = "added.f32"


def update_index(
    previous: str | Path,
    out: str | Path,
    added: Iterable[Floats] | Floats,
    added_ids: pa.Table,
    removed: Mask,
    *,
    embeddings_version: int,
    num_threads: int | None = None,
) -> Manifest:
    """Make the next version of an index from the previous one, as the folder `out`, atomically.

    Recall is measured on the queries of the last build. The version contains their ground truth, from which removed
    rows are deleted and to which added ones are compared.

    Args:
        previous: folder of the previous version.
        out: the folder to make; must not exist.
        added: (n, E) float32 of unit norm, or a stream of such blocks.
        added_ids: `item_id`, `segment`, `run_id` of each.
        removed: bool (rows of the previous version,), whether a row must no longer be found.
        embeddings_version: version of the table that the index is now for.
        num_threads: threads of FAISS; None for all cores.

    Returns:
        The manifest of the new version.

    Raises:
        RebuildNeededError: too many rows were masked or added since the build, or recall is too low.
        RetrievalError: the version is damaged, vectors or ids break a rule, or `out` exists.
    """
    timer = StepTimer()
    previous, out = Path(previous), Path(out)
    before = read_manifest(previous)
    if QUERIES_NAME not in before.sha256:
        raise RebuildNeededError("an earlier release built it, without the queries that an update is measured on")
    sweep_leftovers(out.parent)
    with whole_folder(out) as folder, faiss_build.threads(num_threads):
        if added_ids.num_rows == 0 and not removed.any():
            return bind_version(previous, folder, before, embeddings_version, timer)
        spool = folder / _SPOOL_NAME
        table = collect_vectors(added, spool, before.dim) if added_ids.num_rows else VectorTable.empty(before.dim)
        old = read_contents(previous, before)
        ids = pa.concat_tables([old.ids, check_ids(added_ids, table.num_vectors)])
        if before.parts is None:  # those of parts are mapped, and stay so
            ids = ids.combine_chunks()
        is_live = np.concatenate([old.is_live & ~removed, np.ones(table.num_vectors, dtype=bool)])
        contents = VersionContents(ids, is_live)
        _check_limits(contents, before)
        with faiss_build.failures_named(parse_design(before.design), "update it"):
            measured, centre = _change_index(previous, before, table, contents, folder, timer)
        origin = VersionOrigin(
            embeddings_version=embeddings_version,
            model_fingerprint=before.model_fingerprint,
            num_built=before.num_built,
            built_recall_at_10=before.built_recall_at_10,
            target_recall=before.target_recall,
            trials=before.trials,
            missed=before.missed,
            drift=float(np.linalg.norm(table.mean() - centre)) if table.num_vectors else before.drift,
        )
        kept = _link_kept(previous, before, measured.meter.index, folder)
        manifest = write_version(folder, measured, contents, origin, centre, timer, kept, before.image_parameters)
        spool.unlink(missing_ok=True)
    return manifest


def _check_limits(contents: VersionContents, before: Manifest) -> None:
    """Raise a RebuildNeededError if too many rows were masked or added since the build: searches would be slow."""
    num_rows, num_live = contents.ids.num_rows, contents.num_live
    if num_live < (1 - MAX_MASKED_SHARE) * num_rows:
        raise RebuildNeededError(
            f"{100 * (1 - num_live / num_rows):.0f} % of its rows would be masked; "
            f"{100 * MAX_MASKED_SHARE:.0f} % may be"
        )
    if num_live > MAX_GROWTH * before.num_built:
        raise RebuildNeededError(
            f"it was built for {vectors_text(before.num_built)} and would hold {num_live:,}: more than {MAX_GROWTH:g} "
            "times"
        )


def _link_kept(previous: Path, before: Manifest, index: faiss.Index | DiskIndex, folder: Path) -> dict[str, str]:
    """Link the files that stay the same since the previous version; returns their hashes."""
    if not isinstance(index, DiskIndex):
        return {}
    names = [TEMPLATE_NAME, *(name for part in index.parts for name in part.record.names)]
    kept = {name: before.sha256[name] for name in names if name in before.sha256}
    link_files(previous, folder, kept)
    return kept


def _add(index: faiss.Index | DiskIndex, table: VectorTable, folder: Path) -> faiss.Index | DiskIndex:
    """Add vectors to an index; an index in parts gets a new part."""
    if not isinstance(index, DiskIndex):
        faiss_build.add(index, table.blocks())
        return index
    if table.num_vectors == 0:
        return index
    number = 1 + max(part.number for part in index.parts)
    return disk_build.extend(index, table.blocks(), table.num_vectors, folder, number)


def _change_index(
    previous: Path,
    before: Manifest,
    table: VectorTable,
    contents: VersionContents,
    folder: Path,
    timer: StepTimer,
) -> tuple[TunedIndex, Floats]:
    """Add the vectors and measure; also returns the mean of the built vectors, (E,)."""
    # Read into memory: vectors can't be added to a mapped index.
    with timer.step("read"):
        index = read_index(previous, before, map_large=False)
    imbalance = faiss_build.imbalance(index)
    with timer.step("add"):
        index = _add(index, table, folder)
    if faiss_build.imbalance(index) > MAX_IMBALANCE_GROWTH * imbalance:
        raise RebuildNeededError("what was added fills few of its lists, and a search of those takes longer")
    faiss_search.prepare(index)
    selector = None if contents.is_live.all() else Selector(contents.is_live)
    ground_truths, centre = read_queries(previous, before)
    meter = Meter(index, parse_design(before.design), lambda rows: faiss_search.vectors(index, rows), selector)
    with timer.step("exact answers"):
        asked, images = (
            _update_ground_truth(each, meter, table, contents) for each in (ground_truths.asked, ground_truths.images)
        )
        is_one = ground_truths.judged is ground_truths.asked
        judged = asked if is_one else _update_ground_truth(ground_truths.judged, meter, table, contents)
    with timer.step("tune"):
        measured = _measure(meter, GroundTruths(asked, judged, images), before)
    return measured, centre


def _update_ground_truth(
    ground_truth: GroundTruth, meter: Meter, table: VectorTable, contents: VersionContents
) -> GroundTruth:
    """Update the ground truth: search the added vectors, and the whole index if too many were removed."""
    num_before = contents.ids.num_rows - table.num_vectors
    added = None
    if table.num_vectors:
        added = find_ground_truth(table, replace(ground_truth.queries, own_rows=None))
        added = replace(added, rows=np.where(added.rows >= 0, added.rows + num_before, -1))
    changed, unknown = update_ground_truth(ground_truth, contents.is_live[:num_before], added)
    if len(unknown):
        own_rows = ground_truth.queries.own_rows
        asked = replace(
            ground_truth.queries,
            vectors=ground_truth.queries.vectors[unknown],
            own_rows=None if own_rows is None else own_rows[unknown],
        )
        k = min(NUM_KEPT + (own_rows is not None), contents.num_live)
        found = faiss_search.search_exactly(meter.index, asked.vectors, k, meter.selector)
        changed = replace_answers(changed, unknown, *without_own(*found, asked))
    return changed


def _measure(meter: Meter, ground_truths: GroundTruths, before: Manifest) -> TunedIndex:
    """Keep the search parameters if they find as much, else raise them, or raise a RebuildNeededError if none do."""
    wanted = min(before.target_recall, before.built_recall_at_10)
    point = meter.point(ground_truths.judged, before.parameters)
    curve = [point]
    if point.recall_at_10 < wanted - CHANCE:
        curve, tuned = meter.tune(ground_truths.asked, wanted)
        found = [
            meter.judge(tuned, ground_truths.judged, wanted),
            meter.raise_effort(point, ground_truths.judged, wanted),
        ]
        point = max(found, key=lambda each: (min(each.recall_at_10, wanted), -each.latency_ms))
    if point.recall_at_10 < min(before.built_recall_at_10 - MAX_RECALL_LOSS, wanted - CHANCE):
        raise RebuildNeededError(
            f"recall@10 would be {point.recall_at_10:.3f}, and was {before.built_recall_at_10:.3f} when it was built"
        )
    return TunedIndex(meter, tuple(curve), point, ground_truths)
