"""From the embeddings table to a numbered index version, and which version is published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.retrieval.index_store import add_version, has_version
from embedder.steps.tensors import unpack_vectors
from embedder.store.binding import check_writable, published, read_store_info, served_info
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.lock import write_lock
from embedder.store.swap import swap_index
from embedder.store.tables import RecordTable
from index.build import build_index
from index.manifest import Manifest

Floats = np.ndarray[Any, np.dtype[np.float32]]

MAX_RECALL_QUERIES = 4000


def build_store_index(files: StoreFiles, *, kind: str = "auto") -> tuple[int, Manifest]:
    """Build an index of the published embeddings and publish it; returns its number and manifest.

    Raises:
        StoreError: nothing is published yet, or there is no picture among it.
    """
    with write_lock(files):
        current = published(files)
        info = read_store_info(files)
        check_writable(files, info)
        fingerprint = served_info(info, current).model_fingerprint
        built = _build(files, current.embeddings, fingerprint, kind)
        if built is None:
            raise StoreError(f"store {files.address}: no picture or video is in it; an index needs at least one")
        number, manifest = built
        swap_index(files, number)
    return number, manifest


def keep_index(
    files: StoreFiles, embeddings_version: int, model_fingerprint: str | None, say: Callable[[str], None]
) -> int | None:
    """Number of the index that goes with an embeddings version about to be published.

    A store that has an index keeps one: it is built anew where the table has changed. Before the first
    `embedder index build`, and where no picture is left, there is none, and search compares with every vector.

    Args:
        files: the store.
        embeddings_version: what is about to be published.
        model_fingerprint: whose vectors those are; by default those that are served now.
        say: is told when an index is built.
    """
    current = read_current(files)
    if current is None or current.index is None:
        return None
    if current.embeddings == embeddings_version:
        return current.index
    say("building the index of the new version")
    fingerprint = model_fingerprint or served_info(read_store_info(files), current).model_fingerprint
    built = _build(files, embeddings_version, fingerprint, "auto")
    return built[0] if built is not None else None


def kept_or_built(files: StoreFiles, say: Callable[[str], None]) -> Callable[[Current], int | None]:
    """How a publication that has been before gets its index: the one it had, where that is there, else as any other."""

    def choose(candidate: Current) -> int | None:
        if candidate.index is not None and has_version(files, candidate.index):
            return candidate.index
        return keep_index(files, candidate.embeddings, candidate.model_fingerprint, say)

    return choose


def _build(
    files: StoreFiles, embeddings_version: int, model_fingerprint: str, kind: str
) -> tuple[int, Manifest] | None:
    """Build an index of a version; none where no picture is in it."""
    table = RecordTable(files, "embeddings", embeddings_version)
    # File by file, so that the vectors of no more than one stand in memory.
    keys = [_pictures_of(table, path).drop_columns("image_embedding") for path in table.paths()]
    ids = pa.concat_tables(keys) if keys else pa.table({"item_id": [], "segment": []})
    if ids.num_rows == 0:
        return None

    def build(folder: Path) -> Manifest:
        return build_index(
            (unpack_vectors(_pictures_of(table, path)["image_embedding"]) for path in table.paths()),
            ids,
            folder,
            kind=kind,
            model_fingerprint=model_fingerprint,
            embeddings_version=embeddings_version,
            queries=_caption_vectors(table),
        )

    return add_version(files, build)


def _pictures_of(table: RecordTable, path: str) -> pa.Table:
    return pictures(table.read(["item_id", "segment", "run_id", "image_embedding"], [path]))


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
