"""Rows of stores, published as a run does, though no model computed them, and read as other programs do."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from embedder.batch_schema import DECODED, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.layout import StoreInfo, read_current
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import NO_IDS, IndexBuilder, PublishIntent, no_index, publish
from embedder.store.schema import TABLES
from embedder.store.store_info import bind_store
from embedder.store.tables.tables import RecordTable

LISTED = ("item_id", "source", "uri", "size_bytes", "modified", "caption")


def publish_rows(
    files: StoreFiles, info: StoreInfo, parts: Iterable[pa.Table], build_index: IndexBuilder = no_index,
    retired: pa.ChunkedArray = NO_IDS, **intent: Any,
) -> None:  # fmt: skip
    """Publish rows as one run of an embedder; the intent's fields are those of `PublishIntent`."""
    bind_store(files, info)
    run = start_run(files, info, pa.schema([]))
    fingerprints = info.model_fingerprint, info.preprocess_fingerprint
    metadata = RunMetadata(run.run_id, run.session, *fingerprints, pa.schema([]))
    for task, rows in enumerate(parts):
        write_part(files, metadata, task, rows)
    publish([ModelWork(run, metadata, PublishIntent(kind="refresh", info=info, **intent), retired)], build_index)


def listed_items(names: list[str], folder: str, captions: list[str | None], modified: str = "1") -> pa.Table:
    own = {"item_id": names, "uri": [f"{folder}{name}" for name in names], "caption": pa.array(captions, pa.string())}
    same = {"source": "", "modified": modified, "size_bytes": 1}
    return pa.table(own | {column: [value] * len(names) for column, value in same.items()})


def as_embedded(listed: pa.Table, images: pa.Array, content_version: str) -> pa.Table:
    """Listed items as the last stage hands them to the writer."""
    made = {"segment": 0, "modality": "image", "content_version": content_version, "num_vectors": 1, "attempts": 1}
    types = {**{field.name: field.type for field in DECODED}, "attempts": pa.int32()}
    nulls = pa.nulls(listed.num_rows, VECTOR)
    rows = {name: listed[name] for name in LISTED}
    rows |= {name: pa.repeat(pa.scalar(made.get(name), kind), listed.num_rows) for name, kind in types.items()}
    return pa.table(rows | {"image_embedding": images, "text_embedding": nulls})


def versions_of(files: StoreFiles) -> pa.Table:
    """Version of each item, in the order of ids; both tables hold the same, and each once."""
    columns, current = ["item_id", "content_version"], read_current(files)
    tables = [RecordTable(files, name, getattr(current, name)).read(columns).sort_by("item_id") for name in TABLES]
    if not tables[0].equals(tables[1]) or pc.count_distinct(tables[0]["item_id"]).as_py() != len(tables[0]):
        raise ValueError(f"{files.address}: the tables differ, or hold an item twice")
    return tables[0]


def delta_rows(folder: str | Path, version: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """Rows of a table on a disk; of its files, the log's sizes count.

    deltalake's own file system is a Python object: threads of Arrow that still let go of its buffers while the
    interpreter ends abort the process. Arrow's local one is none.
    """
    table = DeltaTable(folder, version=version)
    if "deletionVectors" in (table.protocol().reader_features or ()):  # which that way refuses
        names = ", ".join(f'"{name}"' for name in columns) if columns is not None else "*"
        rows = pa.table(QueryBuilder().register("rows", table).execute(f"select {names} from rows").read_all())
        text = {pa.string_view(): pa.string()}
        return rows.cast(pa.schema([field.with_type(text.get(field.type, field.type)) for field in rows.schema]))
    files = SubTreeFileSystem(str(folder), LocalFileSystem())
    return table.to_pyarrow_table(columns=columns, filesystem=files)
