"""The files of one version: write them all, and read back what an update goes on from."""

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

from index.autotune import Meter, Truths, best_point
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
from index.recall import Truth
from index.step_timer import StepClock
from index.vectors import Floats, Mask


@dataclass(frozen=True)
class VersionContents:
    """What each row stands for, and which rows may be found; None for all."""

    ids: pa.Table
    is_live: Mask | None = None

    @property
    def num_live(self) -> int:
        """Count the rows that may be found."""
        return self.ids.num_rows if self.is_live is None else int(np.count_nonzero(self.is_live))


@dataclass(frozen=True)
class TunedIndex:
    """An index, its efforts as they were measured, the one it is searched with, and the exact answers."""

    meter: Meter
    curve: tuple[Point, ...]
    point: Point
    truths: Truths


@dataclass(frozen=True)
class VersionOrigin:
    """What a version was made from.

    Attributes:
        embeddings_version: of the table.
        model_fingerprint: of the vectors' model.
        num_built: vectors when it was last built whole.
        built_recall_at_10: recall then.
        target_recall: that was asked for.
        trials: what was measured to choose the design.
        centre: (E,) mean of the vectors when it was last built whole.
        clock: of the whole build or update.
        drift: distance from it to the mean of what was added since.
    """

    embeddings_version: int
    model_fingerprint: str
    num_built: int
    built_recall_at_10: float
    target_recall: float
    trials: tuple[DesignTrial, ...]
    centre: Floats
    clock: StepClock
    drift: float = 0.0


def write_version(folder: Path, measured: TunedIndex, contents: VersionContents, origin: VersionOrigin) -> Manifest:
    """Write index, ids, queries with their answers, mask, and last the manifest."""
    from index import faiss_build, faiss_search
    from index.faiss_scan import RowScan

    meter, truths = measured.meter, measured.truths
    with origin.clock.step("write"):
        faiss_build.write(meter.index, folder / INDEX_NAME)
    faiss_search.prepare(meter.index)
    pq.write_table(contents.ids, folder / IDS_NAME)
    _write_queries(folder / QUERIES_NAME, truths, origin.centre)
    if contents.is_live is not None:
        np.save(folder / LIVE_NAME, np.packbits(contents.is_live, bitorder="little"))
    with origin.clock.step("tune"):
        pictures = meter.curve(truths.pictures, origin.target_recall)
    of_pictures = best_point(pictures, origin.target_recall)
    is_enough = of_pictures.recall_at_10 >= origin.target_recall
    with origin.clock.step("hash"):
        hashes = _hash_files(folder)
    manifest = Manifest(
        kind=meter.design.kind,
        design=str(meter.design),
        dim=meter.index.d,
        num_vectors=contents.num_live,
        num_rows=contents.ids.num_rows,
        num_built=origin.num_built,
        parameters=measured.point.parameters,
        image_parameters=of_pictures.parameters if is_enough else None,
        embeddings_version=origin.embeddings_version,
        model_fingerprint=origin.model_fingerprint,
        sha256=hashes,
        size_bytes=sum((folder / name).stat().st_size for name in hashes),
        memory_bytes=(folder / INDEX_NAME).stat().st_size,
        recall_at_10=measured.point.recall_at_10,
        built_recall_at_10=origin.built_recall_at_10,
        image_recall_at_10=of_pictures.recall_at_10 if is_enough else 1.0,
        num_recall_queries=len(truths.asked.queries.vectors),
        recall_query_kind=truths.asked.queries.kind,
        target_recall=origin.target_recall,
        latency_ms=measured.point.latency_ms,
        exact_row_us=meter.row_us(partial(faiss_search.search_exactly, meter.index)),
        scan_row_us=meter.row_us(RowScan(meter.index).find),
        drift=origin.drift,
        curve=measured.curve,
        trials=origin.trials,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        build_s=origin.clock.total_s,
        steps_s=origin.clock.steps_s,
        faiss_version=faiss_build.VERSION,
    )
    write_manifest(folder, manifest)
    return manifest


def bind_version(previous: Path, folder: Path, before: Manifest, embeddings_version: int, clock: StepClock) -> Manifest:
    """Make a version for a table whose rows did not change: the same files, of another version of the table."""
    for name in before.sha256:
        try:
            os.link(previous / name, folder / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(previous / name, folder / name)
    built_at = datetime.now(UTC).isoformat(timespec="seconds")
    times = {"built_at": built_at, "build_s": clock.total_s, "steps_s": clock.steps_s}
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


def _write_queries(path: Path, truths: Truths, centre: Floats) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {"centre": centre}
    for name, truth in (("asked", truths.asked), ("pictures", truths.pictures)):
        queries = truth.queries
        arrays[f"{name}_queries"] = queries.vectors
        arrays[f"{name}_kind"] = np.array(queries.kind)
        arrays[f"{name}_scores"], arrays[f"{name}_rows"] = truth.scores, truth.rows
        if queries.own_rows is not None:
            arrays[f"{name}_own_rows"] = queries.own_rows
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub wants its own option there


def read_queries(content: bytes) -> tuple[Truths, Floats]:
    """Give the queries with their exact answers, and the mean of what was built, from the bytes of their file."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:

        def truth(name: str) -> Truth:
            own_rows = arrays.get(f"{name}_own_rows")
            queries = RecallQueries(arrays[f"{name}_queries"], str(arrays[f"{name}_kind"]), own_rows)
            return Truth(queries, arrays[f"{name}_scores"], arrays[f"{name}_rows"])

        return Truths(truth("asked"), truth("pictures")), arrays["centre"]


def read_mask(content: bytes, num_rows: int) -> Mask:
    """Give which rows may be found, bool (num_rows,), from the bytes of its file."""
    bits = np.load(io.BytesIO(content), allow_pickle=False)
    return np.unpackbits(bits, count=num_rows, bitorder="little").astype(np.bool_)
