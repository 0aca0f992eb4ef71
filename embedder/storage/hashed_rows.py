"""Rows of items in parts by the hash of their ids, on disk if there are many; rows that belong together share a part.

A listing and a table of 20 million items are compared part by part, in the memory of one part. Few rows stay in memory
as one part. More go to an unnamed temporary file, which disappears with the process: runs of `RUN_BYTES`, each sorted
by part, so that a part is read as one piece of each run. Rows of a part keep their order, and their numbers restore the
order of the whole for rows chosen from all parts.
"""

import atexit
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.spill_file import SpillFile

if TYPE_CHECKING:
    import duckdb

NUM_PARTS = 256
MEMORY_BYTES = 128 << 20
"""Bytes of rows that stay in memory: about half a million names."""
RUN_BYTES = 32 << 20  # each piece, of one part, is read and decompressed separately: some hundred rows
ORDER_ROWS = 65_536  # sorted at once
NUMBER = "row_number"
"""Column with a row's number among all rows, if they are in several parts."""
DUPLICATE = "#duplicate-"
"""Start of the suffix of an id that was listed before; it is in the same part as the first one."""


Number = TypeVar("Number", bound=np.unsignedinteger)


class InParts(Protocol):
    """Rows in one part or several."""

    @property
    def num_parts(self) -> int:
        """Number of parts."""

    def part(self, number: int, num_parts: int) -> pa.Table:
        """Read a part's rows; `num_parts` is one, or `NUM_PARTS`."""


class HashedRows:
    """Rows with an `item_id`, in one part or in `NUM_PARTS`."""

    def __init__(self, tables: Iterable[pa.Table], schema: pa.Schema, *, memory_bytes: int | None = None) -> None:
        """Take all rows in their order; up to `memory_bytes` (default `MEMORY_BYTES`) stay in memory."""
        limit = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self.schema, self.num_rows = schema, 0
        self._kept: list[pa.Table] = []
        self._split: list[pa.Table] = []
        self._file: SpillFile | None = None
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(NUM_PARTS)]
        size_bytes = 0
        for table in tables:
            self._kept.append(table)
            self.num_rows += table.num_rows
            size_bytes += table.nbytes
            if size_bytes > (limit if self._file is None else RUN_BYTES):
                self._spill()
                size_bytes = 0
        if self.num_parts > 1:
            self._spill()

    @property
    def num_parts(self) -> int:
        """Number of parts: one if the rows are in memory; other rows may require a split into more."""
        return 1 if self._file is None else NUM_PARTS

    def tables(self) -> Iterator[pa.Table]:
        """Yield all rows, part by part."""
        return (self.part(number, self.num_parts) for number in range(self.num_parts))

    def part(self, number: int, num_parts: int) -> pa.Table:
        """Read a part's rows in order; if there are several parts, with their numbers as column `NUMBER`.

        `num_parts` is one if all rows that are compared are in memory, else `NUM_PARTS`.
        """
        if num_parts == 1:
            return self._in_memory()
        if self._file is not None:
            pieces = [self._file.read(*place) for place in self._places[number]]
            return pa.concat_tables([self._numbered_schema.empty_table(), *pieces])
        if not self._split:
            rows = _number_rows(self._in_memory(), 0)
            self._split = list(_by_part(rows))
        return self._split[number]

    @property
    def _numbered_schema(self) -> pa.Schema:
        return self.schema.append(pa.field(NUMBER, pa.int64()))

    def _in_memory(self) -> pa.Table:
        if len(self._kept) != 1:
            self._kept = [pa.concat_tables([self.schema.empty_table(), *self._kept])]
        return self._kept[0]

    def _spill(self) -> None:
        if self._file is None:
            self._file = SpillFile("lz4")
        rows, self._kept = self._kept, []
        number = self.num_rows - sum(table.num_rows for table in rows)
        for run in _runs(rows):
            for part, piece in enumerate(_by_part(_number_rows(run, number))):
                if piece.num_rows:
                    self._places[part].append(self._file.append([piece], self._numbered_schema))
            number += run.num_rows


def read_parts(*rows: InParts) -> Iterator[tuple[pa.Table, ...]]:
    """Yield the parts of several collections together, in which rows of the same ids are: one if all are in memory."""
    num_parts = max(each.num_parts for each in rows)
    return (tuple(each.part(number, num_parts) for each in rows) for number in range(num_parts))


