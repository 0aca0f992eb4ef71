"""Looking items up by their ids. Pure: Arrow columns in, Arrow columns out.

A join would copy all columns of both sides: for a million items that is most of a night's memory. The offsets of large
strings have 64 bits, as all ids together may pass 2 GiB.
"""

import pyarrow as pa
import pyarrow.compute as pc

LARGE = pa.large_string()


def positions(ids: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    """At which row each id stands among others, which are unique; null where it does not."""
    return pc.index_in(ids.cast(LARGE), value_set=among.cast(LARGE))


def take_or_null(column: pa.ChunkedArray, place: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column at the rows that `positions` gave; null where it gave none."""
    if not pa.types.is_string(column.type):
        return column.take(place)
    return column.cast(LARGE).take(place).cast(pa.string())


def without_items(rows: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """The rows of all other items."""
    if not len(ids):
        return rows
    return rows.filter(pc.invert(pc.is_in(rows["item_id"].cast(LARGE), value_set=ids.cast(LARGE))))
