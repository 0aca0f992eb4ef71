"""From the embeddings table to a numbered index version, and which version is published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.steps.tensors import unpack_vectors
from embedder.store.binding import published, read_store_info
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, read_current, utc_now, write_record
from embedder.store.lock import write_lock
from embedder.store.tables import RecordTable
from index.build import build_index
from index.choose import KindWish
from index.manifest import Manifest
from index.versions import next_version, version_path

Floats = np.ndarray[Any, np.dtype[np.float32]]

MAX_RECALL_QUERIES = 1000
INDEX_FOLDER = "index"


def index_root(files: StoreFiles) -> Path:
    """Folder of the numbered versions."""
    return files.root / INDEX_FOLDER


def build_store_index(files: StoreFiles, *, kind: KindWish = "auto") -> tuple[int, Manifest]:
    """Build an index of the published embeddings and publish it; returns its number and manifest.

    Raises:
        StoreError: nothing is published yet, or there is no picture among it.
    """
    with write_lock(files):
        current = published(files)
        number, manifest = _build(files, current.embeddings, kind)
        update = current.model_copy(update={"index": number, "published_at": utc_now()})
        write_record(files, CURRENT_FILE, update)
    return number, manifest


def keep_index(files: StoreFiles, embeddings_version: int, say: Callable[[str], None]) -> int | None:
    """Number of the index that goes with an embeddings version about to be published.

    A store that has an index keeps one: it is built anew where the table has changed. Before the first
    `embedder index build` there is none, and search compares with every vector.
    """
    current = read_current(files)
    if current is None or current.index is None:
        return None
    if current.embeddings == embeddings_version:
        return current.index
    say("building the index of the new version")
    return _build(files, embeddings_version, "auto")[0]


def _build(files: StoreFiles, embeddings_version: int, kind: KindWish) -> tuple[int, Manifest]:
    table = RecordTable(files, "embeddings", embeddings_version)
    # File by file, so that the vectors of no more than one stand in memory.
    keys = [_pictures_of(table, path).select(["item_id", "segment"]) for path in table.paths()]
    ids = pa.concat_tables(keys) if keys else pa.table({"item_id": [], "segment": []})
    if ids.num_rows == 0:
        raise StoreError(f"store {files.root}: no picture or video is in it; an index needs at least one")
    number = next_version(index_root(files))
    manifest = build_index(
        (unpack_vectors(_pictures_of(table, path)["image_embedding"]) for path in table.paths()),
        ids,
        version_path(index_root(files), number),
        kind=kind,
        model_fingerprint=read_store_info(files).model_fingerprint,
        embeddings_version=embeddings_version,
        queries=_caption_vectors(table),
    )
    return number, manifest


def _pictures_of(table: RecordTable, path: str) -> pa.Table:
    return pictures(table.read(["item_id", "segment", "image_embedding"], [path]))


def pictures(rows: pa.Table) -> pa.Table:
    """Rows that have a picture's or a video segment's vector."""
    return rows.filter(pc.is_valid(rows["image_embedding"]))


def _caption_vectors(table: RecordTable) -> Floats | None:
    """Captions' vectors, on which recall is measured, as many from each part file; None where there are none."""
    paths = table.paths()
    share = -(-MAX_RECALL_QUERIES // max(1, len(paths)))
    columns = (table.read(["text_embedding"], [path])["text_embedding"].drop_null() for path in paths)
    vectors = [unpack_vectors(column.slice(0, share)) for column in columns if len(column)]
    return np.concatenate(vectors)[:MAX_RECALL_QUERIES] if vectors else None
