"""Look-up of items by id in Arrow columns.

A join would copy all columns of both sides: for a million items that is most of a run's memory. Large strings have
64-bit offsets, since all ids together may exceed 2 GiB.
"""

from bisect import bisect_left
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.storage.hashed_rows import hashes_of
from index.vectors import distinct

LARGE = pa.large_string()
FEW_IDS = 10_000  # a set of these is made within a millisecond


class KnownIds:
    """Ids to find in one part file after another, each at the cost of only its rows; thread-safe."""

    def __init__(self, ids: pa.ChunkedArray) -> None:
        self.ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        self._sorted = self.ids.take(pc.array_sort_indices(self.ids))

    def any_between(self, bounds: tuple[str, str] | None) -> bool:
        """Return whether an id is within a part file's bounds, inclusive; unknown bounds (None) mean yes."""
        if bounds is None:
            return len(self._sorted) > 0
        least, greatest = bounds
        place = bisect_left(range(len(self._sorted)), least, key=lambda place: self._sorted[place].as_py())
        return place < len(self._sorted) and self._sorted[place].as_py() <= greatest

    def find_among(self, ids: pa.ChunkedArray) -> pa.Array:
        """Return the ascending row numbers in `ids`, for example of a part file, that are among these."""
        candidates = None
        if len(self.ids) > max(FEW_IDS, len(ids)):  # else building a set for each file dominates
            hashes, rows = self._hashes
            wanted = distinct(hashes_of(ids))
            starts, ends = (np.searchsorted(hashes, wanted, side) for side in ("left", "right"))
            lengths = ends - starts
            candidates = np.sort(rows[np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())])
        chosen = self.ids if candidates is None else self.ids.take(pa.array(candidates))
        here = ids.filter(pc.is_in(ids, value_set=chosen))
        found = pc.indices_nonzero(pc.is_in(chosen, value_set=here))
        return found if candidates is None else pa.array(candidates).take(found)

    def are_listed(self, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return for each of `ids`, for example of a part file, whether it is among these."""
        return pc.is_in(ids, value_set=self.ids.take(self.find_among(ids)))

    @locked_cached_property
    def _hashes(self) -> "tuple[np.ndarray[Any, np.dtype[np.uint64]], np.ndarray[Any, np.dtype[np.int64]]]":
        hashes = hashes_of(pa.chunked_array([self.ids]))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order


def positions(ids: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the row number of each id in `among`, whose ids are unique; null if it is missing."""
    return pc.index_in(ids.cast(LARGE), value_set=among.cast(LARGE))


def take_or_null(column: pa.ChunkedArray, rows: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column's values at the rows that `positions` returned; null for a null row."""
    if not pa.types.is_string(column.type):
        return column.take(rows)
    return column.cast(LARGE).take(rows).cast(pa.string())


def replace_column(rows: pa.Table, name: str, column: pa.ChunkedArray | pa.Array) -> pa.Table:
    """Return the rows with a column in place of the one of that name, of the same field."""
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, rows.schema.field(index), column)


def without_items(rows: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """Return the rows of all other items."""
    if not len(ids):
        return rows
    return rows.filter(pc.invert(pc.is_in(rows["item_id"].cast(LARGE), value_set=ids.cast(LARGE))))


def without_ids(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the ids that are not among others."""
    return without_items(pa.table({"item_id": ids}), others)["item_id"]
