"""Listing of a run: all items of all sources, each id once, in parts that are compared with the store's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import pyarrow as pa

from embedder.sources.listing import with_unique_ids
from embedder.storage.hashed_rows import HashedRows
from embedder.store.files import StoreFiles
from embedder.store.publish.tombstones import PurgedIds, read_purged, without_purged


@dataclass(frozen=True)
class ListedItems:
    """Listed items, in memory or on disk.

    `rows` is all that was listed, in which ids may repeat; `purged` the items that are left out.
    """

    rows: HashedRows
    purged: PurgedIds | None = None

    @property
    def schema(self) -> pa.Schema:
        """Columns of the listing."""
        return self.rows.schema

    @property
    def num_rows(self) -> int:
        """Number of items, including purged ones."""
        return self.rows.num_rows

    @property
    def num_parts(self) -> int:
        """Number of parts that they are in."""
        return self.rows.num_parts

    def part(self, number: int, num_parts: int) -> pa.Table:
        """Read the items of a part (`embedder.storage.hashed_rows.read_parts`).

        Of several with the same id the first is the item; the others are rejects.
        """
        items = with_unique_ids(self.rows.part(number, num_parts))
        return items if self.purged is None else without_purged(items, self.purged)

    def tables(self) -> Iterator[pa.Table]:
        """Yield all items, part by part."""
        return (self.part(number, self.num_parts) for number in range(self.num_parts))

    def without_purged(self, files: StoreFiles) -> "ListedItems":
        """Leave out the items that were purged from a store."""
        known = read_purged(files)
        return replace(self, purged=known) if known.hashes else self


def listed_items(tables: Iterable[pa.Table], schema: pa.Schema) -> ListedItems:
    """Collect the tables of a listing by `embedder.sources.listing.list_sources`; `schema` is for an empty one."""
    tables = iter(tables)
    first = next(tables, None)
    if first is None:
        return ListedItems(HashedRows((), schema))
    return ListedItems(HashedRows(chain([first], tables), first.schema))
