"""Sorts tables of any number of rows by some columns: in memory, or in runs on disk that are merged."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from embedder.storage.spill_file import SpillFile

RUN_BYTES = 64 << 20
"""Size of the rows sorted at once: about 400,000 names. Anything smaller stays in memory."""
PIECE_ROWS = 4096  # of each run held in memory while the runs are merged


class SortedTables:
    """Rows sorted by string columns; with more than one run, all but a piece of each is on disk."""

    def __init__(self, tables: Iterable[pa.Table], by: Sequence[str]) -> None:
        """Read all rows of tables of one schema; the columns `by` must have no nulls."""
        self._by, self._file = by, SpillFile("lz4")
        self._runs: list[list[tuple[int, int]]] = []
        self._kept: pa.Table | None = None
        waiting, size_bytes = list[pa.Table](), 0
        for table in tables:
            waiting.append(table)
            size_bytes += table.nbytes
            if size_bytes >= RUN_BYTES:
                self._spill(waiting)
                waiting, size_bytes = [], 0
        if waiting and self._runs:
            self._spill(waiting)
        elif waiting:
            self._kept = self._sort(waiting)

    def pieces(self) -> Iterator[pa.Table]:
        """Yield all rows in order; can be called repeatedly."""
        if self._kept is not None:
            starts = range(0, self._kept.num_rows, PIECE_ROWS)
            yield from (self._kept.slice(start, PIECE_ROWS) for start in starts)
            return
        left = [_Run(self._file, run) for run in self._runs]
        while left := [run for run in left if run.load()]:
            bounds = [self._key(run.rows, run.rows.num_rows - 1) for run in left if run.has_more]
            taken = [run.take(self._num_within(run.rows, min(bounds)) if bounds else None) for run in left]
            yield self._sort(taken)

    def _sort(self, tables: Sequence[pa.Table]) -> pa.Table:
        rows = pa.concat_tables(tables)
        return rows.sort_by([(name, "ascending") for name in self._by]) if rows.num_rows else rows

    def _spill(self, tables: Sequence[pa.Table]) -> None:
        rows = self._sort(tables)
        starts = range(0, rows.num_rows, PIECE_ROWS)
        self._runs.append([self._file.append([rows.slice(start, PIECE_ROWS)], rows.schema) for start in starts])

    def _key(self, rows: pa.Table, row: int) -> tuple[Any, ...]:
        return tuple(rows[name][row].as_py() for name in self._by)  # code points sort like their UTF-8

    def _num_within(self, rows: pa.Table, bound: tuple[Any, ...]) -> int:
        """Count the rows up to a bound; no row still on disk comes before them."""
        return bisect_right(range(rows.num_rows), bound, key=lambda row: self._key(rows, row))


class _Run:
    """A sorted run with one piece in memory."""

    def __init__(self, file: SpillFile, places: Sequence[tuple[int, int]]) -> None:
        self._file, self._places = file, iter(places)
        self._next = next(self._places, None)
        self.rows = pa.table({})

    @property
    def has_more(self) -> bool:
        """Return whether part of the run is still on disk."""
        return self._next is not None

    def load(self) -> bool:
        """Load the next piece if none is in memory; return whether a row is available."""
        while not self.rows.num_rows and self._next is not None:
            self.rows, self._next = self._file.read(*self._next), next(self._places, None)
        return bool(self.rows.num_rows)

    def take(self, num_rows: int | None) -> pa.Table:
        """Take the first rows in memory; None means all."""
        taken = self.rows if num_rows is None else self.rows.slice(0, num_rows)
        self.rows = self.rows.slice(taken.num_rows)
        return taken
