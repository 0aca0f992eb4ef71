"""Reads cells of Parquet files: the bytes of one row of one row group."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from embedder.sources.byte_ranges import EmbeddedFile, local_version, open_ranges
from embedder.sources.columns import column_path, parquet_name, take_column
from embedder.sources.source_errors import FetchError
from embedder.sources.uris import TableCell
from embedder.storage.file_adapter import RangeFile
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import readable

# A row group's column is kept whole up to this size, so its cells cost one read in any order; a larger one is streamed,
# which is cheap only if its cells are requested in order.
MAX_KEPT_BYTES = 256 << 20
ROWS_PER_BATCH = 64
PAGE_BUFFER_BYTES = 1 << 20


class ParquetCells:
    """One column of one row group of one file, kept until another is requested."""

    def __init__(self) -> None:
        self._place: tuple[str, str, str, int] | None = None
        self._file: Any = None
        self._raw: RangeFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._start, self._cells = 0, pa.nulls(0)  # the row group's rows from `_start` on are in memory
        self._num_rows = 0

    def cell(self, path: str, cell: TableCell, embedded: EmbeddedFile | None = None) -> Any:
        """Return the Arrow scalar of a cell, else a FetchError; `embedded` None allows any file."""
        # A rewritten file must not be read through its old footer; a remote file is read by ranges of one version.
        version = "" if is_remote(path) else local_version(path, embedded)
        place = (path, version, cell.column, cell.row_group)
        try:
            if place != self._place or cell.row < self._start:
                self._open(place)
            return self._advance(path, cell)
        except FetchError:
            self.close()  # the next fetch reopens a remote file that was replaced
            raise
        except (pa.ArrowException, OSError, IndexError) as error:
            self.close()
            detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise FetchError("TableBroken", f"{readable(path)}: {detail}") from None

    def _open(self, place: tuple[str, str, str, int]) -> None:
        import pyarrow.parquet as pq

        path, version, column, row_group = place
        self.close()
        ranges = open_ranges(path)
        self._raw = RangeFile(ranges)
        if version not in ("", ranges.version):  # the file that has the name now was not checked
            raise FetchError("TableChanged", f"{readable(path)}: it was replaced while it was opened; open it again")
        self._file = pq.ParquetFile(self._raw, pre_buffer=False)  # Arrow's threads would hold bytes of Python
        schema = self._file.schema_arrow
        if row_group >= self._file.num_row_groups or column_path(schema, column) is None:
            raise FetchError(
                "TableChanged", f"{readable(path)}: row group {row_group} of {column!r} is gone; list again"
            )
        self._num_rows = self._file.metadata.row_group(row_group).num_rows
        rows_per_batch, stored = max(self._num_rows, 1), parquet_name(schema, column)
        if _column_bytes(self._file.metadata.row_group(row_group), stored) > MAX_KEPT_BYTES:
            rows_per_batch = ROWS_PER_BATCH
            self._file = pq.ParquetFile(
                self._raw, metadata=self._file.metadata, pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES
            )
        self._batches = self._file.iter_batches(
            rows_per_batch, row_groups=[row_group], columns=[stored], use_threads=False
        )
        self._place = place

    def _advance(self, path: str, cell: TableCell) -> Any:
        if cell.row >= self._num_rows:
            raise FetchError("TableChanged", f"{readable(path)}: row {cell.row} is gone; list again")
        while cell.row >= self._start + len(self._cells):
            batch = next(self._batches, None)
            if batch is None:
                raise FetchError("TableBroken", f"{readable(path)}: the rows end before row {cell.row}")
            cells = take_column(batch, cell.column)
            cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
            self._start, self._cells = self._start + len(self._cells), cells
        return self._cells[cell.row - self._start]

    def close(self) -> None:
        """Close the file and drop its cells."""
        self._place = None
        self._batches = iter(())
        self._start, self._cells = 0, pa.nulls(0)
        if self._raw is not None:
            self._raw.close()
        self._raw = self._file = None


def cell_buffer(value: Any) -> pa.Buffer | None:
    """Return the bytes of a cell or of the struct in it; None if they are null."""
    if value.is_valid and hasattr(value, "keys"):
        value = value["bytes"]
    return value.as_buffer() if value.is_valid else None


def cell_reference(value: Any, where: str) -> str | None:
    """Return the file name that a cell's struct has instead of bytes, or None; a FetchError if that is no text."""
    if not value.is_valid or not hasattr(value, "keys") or "path" not in value:
        return None
    reference = value["path"].as_py()
    if not isinstance(reference, str | None):
        kind = value["path"].type
        raise FetchError("UnsupportedUri", f"{where} has no bytes, and its path is {kind}; write paths as strings")
    return reference


def _column_bytes(row_group: Any, column: str) -> int:
    leaves = (row_group.column(index) for index in range(row_group.num_columns))
    return sum(
        leaf.total_uncompressed_size
        for leaf in leaves
        if leaf.path_in_schema == column or leaf.path_in_schema.startswith(f"{column}.")
    )
