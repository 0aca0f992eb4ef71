"""Files of one version: written with their hashes, and read only after each hash matches the manifest's."""

import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from index import faiss_build, faiss_search
from index.atomic_folder import hash_files
from index.autotune import CHANCE, GroundTruths, Meter
from index.checked_files import open_checked
from index.designs import Parameters
from index.disk_files import link_files, read_ids, read_parts, write_ids
from index.disk_index import DiskIndex
from index.faiss_scan import RowScan
from index.held_out_queries import RecallQueries
from index.ids import check_ids
from index.index_errors import RetrievalError
from index.manifest import (
    IDS_NAME,
    INDEX_NAME,
    LIVE_NAME,
    QUERIES_NAME,
    TEMPLATE_NAME,
    DesignTrial,
    Manifest,
    Point,
    write_manifest,
)
from index.recall import GroundTruth
from index.step_timer import StepTimer
from index.vectors import Floats, Mask

# A file up to this size is read once, then hashed and parsed in memory. A larger one is hashed and then mapped, or read
# from the same open file, so that the index is not in memory twice.
READ_ONCE_BYTES = 256 << 20


@dataclass(frozen=True)
class VersionContents:
    """Row ids (`item_id`, `segment`, `run_id`), and bool (rows,), whether each row may be found."""

    ids: pa.Table
    is_live: Mask

    @property
    def num_live(self) -> int:
        """Number of rows that may be found."""
        return int(np.count_nonzero(self.is_live))


@dataclass(frozen=True)
class TunedIndex:
    """Index with all measured search parameters, the chosen ones, and the ground truth of the measurements."""

    meter: Meter
    curve: tuple[Point, ...]
    point: Point
    ground_truths: GroundTruths


@dataclass(frozen=True)
class VersionOrigin:
    """Origin of a version as in its manifest: its data, its requirements, its last full build.

    `num_built` and `built_recall_at_10` are of that build; `drift` is the distance between the mean of its vectors and
    the mean of those added since; `missed` says which constraints it does not keep, None for none.
    """

    embeddings_version: int
    model_fingerprint: str
    num_built: int
    built_recall_at_10: float
    target_recall: float
    trials: tuple[DesignTrial, ...]
    drift: float = 0.0
    missed: str | None = None


def write_version(
    folder: Path,
    measured: TunedIndex,
    contents: VersionContents,
    origin: VersionOrigin,
    centre: Floats,
    timer: StepTimer,
    known_hashes: Mapping[str, str] | None = None,
    image_parameters_before: Parameters | None = None,
) -> Manifest:
    """Write the index, ids, queries with their ground truth, the mask, and finally the manifest.

    `centre` is (E,), the mean of the vectors of the last full build. `timer` covers the whole build or update.
    `known_hashes` are those of files shared with the previous version, by name; `image_parameters_before` are that
    version's parameters for searches by image, None where there are none.
    """
    meter, ground_truths = measured.meter, measured.ground_truths
    with timer.step("write"):
        index_names = _write_index(folder, meter.index, contents.ids)
    faiss_search.prepare(meter.index)
    _write_queries(folder / QUERIES_NAME, ground_truths, centre)
    if not contents.is_live.all():
        np.save(bits := io.BytesIO(), np.packbits(contents.is_live, bitorder="little"))
        (folder / LIVE_NAME).write_bytes(bits.getvalue())  # NumPy loses the last bytes on a full disk without a word
    with timer.step("tune"):
        of_images = _tune_for_images(measured, image_parameters_before, origin.target_recall)
    with timer.step("hash"):
        names = [*index_names, *(name for name in (QUERIES_NAME, LIVE_NAME) if (folder / name).exists())]
        hashes = _hash_unknown(folder, names, known_hashes or {})
    manifest = _make_manifest(folder, measured, contents, origin, of_images, hashes, timer)
    write_manifest(folder, manifest)
    return manifest