class RowsInOrder:
    """Rows chosen from all parts, restored to the order of the whole; above `MEMORY_BYTES` they are on disk."""

    def __init__(self) -> None:
        self._chosen: list[pa.Table] = []
        self._size_bytes = 0
        self._file: SpillFile | None = None

    def add(self, chosen: pa.Table) -> None:
        """Add the rows chosen from one part, in their order."""
        if self._chosen and not chosen.num_rows:
            return
        self._size_bytes += chosen.nbytes
        if self._size_bytes > MEMORY_BYTES and NUMBER in chosen.schema.names:
            if self._file is None:
                self._file = SpillFile()
                self._chosen = [_map_file(self._file, each) for each in self._chosen]
            chosen = _map_file(self._file, chosen)
        self._chosen.append(chosen)

    def table(self) -> pa.Table:
        """Return all rows in order, without numbers; a single part is unchanged."""
        first = self._chosen[0]
        if NUMBER not in first.schema.names:
            return pa.concat_tables(self._chosen) if len(self._chosen) > 1 else first
        if self._file is None or not any(table.num_rows for table in self._chosen):
            return _in_order(self._chosen)
        schema = first.schema.remove(first.schema.get_field_index(NUMBER))
        file = SpillFile()
        return file.map(*file.append(_merge_tables(self._chosen), schema))


def _map_file(file: SpillFile, rows: pa.Table) -> pa.Table:
    return file.map(*file.append([rows], rows.schema))


def _merge_tables(chosen: Sequence[pa.Table]) -> Iterator[pa.Table]:
    numbers = [table[NUMBER].to_numpy() for table in chosen]
    num_rows = sum(map(len, numbers))
    last = max(int(each[-1]) for each in numbers if len(each))
    width = max(1, (last + 1) * ORDER_ROWS // num_rows)
    bounds = np.arange(0, last + 1 + width, width)
    cuts = [np.searchsorted(each, bounds) for each in numbers]
    for window in range(len(bounds) - 1):
        places = [(table, *cut[window : window + 2]) for table, cut in zip(chosen, cuts, strict=True)]
        pieces = [table.slice(start, end - start) for table, start, end in places if end > start]
        if pieces:
            yield _in_order(pieces)


def _in_order(tables: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(tables)
    return rows.take(pc.sort_indices(rows[NUMBER])).drop_columns([NUMBER])


def _runs(tables: Sequence[pa.Table]) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        num_pieces = -(-table.nbytes // RUN_BYTES) or 1
        step = -(-table.num_rows // num_pieces) or 1
        for start in range(0, table.num_rows, step):
            waiting.append(table.slice(start, step))
            size_bytes += waiting[-1].nbytes
            if size_bytes >= RUN_BYTES:
                yield pa.concat_tables(waiting)
                waiting, size_bytes = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _number_rows(rows: pa.Table, first: int) -> pa.Table:
    return rows.append_column(NUMBER, pa.array(np.arange(first, first + rows.num_rows, dtype=np.int64)))


def _by_part(rows: pa.Table) -> Iterator[pa.Table]:
    parts = parts_of(rows["item_id"])
    order = np.argsort(parts, kind="stable")
    bounds = np.searchsorted(parts[order], np.arange(NUM_PARTS + 1))
    rows = rows.take(pa.array(order))
    return (rows.slice(start, end - start) for start, end in pairwise(bounds))


def parts_of(ids: pa.ChunkedArray) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the part of each id: uint8 (N,). The suffix of a duplicate doesn't change the part."""
    return _compute_values(ids, f"(hash(split_part(id, '{DUPLICATE}', 1)) % {NUM_PARTS})::UTINYINT", np.uint8)


def hashes_of(ids: pa.ChunkedArray) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the hash of each id: uint64 (N,)."""
    return _compute_values(ids, "hash(id)", np.uint64)


def _compute_values(ids: pa.ChunkedArray, expression: str, kind: type[Number]) -> "np.ndarray[Any, np.dtype[Number]]":
    if not len(ids):
        return np.zeros(0, kind)
    with _database().cursor() as cursor:
        cursor.register("ids", pa.table({"id": ids}))
        return cursor.execute(f"SELECT {expression} AS value FROM ids").fetchnumpy()["value"]


@cache
def _database() -> "duckdb.DuckDBPyConnection":
    """Return a database without tables, which takes 12 ms to make; each caller uses its own cursor."""
    import duckdb

    atexit.register(_database.cache_clear)  # otherwise its library complains about leftovers at exit
    return duckdb.connect(":memory:", config={"threads": "1"})
