"""Parquet files read by ranges."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from embedder.storage.file_adapter import ByteRanges
from embedder.storage.object_ranges import PIECE_BYTES, join_ranges
from embedder.storage.vector_pages import read_columns

FOOTER_END_BYTES = 8
"""The footer's length in four bytes, and a Parquet file's magic bytes."""


def read_parquet(ranges: ByteRanges, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the footer and the wanted columns of a Parquet file; columns that it lacks are left out, None means all.

    Arrow's threads decode them from Arrow memory. Releasing Python bytes would need the interpreter's lock after the
    table is there: if the interpreter is ending by then, that aborts the process.
    """
    memory = pa.allocate_buffer(ranges.size)  # as large as the file; pages that are never written take no memory
    length = int.from_bytes(ranges.read_at(max(0, ranges.size - FOOTER_END_BYTES), 4), "little")
    _fill(memory, ranges, ranges.size - FOOTER_END_BYTES - length, ranges.size)
    source = pa.BufferReader(memory)
    file = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
    for start, stop in join_ranges(_places(file.metadata, columns)):
        _fill(memory, ranges, start, stop)
    return read_columns(file, source, columns)


def _fill(memory: pa.Buffer, ranges: ByteRanges, start: int, stop: int) -> None:
    """Fetch bytes to their position; a damaged footer may name positions outside the file."""
    start, stop = max(0, start), min(stop, ranges.size)
    for begin in range(start, stop, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, stop)
        memoryview(memory).cast("B")[begin:end] = ranges.read_at(begin, end - begin)


def _places(footer: pq.FileMetaData, columns: Sequence[str] | None) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the wanted columns in each row group; as in pyarrow, `a` includes `a.list.element`."""
    paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
    wanted = [
        number
        for number, path in enumerate(paths)
        if columns is None or any(path == name or path.startswith(f"{name}.") for name in columns)
    ]
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, wanted):
            start = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
            yield start, start + chunk.total_compressed_size
