"""Look-up of items by their ids. Pure: Arrow columns in, Arrow columns out.

A join would copy all columns of both sides: for a million items that is most of a run's memory. The offsets of large
strings have 64 bits, as all ids together may pass 2 GiB.
"""

from bisect import bisect_left, bisect_right

import pyarrow as pa
import pyarrow.compute as pc

LARGE = pa.large_string()


class SortedIds:
    """Ids of items, sorted, of which those that a part file may hold are found by its statistics."""

    def __init__(self, ids: pa.ChunkedArray) -> None:
        """Sort the ids."""
        whole = ids.combine_chunks()
        self._ids = whole.take(pc.array_sort_indices(whole))

    def between(self, bounds: tuple[str, str] | None) -> pa.Array:
        """Ids from the least to the greatest one, both included; all of them where no bounds are known."""
        if bounds is None:
            return self._ids
        places, (least, greatest) = range(len(self._ids)), bounds
        start = bisect_left(places, least, key=lambda place: self._ids[place].as_py())
        end = bisect_right(places, greatest, key=lambda place: self._ids[place].as_py())
        return self._ids.slice(start, max(0, end - start))


def positions(ids: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    """Row number of each id among others, which are unique; null where it is missing."""
    return pc.index_in(ids.cast(LARGE), value_set=among.cast(LARGE))


def take_or_null(column: pa.ChunkedArray, rows: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values of a column at the rows that `positions` returned; null where there is none."""
    if not pa.types.is_string(column.type):
        return column.take(rows)
    return column.cast(LARGE).take(rows).cast(pa.string())


def without_items(rows: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """Rows of all other items."""
    if not len(ids):
        return rows
    return rows.filter(pc.invert(pc.is_in(rows["item_id"].cast(LARGE), value_set=ids.cast(LARGE))))
