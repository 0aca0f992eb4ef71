"""Sources in object stores; `embedder.storage.object_stores` has their clients, credentials and errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.sources.errors import FetchError
from embedder.sources.local_listing import Entry
from embedder.sources.uris import looks_like_part
from embedder.storage.object_ranges import AHEAD_BYTES, ObjectRanges, object_version
from embedder.storage.object_stores import ObjectStoreError, bucket_store, named_errors, split_place
from embedder.store.schema import MARKS


def open_object(uri: str) -> ObjectRanges:
    """Open an object to be read by ranges.

    Raises:
        FetchError: there is no such object, or it may not be read.
    """
    store, key = _locate(uri)
    return ObjectRanges(store, key, partial(_named_errors, uri), ahead_bytes=AHEAD_BYTES)


def find_object(uri: str) -> Entry | None:
    """Look for an object of exactly this name; its entry is named by the last part of the key."""
    store, key = _locate(uri)
    if not key:
        return None
    try:
        with _named_errors(uri):
            meta = store.head(key)
    except FetchError as error:
        if error.error_type == "FileNotFound":
            return None
        raise
    return _entry(key.rpartition("/")[2], uri, meta["size"], object_version(meta["e_tag"], meta["last_modified"]))


def stream_names(uri: str) -> Iterator[str]:
    """Yield the names below a folder, relative to it, as the store sends them; a page of names a request."""
    store, key = _locate(uri)
    with _named_errors(uri):
        for page in store.list(key or None, chunk_size=1000):
            yield from (_relative(meta["path"], key) for meta in page)


def walk_objects(uri: str) -> Iterator[Entry]:
    """Yield every object below a folder, with objects of one stem side by side.

    The names are held in Arrow while they are sorted: about 150 bytes an object.

    Raises:
        FetchError: the bucket can't be listed.
    """
    store, key = _locate(uri)
    with _named_errors(uri):
        pages = [pa.record_batch(page) for page in store.list(key or None, chunk_size=10_000, return_arrow=True)]
    if not pages:
        return
    table = pa.Table.from_batches(pages).select(["path", "size", "e_tag", "last_modified"])
    table = _without_stores(table, key)
    stems = pc.replace_substring_regex(table["path"], r"\.[^./]*$", "")
    table = table.append_column("stem", stems).sort_by([("stem", "ascending"), ("path", "ascending")])
    folders = _folders(table["path"])
    for batch in table.to_batches(max_chunksize=10_000):
        yield from _entries(batch, key, uri, folders)


def _without_stores(table: pa.Table, key: str) -> pa.Table:
    """Leave out the stores of embeddings below a folder, of this run or of any other."""
    record, runs = MARKS
    paths = table["path"]
    for path in paths.filter(pc.ends_with(paths, f"/{record}")).to_pylist():
        store = path.removesuffix(f"/{record}")
        if store != key and pc.any(pc.starts_with(paths, f"{store}/{runs}/")).as_py():
            table = table.filter(pc.invert(pc.starts_with(table["path"], f"{store}/")))
    return table


def _entries(batch: pa.RecordBatch, key: str, uri: str, folders: set[str]) -> Iterator[Entry]:
    columns = (batch[name].to_pylist() for name in ("path", "size", "e_tag", "last_modified"))
    for path, size, etag, moment in zip(*columns, strict=True):
        if size == 0 and path in folders:
            continue  # the empty object by which consoles draw a folder
        name = _relative(path, key)
        yield _entry(name, f"{uri.rstrip('/')}/{name}", size, object_version(etag, moment))


def _entry(name: str, uri: str, size: int, version: str) -> Entry:
    if looks_like_part(uri):
        message = "the name ends like a reference into a tar or a table; rename the object"
        return Entry(name, size, version, "AmbiguousName", message)
    return Entry(name, size, version)


def _folders(paths: pa.ChunkedArray) -> set[str]:
    parents = pc.unique(pc.replace_substring_regex(paths, r"/?[^/]*$", "")).to_pylist()
    return set(chain.from_iterable(_with_ancestors(parent) for parent in parents))


def _with_ancestors(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _relative(path: str, key: str) -> str:
    return path[len(key) + 1 :] if key else path


def _locate(uri: str) -> tuple[Any, str]:
    with _named_errors(uri):
        root, key = split_place(uri)
        return bucket_store(root), key


@contextmanager
def _named_errors(uri: str) -> Iterator[None]:
    """Turn the errors of obstore into FetchErrors: missing and forbidden objects stay so, other trouble may pass."""
    try:
        with named_errors(uri):
            yield
    except ObjectStoreError as error:
        raise FetchError(error.kind, error.message, error.transient) from None
