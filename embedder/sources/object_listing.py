"""Lists sources in object stores; clients, credentials and errors are in `embedder.storage.object_stores`."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.sources.local_listing import Entry
from embedder.sources.read_ahead import NUM_AHEAD, Begin, read_ahead
from embedder.sources.sorted_tables import SortedTables
from embedder.sources.source_errors import FetchError
from embedder.sources.unicode_forms import to_nfc
from embedder.sources.uris import looks_like_part
from embedder.storage.object_ranges import AHEAD_BYTES, ObjectRanges, object_version
from embedder.storage.object_stores import ObjectStoreError, bucket_store, named_errors, split_place
from embedder.storage.printable import printable
from embedder.storage.s3_listing import SCHEMA, list_folders, list_tables, odd_key_problem
from embedder.store.schema import MARKS

PAGE_NAMES = 1000  # listed by one request
CHUNK_NAMES = 10_000  # of one folder, gathered
MAX_FOLDERS = 8  # of a page, to list each separately: more than a hundred names each


def open_object(uri: str) -> ObjectRanges:
    """Open an object for reading by ranges; a FetchError if it is missing or forbidden."""
    store, _, key = _locate(uri)
    return ObjectRanges(store, key, partial(_named_errors, uri), ahead_bytes=AHEAD_BYTES)


def find_object(uri: str) -> Entry | None:
    """Look up an object of exactly this name; its entry's name is the last part of the key."""
    store, _, key = _locate(uri)
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
    """Yield the names below a folder, relative to it, as the store sends them: one page per request."""
    store, root, key = _locate(uri)
    with _named_errors(uri):
        for page in list_tables(store, root, key, PAGE_NAMES):
            yield from (_relative(path, key) for path in page["path"].to_pylist())


def walk_objects(uri: str) -> Iterator[Entry]:
    """Yield every object below a folder, with objects of one stem next to each other.

    Objects whose keys obstore can't name are rejects. Folders of many objects are listed in parallel. Up to 64 MiB of
    names are in memory; more are on disk, at about 100 bytes per object. Raises a FetchError if a bucket can't be
    listed.
    """
    store, root, key = _locate(uri)
    marks = _Marks(key)
    with _named_errors(uri):
        pages = (marks.note(_with_names(page)) for page in read_ahead(_folders_to_list(store, root, key)))
        names = SortedTables(pages, ("stem", "path"))
    marks.look(names)
    entries = (_entries(marks.without_stores(piece), key, uri, marks.folders) for piece in names.pieces())
    yield from _leave_out_repeated(chain.from_iterable(entries))


