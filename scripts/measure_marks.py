#!/usr/bin/env python3
"""Measure what a night of changes writes to the tables: part files written anew, and rows marked by deletion vectors.

    python scripts/measure_marks.py [--rows 1000000] [--share 0.01] [--width 16]

For each way a store of so many rows is made, in part files of 50,000. Then a share of them changes, once by chance and
once side by side, and is published. In the store with marks, it is then compacted, a thousand changed items are purged,
and what was first published is brought back; each time the rows are compared with what they have to be. What bounds the
figure is the disk: `written_over_changed` compares bytes with those of part files of the changed rows alone. The last
line is one JSON document.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.batch_schema import TRACE, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.layout import StoreInfo, read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.purge.purge import purge
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications
from embedder.store.publish.publication import MarkRows, ModelWork, PublishIntent
from embedder.store.publish.publish import publish
from embedder.store.store_info import bind_store
from embedder.store.tables.tables import RecordTable

ROWS_PER_PART = 50_000
INFO = StoreInfo(
    model="m",
    model_fingerprint="m",
    preprocess_fingerprint="p",
    segment_s=5.0,
    frames_per_segment=4,
    dtype="float32",
)
TEXTS = {"source": "", "modified": "t", "modality": "image"}
NULLS = ("caption", "known_version", "step", "error_type", "error")
NULL_TYPES = {"start_s": pa.float64(), "end_s": pa.float64(), "transient": pa.bool_(), "unchanged": pa.bool_()}
NUMBERS = {"size_bytes": (10, pa.int64()), "attempts": (1, pa.int32()), "segment": (0, pa.int32())}
COUNTS = {"num_vectors": (1, pa.int32()), "known_vectors": (0, pa.int32())}


class Written:
    """Bytes that are written below the tables of a store, without their logs."""

    def __init__(self, files: StoreFiles) -> None:
        self.size_bytes, put = 0, files.backend.put

        def count(path: str, data: Any, condition: Any) -> Any:
            if path.split("/", maxsplit=1)[0] in ("items", "embeddings"):
                self.size_bytes += len(data)
            return put(path, data, condition)

        files.backend.put = count  # type: ignore[method-assign]


def finished_rows(numbers: "np.ndarray[Any, Any]", version: str, width: int) -> pa.Table:
    """Rows as the last stage passes them on, of items by number; the vectors follow from number and version."""
    seed = int.from_bytes(version.encode(), "little") % 2**32
    values = np.random.default_rng([seed, *numbers[:1].tolist()]).random(len(numbers) * width, np.float32)
    vectors = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, width, dtype=np.int32), values)
    ids = pa.array([f"{number:09d}" for number in numbers.tolist()])
    columns: dict[str, Any] = {"item_id": ids, "uri": ids, "content_version": pa.repeat(version, len(ids))}
    columns |= {name: pa.repeat(value, len(ids)) for name, value in TEXTS.items()}
    columns |= {name: pa.nulls(len(ids), pa.string()) for name in NULLS}
    columns |= {name: pa.nulls(len(ids), kind) for name, kind in NULL_TYPES.items()}
    columns |= {name: pa.repeat(pa.scalar(*value), len(ids)) for name, value in (NUMBERS | COUNTS).items()}
    columns |= {"image_embedding": vectors, "text_embedding": pa.nulls(len(ids), VECTOR)}
    return pa.table(columns | {"trace": pa.nulls(len(ids), TRACE)})


def publish_items(files: StoreFiles, numbers: "np.ndarray[Any, Any]", version: str, width: int, marks: MarkRows) -> int:
    """Embed and publish some items; bytes of the part files of these alone."""
    run = start_run(files, INFO, pa.schema([]))
    metadata = RunMetadata(run.run_id, run.session, "m", "p", pa.schema([]))
    size = 0
    for task, start in enumerate(range(0, len(numbers), ROWS_PER_PART)):
        rows = finished_rows(numbers[start : start + ROWS_PER_PART], version, width)
        size += sum(part.size_bytes for part in write_part(files, metadata, task, rows).parts)
    publish([ModelWork(run, metadata, PublishIntent(kind="refresh", deletion_vectors=marks))])
    return size


def versions(files: StoreFiles, name: str) -> dict[str, str]:
    """Version of each item; each occurs once."""
    rows = RecordTable(files, name, getattr(read_current(files), name)).read(["item_id", "content_version"])
    found = dict(zip(rows["item_id"].to_pylist(), rows["content_version"].to_pylist(), strict=True))
    if len(found) != rows.num_rows:
        raise RuntimeError(f"{name}: an item occurs twice")
    return found


def check(files: StoreFiles, expected: dict[str, str], after: str) -> None:
    for name in ("items", "embeddings"):
        if versions(files, name) != expected:
            raise RuntimeError(f"{name} differ after {after}")


def holders(files: StoreFiles, ids: set[str]) -> list[str]:
    """Files with the bytes of an id."""
    found = []
    for info in files.list(""):
        if info.path.endswith(".parquet") and "/_delta_log/" not in info.path:
            names = files.read_table(info.path, ["item_id"])
            if "item_id" in names.column_names and ids & set(names["item_id"].to_pylist()):
                found.append(info.path)
    return found


def keep_up(files: StoreFiles, expected: dict[str, str], chosen: "np.ndarray[Any, Any]") -> dict[str, float]:
    """Compact, purge and roll back, and compare the rows each time; seconds of each."""
    seconds, first = {}, publications(files)[0].run_id
    for step in ("compact", "purge", "rollback"):
        began_s = time.monotonic()
        if step == "compact":
            compact(files, PartTarget(marked_share=0.001))
        elif step == "purge":
            gone = {f"{number:09d}" for number in chosen[:1000].tolist()}
            purge(files, gone, lambda candidate, model="": None)
            expected = {item: version for item, version in expected.items() if item not in gone}
            if left := holders(files, gone):
                raise RuntimeError(f"purged items are held by {left[:3]}")
        else:
            rollback(files, first, lambda candidate, model="": None)
            expected = dict.fromkeys(expected, "v0")
        seconds[f"{step}_s"] = round(time.monotonic() - began_s, 1)
        check(files, expected, step)
    return seconds


def measure(folder: Path, marks: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Publish both kinds of night to a new store; figures of each."""
    files, result = StoreFiles(folder), {}
    bind_store(files, INFO)
    publish_items(files, np.arange(options.rows), "v0", options.width, marks=False)
    expected, number = {f"{each:09d}": "v0" for each in range(options.rows)}, int(options.rows * options.share)
    tables = sum(part.size_bytes for name in ("items", "embeddings") for part in RecordTable(files, name).parts())
    by_chance = np.sort(np.random.default_rng(1).choice(options.rows, number, replace=False))
    for night, chosen in (("scattered", by_chance), ("side_by_side", np.arange(number) + options.rows // 3)):
        written, began_s, began_cpu_s = Written(files), time.monotonic(), time.process_time()
        changed = publish_items(files, chosen, night, options.width, marks)
        result[night] = {
            "written_over_changed": round(written.size_bytes / changed, 2),
            "share_of_tables": round(written.size_bytes / tables, 4),
            "limit": round(2 + 0.02 * tables / changed, 2),
            "seconds": round(time.monotonic() - began_s, 1),
            "cpu_s": round(time.process_time() - began_cpu_s, 1),
        }
        expected |= {f"{each:09d}": night for each in chosen.tolist()}
        check(files, expected, night)
    return result | (keep_up(files, expected, by_chance) if marks else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=16, help="numbers of a vector")
    options, result = parser.parse_args(), {}
    for name, marks in (("written_anew", False), ("marked", True)):
        folder = Path(tempfile.mkdtemp(prefix="marks-"))
        try:
            result[name] = measure(folder, marks, options)
        finally:
            shutil.rmtree(folder)
        print(name, json.dumps(result[name]), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(result | {"rows": options.rows, "peak_mib": peak}))


if __name__ == "__main__":
    main()