def _make_manifest(
    folder: Path,
    measured: TunedIndex,
    contents: VersionContents,
    origin: VersionOrigin,
    of_images: Point | None,
    hashes: Mapping[str, str],
    timer: StepTimer,
) -> Manifest:
    """Describe a version whose files are written; measures its scans.

    `of_images` is the search by image; None if it doesn't reach the target. `hashes` are those of the files, by name.
    """
    meter, queries = measured.meter, measured.ground_truths.judged.queries
    parts = meter.index.parts if isinstance(meter.index, DiskIndex) else None
    return Manifest(
        format_version=2 if parts is None else 3,
        parts=None if parts is None else tuple(part.record for part in parts),
        kind=meter.design.kind,
        design=str(meter.design),
        dim=meter.index.d,
        num_vectors=contents.num_live,
        num_rows=contents.ids.num_rows,
        image_parameters=None if of_images is None else of_images.parameters,
        sha256=dict(hashes),
        size_bytes=sum((folder / name).stat().st_size for name in hashes),
        memory_bytes=(folder / INDEX_NAME).stat().st_size if parts is None else faiss_build.num_bytes(meter.index),
        image_recall_at_10=1.0 if of_images is None else of_images.recall_at_10,
        num_recall_queries=len(queries.vectors),
        recall_query_kind=queries.kind,
        exact_row_us=_exact_row_us(meter),
        scan_row_us=meter.row_us(RowScan(meter.index).find),
        curve=measured.curve,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        build_s=timer.total_s,
        steps_s=timer.steps_s,
        faiss_version=faiss_build.VERSION,
        **vars(measured.point),
        **vars(origin),
    )


def _exact_row_us(meter: Meter) -> float:
    """Time the search that scores rows of a filter; raises a RetrievalError if FAISS gives no vectors of the design."""
    with faiss_build.failures_named(meter.design, "fetch vectors from it, as searches with a filter do"):
        return meter.row_us(partial(faiss_search.search_exactly, meter.index))


def _tune_for_images(measured: TunedIndex, parameters_before: Parameters | None, target_recall: float) -> Point | None:
    """Choose parameters for searches by image; None if they don't reach the target."""
    unlimited = replace(measured.meter, limit_ms=math.inf)
    _, point = unlimited.tune_from(measured.ground_truths.images, parameters_before, target_recall)
    is_kept = point.parameters == parameters_before
    is_enough = point.recall_at_10 >= target_recall - (CHANCE if is_kept else 0)
    return point if is_enough else None