def _leave_out_repeated(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Leave out what was listed twice; of two keys that obstore reads as one (`a` and `a/`), the second is a reject."""
    name, versions = None, set[str]()
    for entry in entries:
        if entry.name != name:
            name, versions = entry.name, {entry.modified}
            yield entry
        elif entry.modified not in versions:
            versions.add(entry.modified)
            yield _odd_entry(f"{name}/", entry.size_bytes, entry.modified, "differs from another only by an outer /")


def _with_names(page: pa.Table) -> pa.Table:
    stems = pc.replace_substring_regex(page["path"], r"\.[^./]*$", "")
    stems = pc.replace_substring_regex(stems, r"(?:^|/)([^/]*)$", "\x01\\1")  # a folder's files follow each other
    return page.append_column("stem", to_nfc(stems))


def _folders_to_list(store: Any, root: str, key: str) -> Iterator[Begin[pa.Table]]:
    """Find folders worth listing in parallel; each is listed by pages, one request after the other.

    A folder is split if its first page shows few folders, none of them small, and few objects next to them; its parts
    are split further by the same rule.
    """
    pages = list_tables(store, root, key, PAGE_NAMES)
    first = next(pages, None)
    if first is None:
        return
    found = list_folders(store, key) if _is_worth_parts(first["path"].to_pylist(), key) else None
    if found is None:
        yield partial(_chain_tables, first, pages)
        return
    objects, folders = found
    yield partial(_chain_tables, objects, ())
    for folder in folders:
        if len(folders) < NUM_AHEAD:
            yield from _folders_to_list(store, root, folder)
        else:
            yield partial(list_tables, store, root, folder, CHUNK_NAMES)


def _is_worth_parts(names: Sequence[str], key: str) -> bool:
    """Return whether a page's folders are worth a request each, and only few names are next to them."""
    inside = [_relative(name, key).partition("/") for name in names]
    folders = Counter(folder for folder, slash, _ in inside if slash)
    return len(names) >= PAGE_NAMES and 2 * folders.total() > len(names) and len(folders) <= MAX_FOLDERS


def _chain_tables(first: pa.Table, others: Iterable[pa.Table]) -> Generator[pa.Table]:
    yield first
    yield from others


class _Marks:
    """Names that decide which other names are left out: records of stores, and empty objects.

    `folders` are those that also have an empty object, by which consoles show a folder.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self.folders: set[str] = set()
        self._records: list[str] = []
        self._stores: list[str] = []

    def note(self, page: pa.Table) -> pa.Table:
        """Record the marks of a page, and return it."""
        record, _ = MARKS
        paths = page["path"]
        self.folders.update(paths.filter(pc.equal(page["size"], 0)).to_pylist())
        self._records += paths.filter(pc.ends_with(paths, f"/{record}")).to_pylist()
        return page

    def look(self, names: SortedTables) -> None:
        """Decide which marks matter, once all names are known."""
        record, runs = MARKS
        stores = {f"{store}/{runs}": store for path in self._records if (store := path.removesuffix(f"/{record}"))}
        wanted = {*self.folders, *stores}
        found = set[str]()
        if wanted:
            for piece in names.pieces():
                found |= wanted & _folders(piece["path"])
        self.folders &= found
        self._stores = [store for folder, store in stores.items() if folder in found and store != self._key]

    def without_stores(self, names: pa.Table) -> pa.Table:
        """Leave out stores of embeddings below the folder, of this run or any other."""
        for store in self._stores:
            names = names.filter(pc.invert(pc.starts_with(names["path"], f"{store}/")))
        return names


def _entries(names: pa.Table, key: str, uri: str, folders: set[str]) -> Iterator[Entry]:
    for path, size, etag, moment in zip(*(names[name].to_pylist() for name in SCHEMA.names), strict=True):
        if size == 0 and path in folders:
            continue  # the empty object by which consoles show a folder
        name = _relative(path, key)
        yield _entry(name, f"{uri.rstrip('/')}/{name}", size, object_version(etag, moment))


def _entry(name: str, uri: str, size: int, version: str) -> Entry:
    if looks_like_part(uri):
        message = "the name ends like a reference into a tar or a table; rename the object"
        return Entry(name, size, version, "AmbiguousName", message)
    problem = odd_key_problem(uri.split("/", 3)[-1])
    return _odd_entry(name, size, version, problem) if problem else Entry(name, size, version)


def _odd_entry(name: str, size: int | None, version: str, problem: str) -> Entry:
    return Entry(name, size, version, "OddKey", f"the key '{printable(name)}' {problem}; rename the object")


def _folders(paths: pa.ChunkedArray) -> set[str]:
    parents = pc.unique(pc.replace_substring_regex(paths, r"/?[^/]*$", "")).to_pylist()
    return set(chain.from_iterable(_with_ancestors(parent) for parent in parents))


def _with_ancestors(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _relative(path: str, key: str) -> str:
    return path[len(key) + 1 :] if key else path


def _locate(uri: str) -> tuple[Any, str, str]:
    with _named_errors(uri):
        root, key = split_place(uri)
        return bucket_store(root), root, key


@contextmanager
def _named_errors(uri: str) -> Iterator[None]:
    """Convert obstore's errors into FetchErrors: missing and forbidden are permanent, other errors may pass."""
    try:
        with named_errors(uri):
            yield
    except ObjectStoreError as error:
        raise FetchError(error.kind, error.message, error.transient) from None
