"""Carried columns of a run, which bypass the model: rows have the number of their item, and write tasks join by it.

So a column of 10 kB a row is moved once, not between any two steps. On Ray the driver itself puts the columns into the
object store, in pieces. It owns them, so that a lost worker takes none along, and write tasks fetch the pieces that
they need. The local engine keeps the listing's own columns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.batch_schema import CARRIED, ITEM_NUMBER, SHOWN_URI

PIECE_BYTES = 4 << 20
"""Bytes of a piece: an object costs about a millisecond, and a write task fetches whole pieces."""

Fetch = Callable[[Sequence[Any]], Sequence[pa.Table]]


def as_they_are(pieces: Sequence[Any]) -> Sequence[pa.Table]:
    """Return pieces that are tables in this process."""
    return pieces


@dataclass(frozen=True)
class CarriedColumns:
    """Carried columns of all items of a run, in pieces.

    `starts` has the number of the first item of each piece, rising; `pieces` are tables, or references that `fetch`
    turns into tables; none if nothing is carried.
    """

    starts: tuple[int, ...] = ()
    pieces: tuple[Any, ...] = ()
    fetch: Fetch = as_they_are

    def join(self, rows: pa.Table) -> pa.Table:
        """Put the carried columns back on finished rows, by `ITEM_NUMBER`; several rows may be of one item."""
        if not self.pieces:
            return rows
        numbers = rows[ITEM_NUMBER].to_numpy()
        places = np.searchsorted(self.starts, numbers, side="right") - 1
        needed = np.unique(places)
        tables = list(self.fetch([self.pieces[place] for place in needed])) or [self._first().slice(0, 0)]
        begins = np.cumsum([0, *(table.num_rows for table in tables[:-1])])
        within = numbers - np.asarray(self.starts)[places] + begins[np.searchsorted(needed, places)]
        found = pa.concat_tables(tables).take(pa.array(within, pa.int64()))
        rows = rows.drop_columns([name for name in (ITEM_NUMBER, *found.column_names) if name in rows.column_names])
        for name in found.column_names:
            if name == SHOWN_URI:
                rows = rows.set_column(rows.schema.get_field_index("uri"), "uri", found[name])
            else:
                rows = rows.append_column(found.schema.field(name), found[name])
        return rows

    def _first(self) -> pa.Table:
        (first,) = self.fetch(self.pieces[:1])
        return first


NOTHING_CARRIED = CarriedColumns()


def detach_carried_columns(
    listing: Iterable[pa.Table],
    needed: Iterable[str] = (),
    *,
    keep: Callable[[pa.Table], Any] = lambda piece: piece,
    fetch: Fetch = as_they_are,
    piece_bytes: int | None = None,
) -> tuple[list[pa.Table], CarriedColumns]:
    """Take the carried columns out of a listing, and number its items; a listing that carries nothing stays as it is.

    Columns that decode tasks need, as for the user's steps, also stay in the listing, and end with it. `keep` turns a
    piece into a reference, `fetch` references into tables. Without `piece_bytes`, each table of the listing is one
    piece.
    """
    listing = list(listing)
    names = [name for name in (listing[0].column_names if listing else ()) if _goes_around(name)]
    if not names:
        return listing, NOTHING_CARRIED
    starts, pieces, light, num_items = list[int](), list[Any](), list[pa.Table](), 0
    stays = set(needed)
    for table in listing:
        numbers = pa.array(np.arange(num_items, num_items + table.num_rows))
        gone = [name for name in names if name not in stays]
        light.append(table.drop_columns(gone).append_column(ITEM_NUMBER, numbers))
        for start, piece in _pieces(table.select(names), piece_bytes):
            starts.append(num_items + start)
            pieces.append(keep(piece))
        num_items += table.num_rows
    return light, CarriedColumns(tuple(starts), tuple(pieces), fetch)


def _goes_around(name: str) -> bool:
    return name == SHOWN_URI or name.startswith(CARRIED)


def _pieces(columns: pa.Table, piece_bytes: int | None) -> Iterator[tuple[int, pa.Table]]:
    """Cut columns into pieces of about a size, each with the number of its first row."""
    size = columns.num_rows
    if piece_bytes is not None and columns.nbytes > piece_bytes:
        size = max(1, size * piece_bytes // columns.nbytes)
    for start in range(0, columns.num_rows, max(1, size)):
        yield start, columns.slice(start, size)