def _hash_unknown(folder: Path, names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the hash of each file, computed only where it is not `known`."""
    hashes = hash_files(folder / name for name in names if name not in known)
    return hashes | {name: known[name] for name in names if name in known}


def _write_index(folder: Path, index: faiss.Index | DiskIndex, ids: pa.Table) -> list[str]:
    """Write the index unless it is written already, and the row ids; returns the file names."""
    if not isinstance(index, DiskIndex):
        faiss_build.write(index, folder / INDEX_NAME)
        pq.write_table(ids, folder / IDS_NAME)
        return [INDEX_NAME, IDS_NAME]
    records = [part.record for part in index.parts]
    write_ids(folder, records, ids)
    return [TEMPLATE_NAME, *(name for record in records for name in record.names)]


def bind_version(previous: Path, folder: Path, before: Manifest, embeddings_version: int, timer: StepTimer) -> Manifest:
    """Make a version with the same files for a newer table whose rows did not change."""
    link_files(previous, folder, before.sha256)
    built_at = datetime.now(UTC).isoformat(timespec="seconds")
    times = {"built_at": built_at, "build_s": timer.total_s, "steps_s": timer.steps_s}
    manifest = before.model_copy(update=times | {"embeddings_version": embeddings_version})
    write_manifest(folder, manifest)
    return manifest


def _write_queries(path: Path, ground_truths: GroundTruths, centre: Floats) -> None:
    arrays: dict[str, NDArray[Any]] = {"centre": centre}
    named = {"asked": ground_truths.asked, "pictures": ground_truths.images}
    if ground_truths.judged is not ground_truths.asked:
        named["judged"] = ground_truths.judged
    for name, ground_truth in named.items():
        queries = ground_truth.queries
        arrays[f"{name}_queries"] = queries.vectors
        arrays[f"{name}_kind"] = np.array(queries.kind)
        arrays[f"{name}_scores"], arrays[f"{name}_rows"] = ground_truth.scores, ground_truth.rows
        if queries.own_rows is not None:
            arrays[f"{name}_own_rows"] = queries.own_rows
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub wants its own option there


def read_queries(folder: Path, manifest: Manifest) -> tuple[GroundTruths, Floats]:
    """Read ground truth and the mean of the built vectors; raises a RetrievalError if missing or altered."""
    with np.load(io.BytesIO(_read_checked(folder / QUERIES_NAME, manifest)), allow_pickle=False) as arrays:

        def ground_truth(name: str) -> GroundTruth:
            own_rows = arrays.get(f"{name}_own_rows")
            queries = RecallQueries(arrays[f"{name}_queries"], str(arrays[f"{name}_kind"]), own_rows)
            return GroundTruth(queries, arrays[f"{name}_scores"], arrays[f"{name}_rows"])

        asked = ground_truth("asked")
        judged = ground_truth("judged") if "judged_queries" in arrays else asked
        return GroundTruths(asked, judged, ground_truth("pictures")), arrays["centre"]


def read_contents(folder: Path, manifest: Manifest) -> VersionContents:
    """Read all rows' ids, and which may be found; raises a RetrievalError for a missing, altered or unfit file."""
    if manifest.parts is None:
        ids = pq.read_table(pa.BufferReader(_read_checked(folder / IDS_NAME, manifest)))
        ids = check_ids(ids, ids.num_rows)
    else:
        ids = read_ids(folder, manifest)
    contents = VersionContents(ids, read_live(folder, manifest))
    found = (ids.num_rows, contents.num_live)
    expected = (manifest.num_rows, manifest.num_vectors)
    if found != expected:
        raise RetrievalError(
            f"{folder}: found {found[0]:,} ids, {found[1]:,} of them to be found, and its manifest says "
            f"{expected[0]:,} and {expected[1]:,}; build the index again"
        )
    return contents


def read_live(folder: Path, manifest: Manifest) -> Mask:
    """Read which rows may be found, bool (rows,); raises a RetrievalError for a missing or altered file."""
    if LIVE_NAME not in manifest.sha256:
        return np.ones(manifest.num_rows, np.bool_)
    bits = np.load(io.BytesIO(_read_checked(folder / LIVE_NAME, manifest)), allow_pickle=False)
    return np.unpackbits(bits, count=manifest.num_rows, bitorder="little").view(np.bool_)


def read_index(
    folder: Path, manifest: Manifest, *, map_large: bool, samples: Mapping[str, str] | None = None
) -> faiss.Index | DiskIndex:
    """Read a version's FAISS file after checking its hash, or map it if it is large, or open the parts.

    With `samples` (see `open_checked`) it is mapped in any case, and only those are compared.

    A mapped index takes no more vectors. Raises a RetrievalError if the file is missing, altered, in a format unknown
    to FAISS, or inconsistent with the manifest.
    """
    path = folder / (INDEX_NAME if manifest.parts is None else "")
    index: faiss.Index | DiskIndex
    try:
        if manifest.parts is None:
            index = _read_file(path, manifest, map_large, samples)
        else:
            index = read_parts(folder, manifest, samples)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RetrievalError(
            f"{path}: FAISS {faiss_build.VERSION} can't read what FAISS {manifest.faiss_version} wrote ({reason}); "
            "build the index again"
        ) from None
    found, expected = (index.ntotal, index.d), (manifest.num_rows, manifest.dim)
    if found != expected:
        raise RetrievalError(
            f"{folder}: found {found[0]:,} rows of width {found[1]}, and its manifest says {expected[0]:,} and "
            f"{expected[1]}; build the index again"
        )
    return index


def _read_file(path: Path, manifest: Manifest, map_large: bool, samples: Mapping[str, str] | None) -> faiss.Index:
    with open_checked(path, manifest, READ_ONCE_BYTES, samples) as file:
        if map_large and not isinstance(file, io.BytesIO) and sys.platform == "linux":
            return faiss_build.map_file(Path(f"/proc/self/fd/{file.fileno()}"))  # the same file that was hashed
        return faiss_build.read(file)


def _read_checked(path: Path, manifest: Manifest) -> bytes:
    """Read a small file of a version; raises a RetrievalError if it is missing or its hash differs."""
    with open_checked(path, manifest, READ_ONCE_BYTES) as file:
        return file.read()
