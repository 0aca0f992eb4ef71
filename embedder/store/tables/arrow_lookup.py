"""Look-up of items by their ids. Pure: Arrow columns in, Arrow columns out.

A join would copy all columns of both sides: for a million items that is most of a run's memory. The offsets of large
strings have 64 bits, as all ids together may pass 2 GiB.
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
FEW_IDS = 10_000  # of which a set is made within a millisecond


class KnownIds:
    """Ids of items that are looked for in one part file after the other; safe for several threads.

    What a part file costs depends on its own rows, however many ids are looked for.
    """

    def __init__(self, ids: pa.ChunkedArray) -> None:
        """Sort the ids."""
        self.ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        self._sorted = self.ids.take(pc.array_sort_indices(self.ids))

    def any_between(self, bounds: tuple[str, str] | None) -> bool:
        """Whether there is an id from the least to the greatest one, both included, of a part file's statistics.

        Args:
            bounds: both of them; none: not known, so that any id may be there.
        """
        if bounds is None:
            return len(self._sorted) > 0
        least, greatest = bounds
        place = bisect_left(range(len(self._sorted)), least, key=lambda place: self._sorted[place].as_py())
        return place < len(self._sorted) and self._sorted[place].as_py() <= greatest

    def find_among(self, ids: pa.ChunkedArray) -> pa.Array:
        """Find which of them are among other ids, as of the rows of a part file: their row numbers, ascending."""
        candidates = None
        if len(self.ids) > max(FEW_IDS, len(ids)):  # else a set of them all, for each part file, is most of the work
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
        """Whether each of other ids, as of the rows of a part file, is among them."""
        return pc.is_in(ids, value_set=self.ids.take(self.find_among(ids)))

    @locked_cached_property
    def _hashes(self) -> "tuple[np.ndarray[Any, np.dtype[np.uint64]], np.ndarray[Any, np.dtype[np.int64]]]":
        """Hashes of the ids in ascending order, and the row of each."""
        hashes = hashes_of(pa.chunked_array([self.ids]))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order


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
