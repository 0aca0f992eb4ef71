"""Published items that may have the content of items to embed, under another id: moved, renamed or copied ones.

Candidates have the size of the item; those with its time or ETag, or its name, are likely. Reading the item shows
whether a content is equal (`embedder.steps.decode`): then it gets that candidate's vectors, and no model computes
(`embedder.ingest.takeover`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.diff import CONTENT_CHANGED, NEW
from embedder.sources.listing_schema import without_change_times
from embedder.storage.hashed_rows import hashes_of
from embedder.store.files import StoreFiles
from embedder.store.layout import Current
from embedder.store.schema import ITEMS, with_nulls
from embedder.store.tables.tables import RecordTable
from index.vectors import Rows, distinct

Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]

PUBLISHED = ("item_id", "size_bytes", "modified", "state", "num_vectors", "content_version")
COPIES = pa.schema(
    {
        "item_id": pa.string(),  # to embed
        "copy_of": pa.string(),  # published item that may have its content
        "content_version": pa.string(),  # of the published item; each once for an item to embed
        "is_likely": pa.bool_(),  # more than their sizes agree
    }
)
MAX_OF_SIZE, MAX_VERSIONS = 32, 2_000_000
"""Most candidates with nothing but the size in common: for one item, and for all together (about 64 MiB)."""


@dataclass(frozen=True)
class Copies:
    """Items to embed with published items of whose content they may be copies, as `COPIES`."""

    table: pa.Table

    def moved_ids(self, retired: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the ids of `retired` items that are probably listed under another id, at most one for each."""
        return retired.filter(pc.is_in(retired, value_set=self._likely["copy_of"].unique()))

    def count_likely(self, retired: pa.ChunkedArray) -> tuple[int, int]:
        """Return the numbers of items that were probably moved, whose originals are `retired`, and copied."""
        num_moved = len(self.moved_ids(retired))
        return num_moved, pc.count_distinct(self._likely["item_id"]).as_py() - num_moved

    @property
    def likely_ids(self) -> pa.ChunkedArray:
        """Items to embed that probably have the content of a published one."""
        return self._likely["item_id"]

    @property
    def _likely(self) -> pa.Table:
        """The likeliest original of each item."""
        return first_of_each(self.table.filter(self.table["is_likely"]), ["item_id"])


def find_copies(files: StoreFiles, current: Current | None, to_embed: pa.Table) -> Copies:
    """Look for new and changed items in the published ones, by what is listed; no file of a source is read."""
    is_meant = pc.is_in(to_embed["reason"], pa.array([NEW, CONTENT_CHANGED]))
    wanted = to_embed.filter(pc.and_(is_meant, pc.is_valid(to_embed["size_bytes"])))
    if current is None or not wanted.num_rows:
        return Copies(COPIES.empty_table())
    keys = _keys(wanted)
    at_most = max(1, min(MAX_OF_SIZE, MAX_VERSIONS // wanted.num_rows))
    found = [_Candidates(each, most) for each, most in zip(keys, (1, 1, at_most), strict=True)]
    for items in _embedded_items(files, current, pc.unique(wanted["size_bytes"])):
        for candidates, each in zip(found, _keys(items), strict=True):
            candidates.add(items, each)
    pairs = [candidates.pairs(wanted, each) for candidates, each in zip(found, keys, strict=True)]
    likely = pa.repeat(pa.scalar(True), sum(each.num_rows for each in pairs[:2]))
    is_likely = pa.chunked_array([likely, pa.repeat(pa.scalar(False), pairs[2].num_rows)])
    table = pa.concat_tables(pairs).append_column("is_likely", is_likely)
    table = table.filter(pc.not_equal(table["item_id"], table["copy_of"]))
    return Copies(first_of_each(table, ["item_id", "content_version"]))


def first_of_each(table: pa.Table, names: list[str]) -> pa.Table:
    """Return the first row of all that have the same values in some columns, in the order of the table."""
    numbered = table.select(names).append_column("number", pa.array(np.arange(table.num_rows)))
    first = numbered.group_by(names).aggregate([("number", "min")])["number_min"]
    return table.take(first.take(pc.sort_indices(first)))


def _embedded_items(files: StoreFiles, current: Current, sizes: pa.Array) -> Iterator[pa.Table]:
    """Read the published items that have vectors and one of some sizes."""
    own = ITEMS.empty_table().select(PUBLISHED).schema
    for piece in RecordTable(files, "items", current.items).pieces(list(PUBLISHED)):
        items = with_nulls(piece, own).select(PUBLISHED)
        has_rows = pc.and_(pc.equal(items["state"], "embedded"), pc.greater(pc.fill_null(items["num_vectors"], 0), 0))
        yield items.filter(pc.and_(has_rows, pc.is_in(items["size_bytes"], sizes)))


def _keys(items: pa.Table) -> tuple[Hashes, Hashes, Hashes]:
    """Return hashes of each item's size with its time or ETag, with its name, and by itself; each uint64 (items,)."""
    sizes = items["size_bytes"].cast(pa.string())
    versions = pc.coalesce(without_change_times(items["modified"]), items["item_id"])  # nobody shares an unknown one
    names = pc.replace_substring_regex(items["item_id"], r"(?s)^.*[/:]", "")
    with_version, with_name = (hashes_of(pc.binary_join_element_wise(sizes, each, "/")) for each in (versions, names))
    return with_version, with_name, hashes_of(sizes)


class _Candidates:
    """The first published items with each of some keys."""

    def __init__(self, keys: Hashes, at_most: int) -> None:
        """Keep at most so many items a key; `keys` are those of the items to embed, uint64 (N,)."""
        self._keys, self._at_most = distinct(keys), at_most
        self._counts = np.zeros(len(self._keys), np.int64)
        self._places: list[Rows] = [np.empty(0, np.int64)]
        self._items = [COPIES.empty_table().select(["copy_of", "content_version"])]

    def add(self, items: pa.Table, keys: Hashes) -> None:
        """Add published items; those with other keys, and those that are too many, are left out."""
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        rows = np.flatnonzero((self._keys[places] == keys) & (self._counts[places] < self._at_most))
        rows = rows[np.argsort(places[rows], kind="stable")]
        places = places[rows]
        ranks = np.arange(len(rows)) - np.searchsorted(places, places)
        is_kept = self._counts[places] + ranks < self._at_most
        rows, places = rows[is_kept], places[is_kept]
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._places.append(places)
        kept = items.select(["item_id", "content_version"]).take(pa.array(rows))
        self._items.append(kept.rename_columns(["copy_of", "content_version"]))

    def pairs(self, wanted: pa.Table, keys: Hashes) -> pa.Table:
        """Return each item to embed with each item of its key: `COPIES` but the last column."""
        places = np.concatenate(self._places)
        order = np.argsort(places, kind="stable")
        own = np.searchsorted(self._keys, keys)
        counts = self._counts[own]
        ends = np.cumsum(counts)
        starts = np.searchsorted(places[order], own)
        candidates = order[np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)]
        ids = wanted["item_id"].take(pa.array(np.repeat(np.arange(len(own)), counts)))
        return pa.concat_tables(self._items).take(pa.array(candidates)).add_column(0, "item_id", ids)
