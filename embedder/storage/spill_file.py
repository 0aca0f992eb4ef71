"""Tables on disk during processing: in an unnamed file in the folder for temporary files."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.errors import RunFailedError

ALIGNMENT = 64  # of Arrow's buffers
MEMORY_BYTES = 64 << 20
"""Bytes of gathered rows that stay in memory: a quarter of a million rows of a store's columns."""


class SpillFile:
    """Unnamed temporary file with tables; a kill leaves nothing behind."""

    def __init__(self, compression: str | None = None) -> None:
        """Create the file in TMPDIR; `compression` of buffers: `lz4`, or None for tables to be memory-mapped."""
        self._file = tempfile.TemporaryFile(prefix="embedder-rows-")  # noqa: SIM115 (it lives as long as its rows)
        self._options = pa.ipc.IpcWriteOptions(compression=compression)
        self._end = 0

    def append(self, tables: Iterable[pa.Table], schema: pa.Schema) -> tuple[int, int]:
        """Write tables as one; return the start and end of its bytes. RunFailedError if the disk is full."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        try:
            self._file.seek(start)
            with pa.ipc.new_stream(pa.PythonFile(self._file, "w"), schema, options=self._options) as writer:
                for table in tables:
                    writer.write_table(table)
            self._file.flush()
        except OSError as error:
            self._file.raw.close()  # the rest of its buffer can't be written either
            raise RunFailedError(
                f"{tempfile.gettempdir()}: the rows of items don't fit into the folder for temporary files "
                f"({error.strerror or error}); make room there, or set TMPDIR to a folder that has it"
            ) from None
        self._end = self._file.tell()
        return start, self._end

    def read(self, start: int, end: int) -> pa.Table:
        """Read the table at a position into memory."""
        return pa.ipc.open_stream(os.pread(self._file.fileno(), end - start, start)).read_all()

    def map(self, start: int, end: int) -> pa.Table:
        """Map the table at a position: pages are read when accessed, and dropped if memory is short."""
        pages = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_stream(pa.py_buffer(pages).slice(start, end - start)).read_all()


class GatheredRows:
    """Table in memory or mapped in pieces, from which rows are taken by number."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._batches = table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        self._starts = np.cumsum([0, *(len(batch) for batch in self._batches)])[:-1]

    def take(self, rows: "np.ndarray[Any, np.dtype[np.int64]]", columns: Sequence[str] | None = None) -> pa.Table:
        """Return rows by number (int64 (N,)), in that order, or some of their columns.

        Only the pieces and columns that hold them are accessed.
        """
        schema = self.table.schema if columns is None else self.table.select(columns).schema
        places = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(places, kind="stable")
        bounds = np.flatnonzero(np.diff(places[order], prepend=-1, append=-1))
        found = []
        for start, end in pairwise(bounds):
            place = places[order[start]]
            inside = rows[order[start:end]] - self._starts[place]
            batch = self._batches[place] if columns is None else self._batches[place].select(columns)
            found.append(batch.slice(inside[0], 1) if len(inside) == 1 else batch.take(_as_arrow(inside)))
        taken = pa.Table.from_batches(found, schema)
        if (np.diff(order) == 1).all():
            return taken
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return taken.combine_chunks().take(_as_arrow(back))


def _as_arrow(numbers: "np.ndarray[Any, np.dtype[np.int64]]") -> pa.Array:
    """Return int64 numbers in place; `pa.array` would import pandas, a fifth of a second of a search."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def in_memory_or_mapped(tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    """Gather tables in order as one: in memory, or memory-mapped from a temporary file above `MEMORY_BYTES`.

    Raises RunFailedError if the disk is full.
    """
    tables, kept, size_bytes = iter(tables), [schema.empty_table()], 0
    for table in tables:
        kept.append(table)
        size_bytes += table.nbytes
        if size_bytes > MEMORY_BYTES:
            file = SpillFile()
            place = file.append(chain(kept, tables), schema)
            del kept, table
            pa.default_memory_pool().release_unused()  # otherwise what was read would stay in this process
            return file.map(*place)
    return pa.concat_tables(kept).combine_chunks()
