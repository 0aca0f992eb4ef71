"""Finished rows as the last stage passes them to the writer, made by hand."""

import pyarrow as pa
from published_rows import delta_rows

from embedder.batch_schema import CARRIED, TRACE, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import Run, start_run
from embedder.store.layout import StoreInfo
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish

MODEL, PREPROCESSING = "model-fingerprint", "preprocess-fingerprint"
INFO = StoreInfo(
    model="m",
    model_fingerprint=MODEL,
    preprocess_fingerprint=PREPROCESSING,
    segment_s=5.0,
    frames_per_segment=4,
    dtype="float32",
)


def row(item_id: str, **changes) -> dict:
    """Only row of one embedded image."""
    return {
        "item_id": item_id,
        "source": "",
        "uri": f"/pictures/{item_id}",
        "size_bytes": 10,
        "modified": "t0",
        "attempts": 1,
        "segment": 0,
        "start_s": None,
        "end_s": None,
        "modality": "image",
        "caption": None,
        "content_version": "v0",
        "known_version": None,
        "known_vectors": 0,
        "unchanged": None,
        "num_vectors": 1,
        "step": None,
        "error_type": None,
        "error": None,
        "transient": None,
        "image_embedding": [1.0, 0.0],
        "text_embedding": None,
    } | changes


def reject(item_id: str, **changes) -> dict:
    """Row of an item without any vector."""
    nothing = {"segment": None, "modality": None, "image_embedding": None, "num_vectors": 0}
    error = {"step": "decode", "error_type": "Broken", "error": "it is broken", "transient": False}
    return row(item_id) | nothing | error | changes


def table(*rows: dict, **carried: pa.Array) -> pa.Table:
    """Rows as a table, with carried columns next to them."""
    types = {
        "segment": pa.int32(),
        "num_vectors": pa.int32(),
        "attempts": pa.int32(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
        "transient": pa.bool_(),
        "unchanged": pa.bool_(),
        "known_vectors": pa.int32(),
        "size_bytes": pa.int64(),
        "image_embedding": VECTOR,
        "text_embedding": VECTOR,
    }
    columns = {name: pa.array([each[name] for each in rows], types.get(name, pa.string())) for name in rows[0]}
    columns["trace"] = pa.nulls(len(rows), TRACE)
    return pa.table(columns | {CARRIED + name: values for name, values in carried.items()})


def begin(files: StoreFiles, carryover: pa.Schema | None = None) -> tuple[Run, RunMetadata]:
    """Start or resume a run."""
    carryover = carryover or pa.schema([])
    run = start_run(files, INFO, carryover)
    return run, RunMetadata(run.run_id, run.session, MODEL, PREPROCESSING, carryover)


def publish_rows(files: StoreFiles, *rows: dict) -> Run:
    """Write and publish one whole run."""
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(*rows))
    publish([ModelWork(run, metadata)])
    return run


def rows_of(files: StoreFiles, name: str = "embeddings") -> list[dict]:
    """Rows that a plain Delta reader sees, by item and segment."""
    found = delta_rows(files.uri(name)).to_pylist()
    return sorted(found, key=lambda each: (each["item_id"], each.get("segment") or 0))
