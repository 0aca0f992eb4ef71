"""Sources in object stores; their clients, credentials and errors are those of `shards.object_stores`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.sources.errors import FetchError
from embedder.sources.local_listing import Entry
from embedder.sources.uris import looks_like_part
from embedder.store.schema import MARKS
from shards.object_stores import ObjectStoreError, bucket_store, named_errors, split_place

# One request reads this much ahead: a tar of small members is then streamed, one of large members is skipped through.
BLOCK_BYTES = 4 << 20


class ObjectRanges:
    """One object, read by ranges of one version: a replaced object is an error, not a mixture."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._store, self._key = _locate(uri)
        with _named_errors(uri):
            meta = self._store.head(self._key)
        self.size: int = meta["size"]
        self.version = _version(meta["e_tag"], meta["last_modified"])
        self._etag: str | None = meta["e_tag"]
        self._block_start = 0
        self._block = b""

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only where the object ends."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if not self._block_start <= offset <= stop <= self._block_start + len(self._block):
            if stop - offset >= BLOCK_BYTES:
                return b"".join(
                    self._get(start, min(start + BLOCK_BYTES, stop)) for start in range(offset, stop, BLOCK_BYTES)
                )
            self._block = self._get(offset, min(offset + BLOCK_BYTES, self.size))
            self._block_start = offset
        return self._block[offset - self._block_start : stop - self._block_start]

    def _get(self, start: int, stop: int) -> bytes:
        options: dict[str, Any] = {"range": (start, stop)}
        if self._etag:
            options["if_match"] = self._etag
        with _named_errors(self._uri):
            data = bytes(self._store.get(self._key, options=options).bytes())
        if len(data) != stop - start:
            raise FetchError("Truncated", f"{self._uri}: {len(data)} bytes came of {stop - start}", transient=True)
        return data

    def close(self) -> None:
        """Forget the block; connections belong to the bucket's client."""
        self._block = b""


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
    return _entry(key.rpartition("/")[2], uri, meta["size"], _version(meta["e_tag"], meta["last_modified"]))


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
        yield _entry(name, f"{uri.rstrip('/')}/{name}", size, _version(etag, moment))


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


def _version(etag: str | None, moment: Any) -> str:
    return etag.strip('"') if etag else str(moment.isoformat())


def _locate(uri: str) -> tuple[Any, str]:
    with _named_errors(uri):
        root, key = split_place(uri)
        return bucket_store(root), key


@contextmanager
def _named_errors(uri: str) -> Iterator[None]:
    """Turn what obstore raises into a FetchError: what is missing or forbidden stays so, the rest may pass."""
    try:
        with named_errors(uri):
            yield
    except ObjectStoreError as error:
        raise FetchError(error.kind, error.message, error.transient) from None
