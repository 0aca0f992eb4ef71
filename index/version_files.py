"""Files of one version: writing all of them, and reading those that an update starts from."""

import hashlib
import io
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from index.autotune import GroundTruths, Meter, best_point
from index.manifest import (
    IDS_NAME,
    INDEX_NAME,
    LIVE_NAME,
    QUERIES_NAME,
    DesignTrial,
    Manifest,
    Point,
    write_manifest,
)
from index.queries import RecallQueries
from index.recall import GroundTruth
from index.step_timer import StepTimer
from index.vectors import Floats, Mask


@dataclass(frozen=True)
class VersionContents:
    """Ids of the rows, and which rows may be found.

    Attributes:
        ids: `item_id`, `segment` and `run_id` of each row.
        is_live: bool (rows,), whether a row may be found; None for all.
    """

    ids: pa.Table
    is_live: Mask | None = None

    @property
    def num_live(self) -> int:
        """Number of rows that may be found."""
        return self.ids.num_rows if self.is_live is None else int(np.count_nonzero(self.is_live))


@dataclass(frozen=True)
class TunedIndex:
    """Index with its measurements.

    Attributes:
        meter: the index and its design.
        curve: all measured search parameters.
        point: the chosen ones.
        ground_truths: the ground truth that they were measured against.
    """

    meter: Meter
    curve: tuple[Point, ...]
    point: Point
    ground_truths: GroundTruths


@dataclass(frozen=True)
class VersionOrigin:
    """Origin of a version: its data, its requirements, its last whole build.

    Attributes:
        embeddings_version: version of the table.
        model_fingerprint: fingerprint of the vectors' model.
        num_built: number of vectors of the last whole build.
        built_recall_at_10: recall of the last whole build.
        target_recall: recall that was asked for.
        trials: measurements for the choice of the design.
        centre: (E,), mean of the vectors of the last whole build.
        timer: timer of the whole build or update.
        drift: distance from `centre` to the mean of the vectors added since.
    """

    embeddings_version: int
    model_fingerprint: str
    num_built: int
    built_recall_at_10: float
    target_recall: float
    trials: tuple[DesignTrial, ...]
    centre: Floats
    timer: StepTimer
    drift: float = 0.0


def write_version(folder: Path, measured: TunedIndex, contents: VersionContents, origin: VersionOrigin) -> Manifest:
    """Write index, ids, queries with their ground truth, mask, and last the manifest.

    Args:
        folder: folder to fill.
        measured: the index with its measurements.
        contents: ids and mask of its rows.
        origin: origin of the version.
    """
    from index import faiss_build, faiss_search
    from index.faiss_scan import RowScan

    meter, ground_truths = measured.meter, measured.ground_truths
    with origin.timer.step("write"):
        faiss_build.write(meter.index, folder / INDEX_NAME)
    faiss_search.prepare(meter.index)
    pq.write_table(contents.ids, folder / IDS_NAME)
    _write_queries(folder / QUERIES_NAME, ground_truths, origin.centre)
    if contents.is_live is not None:
        np.save(folder / LIVE_NAME, np.packbits(contents.is_live, bitorder="little"))
    with origin.timer.step("tune"):
        images = meter.curve(ground_truths.images, origin.target_recall)
    of_images = best_point(images, origin.target_recall)
    is_enough = of_images.recall_at_10 >= origin.target_recall
    with origin.timer.step("hash"):
        hashes = _hash_files(folder)
    manifest = Manifest(
        kind=meter.design.kind,
        design=str(meter.design),
        dim=meter.index.d,
        num_vectors=contents.num_live,
        num_rows=contents.ids.num_rows,
        num_built=origin.num_built,
        parameters=measured.point.parameters,
        image_parameters=of_images.parameters if is_enough else None,
        embeddings_version=origin.embeddings_version,
        model_fingerprint=origin.model_fingerprint,
        sha256=hashes,
        size_bytes=sum((folder / name).stat().st_size for name in hashes),
        memory_bytes=(folder / INDEX_NAME).stat().st_size,
        recall_at_10=measured.point.recall_at_10,
        built_recall_at_10=origin.built_recall_at_10,
        image_recall_at_10=of_images.recall_at_10 if is_enough else 1.0,
        num_recall_queries=len(ground_truths.asked.queries.vectors),
        recall_query_kind=ground_truths.asked.queries.kind,
        target_recall=origin.target_recall,
        latency_ms=measured.point.latency_ms,
        exact_row_us=meter.row_us(partial(faiss_search.search_exactly, meter.index)),
        scan_row_us=meter.row_us(RowScan(meter.index).find),
        drift=origin.drift,
        curve=measured.curve,
        trials=origin.trials,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        build_s=origin.timer.total_s,
        steps_s=origin.timer.steps_s,
        faiss_version=faiss_build.VERSION,
    )
    write_manifest(folder, manifest)
    return manifest


def bind_version(previous: Path, folder: Path, before: Manifest, embeddings_version: int, timer: StepTimer) -> Manifest:
    """Make a version for a table whose rows did not change: the same files, for another version of the table.

    Args:
        previous: folder of the version before.
        folder: folder to fill.
        before: manifest of the version before.
        embeddings_version: version of the table.
        timer: timer of the update.
    """
    for name in before.sha256:
        try:
            os.link(previous / name, folder / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(previous / name, folder / name)
    built_at = datetime.now(UTC).isoformat(timespec="seconds")
    times = {"built_at": built_at, "build_s": timer.total_s, "steps_s": timer.steps_s}
    manifest = before.model_copy(update=times | {"embeddings_version": embeddings_version})
    write_manifest(folder, manifest)
    return manifest


def _hash_files(folder: Path) -> dict[str, str]:
    hashes = {}
    for name in (INDEX_NAME, IDS_NAME, QUERIES_NAME, LIVE_NAME):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _write_queries(path: Path, ground_truths: GroundTruths, centre: Floats) -> None:
    arrays: dict[str, NDArray[Any]] = {"centre": centre}
    for name, ground_truth in (("asked", ground_truths.asked), ("pictures", ground_truths.images)):
        queries = ground_truth.queries
        arrays[f"{name}_queries"] = queries.vectors
        arrays[f"{name}_kind"] = np.array(queries.kind)
        arrays[f"{name}_scores"], arrays[f"{name}_rows"] = ground_truth.scores, ground_truth.rows
        if queries.own_rows is not None:
            arrays[f"{name}_own_rows"] = queries.own_rows
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub wants its own option there


def read_queries(content: bytes) -> tuple[GroundTruths, Floats]:
    """Read the queries with their ground truth, and the mean of the built vectors, from the bytes of their file."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:

        def ground_truth(name: str) -> GroundTruth:
            own_rows = arrays.get(f"{name}_own_rows")
            queries = RecallQueries(arrays[f"{name}_queries"], str(arrays[f"{name}_kind"]), own_rows)
            return GroundTruth(queries, arrays[f"{name}_scores"], arrays[f"{name}_rows"])

        return GroundTruths(ground_truth("asked"), ground_truth("pictures")), arrays["centre"]


def read_mask(content: bytes, num_rows: int) -> Mask:
    """Read which rows may be found, bool (num_rows,), from the bytes of its file."""
    bits = np.load(io.BytesIO(content), allow_pickle=False)
    return np.unpackbits(bits, count=num_rows, bitorder="little").astype(np.bool_)
