"""Vector columns of a Parquet file whose pages are read as they lie.

The layout (`layout_options`): a nullable `list<float>` column in data pages of version 2, PLAIN, uncompressed, without
a dictionary. A page then is a header, repetition levels, definition levels, and the values of all
vectors one after another: once the levels prove that each row is null or has as many values as every other, the values
are one copy of memory. Arrow takes every level and value apart, which costs ten times as much.

Nothing in a file is trusted: each number in a header must agree with the footer, with the levels and with the bytes
that are there; else `pyarrow.ArrowInvalid` is raised, as Arrow does for a damaged file. The footer is parsed here, too:
pyarrow 26 ends the process where it describes a column of a damaged one (an exception of C++ that nobody catches).

Source: Apache Parquet format 2.11, `parquet.thrift` and `Encodings.md`; Thrift compact protocol.
"""

import zlib
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedder.storage.parquet_encoding import find_unlike, parse_struct
from index.vectors import Floats, Mask

FLOAT, VALUE_BYTES = 4, 4
"""Physical type of the values, and the bytes of one."""
DATA_PAGE, DATA_PAGE_V2, PLAIN, RLE, UNCOMPRESSED, OPTIONAL, REPEATED = 0, 3, 0, 3, 0, 1, 2
STREAMS, ZSTD = 9, 6
"""Encoding BYTE_STREAM_SPLIT, first bytes of all values, then second ones, and the codec that it is compressed with."""
STREAMS_LEVEL = 1  # of zstd: the higher ones take twice as long and save nothing here
MAX_UNPACKED_BYTES = 4 * (16 << 20)
"""Bytes that a compressed page may come to; a larger one, which no writer of embedder's makes, is left to Arrow."""
MAX_LEVELS = (3, 1)
"""Highest definition and repetition level of a nullable list of nullable values; the levels of a null row are 0."""
MAX_ROWS = 1 << 24
"""Rows of a row group: nulls take no bytes, and a damaged number of them a lot of memory."""
MAGIC, BEGIN_BYTES, END_BYTES = b"PAR1", 4, 8
"""Bytes before the first page and after the footer: magic bytes, and the footer's length."""
PAGE_BYTES = 16 << 20
"""Size of a page: its header and levels cost 50 us, its values 3 ms; writers and readers hold some in memory."""
BATCH_VALUES = 1 << 16
"""Values encoded at once; with the default, 1,024, a batch is about one vector."""
MIN_ROWS = 1000
"""Rows of a table from which its vectors are worth a second look at the footer, which takes half a millisecond."""
MAX_OFFSET = 2**31 - 1
"""Values of an Arrow list array."""


class VectorColumn(NamedTuple):
    """Vectors of a column, and which rows have one.

    Attributes:
        values: float32 (P, E), the vectors of the rows that have one, in order; possibly read-only.
        present: bool (rows,), with P true.
    """

    values: Floats
    present: Mask


Place = Callable[[int, int], Floats]
"""Returns memory for (P, E) values, float32."""


class _Page(NamedTuple):
    present: Mask
    width: int  # of a vector; 0 if all rows are null
    values: memoryview


class _Chunk(NamedTuple):
    """One row group's part of the column: its place in the file, and what the footer says of it."""

    start: int
    num_bytes: int
    num_rows: int
    num_values: int


class _VectorLayout(NamedTuple):
    """Where the vectors of a column are, if it is in the layout."""

    encoding: int  # PLAIN and uncompressed, or STREAMS and compressed
    chunks: list[_Chunk]


def layout_options(schema: pa.Schema, vectors: Collection[str], streams: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of `pyarrow.parquet.write_table` that write some columns in the layout, the others as ever.

    Those of `vectors` that are in `streams` are written byte by byte, compressed: for values of half precision, of
    which two bytes in four are nearly constant.
    """
    others = [name for name in schema.names if name not in vectors]
    if len(others) == len(schema):
        return {}
    columns = {path: path.partition(".")[0] for path in _leaf_paths(schema)}
    is_plain = {path: column in vectors and column not in streams for path, column in columns.items()}
    split = [path for path, column in columns.items() if column in streams]
    of_streams = {
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "compression_level": dict.fromkeys(split, STREAMS_LEVEL),
    }
    return {
        **(of_streams if split else {}),
        "compression": {path: "NONE" if plain else "zstd" for path, plain in is_plain.items()},
        "use_dictionary": others,
        "data_page_version": "2.0",
        "data_page_size": PAGE_BYTES,
        "write_batch_size": BATCH_VALUES,
        "write_page_checksum": True,
    }


@lru_cache(maxsize=16)
def _leaf_paths(schema: pa.Schema) -> tuple[str, ...]:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return tuple(leaves.column(number).path for number in range(len(leaves)))


def is_laid_out(file: pa.NativeFile, columns: Collection[str]) -> bool:
    """Return whether an open file has these columns in the layout; one that it lacks needs no layout.

    Raises pyarrow.ArrowInvalid if the footer is damaged.
    """
    footer = _parse_footer(file)
    names = {_name_of(element) for element in footer.get(2, [])}
    return all(_find_layout(footer, column, file.size()) is not None for column in columns if column in names)


def split_columns(file: pa.NativeFile, columns: Collection[str]) -> list[str]:
    """Return those of some columns that an open file has in the layout, byte by byte: values of half precision.

    Raises pyarrow.ArrowInvalid if the footer is damaged.
    """
    footer = _parse_footer(file)
    found = {column: _find_layout(footer, column, file.size()) for column in columns}
    return [column for column, layout in found.items() if layout is not None and layout.encoding == STREAMS]


def read_columns(
    file: pq.ParquetFile, source: pa.NativeFile, columns: Collection[str] | None, *, use_threads: bool = True
) -> pa.Table:
    """Read columns as Arrow does, but those in the layout by `read_vector_pages`; checksums are compared.

    `file` is open on `source`. Columns that it lacks are left out, None means all.
    """
    if file.metadata.num_rows < MIN_ROWS:
        return file.read(columns, use_threads=use_threads)
    wanted = [field for field in file.schema_arrow if columns is None or field.name in columns]
    vectors: dict[str, pa.Array] = {}
    for field in wanted:
        if pa.types.is_list(field.type) and pa.types.is_float32(field.type.value_type):
            found = read_vector_pages(source, field.name, _allocate, check_sums=True)
            if found is not None and found.values.size <= MAX_OFFSET:
                vectors[field.name] = _as_list(found, field.type)
    if not vectors:
        return file.read(columns, use_threads=use_threads)
    rest = file.read([field.name for field in wanted if field.name not in vectors], use_threads=use_threads)
    arrays = [vectors[field.name] if field.name in vectors else rest[field.name] for field in wanted]
    return pa.Table.from_arrays(arrays, schema=pa.schema(wanted, file.schema_arrow.metadata))


def _as_list(column: VectorColumn, kind: pa.ListType) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(column.present * np.int64(column.values.shape[1]))]).astype(np.int32)
    mask = None if column.present.all() else pa.array(~column.present)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(column.values.reshape(-1)), kind, mask=mask)


def _allocate(num: int, width: int) -> Floats:
    return np.empty((num, width), np.float32)


def read_vector_pages(
    file: pa.NativeFile, column: str, place: Place | None = None, *, check_sums: bool
) -> VectorColumn | None:
    """Read the vectors of a column from a file in the layout; None if it isn't, so that Arrow has to read it.

    Args:
        file: the open file. Of a memory map, one page that is aligned is not copied unless `place` is given.
        column: name of the column.
        place: gives the memory that the values are copied to; None makes some.
        check_sums: whether to compare each page's CRC, where it has one; this takes as long as the copy.

    Raises:
        pyarrow.ArrowInvalid: the file is damaged.
    """
    layout = _find_layout(_parse_footer(file), column, file.size())
    if layout is None:
        return None
    pages: list[_Page] = []
    for chunk in layout.chunks:
        file.seek(chunk.start)
        found = _read_pages(file.read_buffer(chunk.num_bytes), chunk, layout, check_sums=check_sums)
        if found is None:
            return None
        pages += found
    return _join(pages, place)


def _parse_footer(file: pa.NativeFile) -> dict[int, Any]:
    size = file.size()
    file.seek(max(0, size - END_BYTES))
    end = file.read(END_BYTES)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or length > size - BEGIN_BYTES - END_BYTES:
        raise pa.ArrowInvalid("it is no Parquet file, or its end is missing")
    file.seek(size - END_BYTES - length)
    footer, position = parse_struct(memoryview(file.read_buffer(length)).cast("B"), 0)
    if position != length:
        raise pa.ArrowInvalid("the footer is damaged")
    return footer


def _find_layout(footer: dict[int, Any], column: str, file_bytes: int) -> _VectorLayout | None:
    """Return a column's type of values, its encoding and its chunks; None if it isn't in the layout.

    Fields are those of `FileMetaData`, `SchemaElement`, `RowGroup`, `ColumnChunk` and `ColumnMetaData`.
    """
    try:
        elements, groups = footer[2], footer[4]
        places = [place for place, element in enumerate(elements) if _name_of(element) == column]
        nested = elements[places[0] : places[0] + 3] if len(places) == 1 else []
        shape = [(element.get(3), element.get(5, 0)) for element in nested]  # repetition, number of children
        if shape != [(OPTIONAL, 1), (REPEATED, 1), (OPTIONAL, 0)]:
            return None
        path = [element[4] for element in nested]
        found = [[chunk[3] for chunk in group[1] if chunk[3][3] == path] for group in groups]
        encodings = {_encoding_of(own[0]) if len(own) == 1 else None for own in found} or {PLAIN}
        encoding = encodings.pop()
        if nested[2].get(1) != FLOAT or encoding is None or encodings:
            return None
        chunks = [_Chunk(own[9], own[7], group[3], own[5]) for group, (own,) in zip(groups, found, strict=True)]
        if sum(chunk.num_rows for chunk in chunks) != footer[3]:
            raise pa.ArrowInvalid(f"the row groups of the footer don't add up to its {footer[3]} rows")
        if any(chunk.num_rows > MAX_ROWS for chunk in chunks):
            return None
        return _VectorLayout(encoding, [chunk for chunk in chunks if _holds_pages(chunk, file_bytes)])
    except (LookupError, TypeError, AttributeError):
        raise pa.ArrowInvalid("the footer is damaged") from None


def _name_of(element: Any) -> str | None:
    name = element.get(4) if isinstance(element, dict) else None
    return name.decode(errors="replace") if isinstance(name, bytes) else None


def _encoding_of(chunk: dict[int, Any]) -> int | None:
    codecs = {PLAIN: UNCOMPRESSED, STREAMS: ZSTD}
    own = {*chunk[2]} - {RLE} or {PLAIN}
    encoding = own.pop()
    is_ours = not own and codecs.get(encoding, -1) == chunk[4] and 11 not in chunk  # 11: of a dictionary
    return encoding if is_ours else None


def _holds_pages(chunk: _Chunk, file_bytes: int) -> bool:
    """Check a chunk's place; return whether it has any pages: a file without rows has a row group of nothing."""
    is_within = chunk.start >= BEGIN_BYTES and chunk.start + chunk.num_bytes <= file_bytes - END_BYTES
    if min(chunk) < 0 or (any(chunk[1:]) and not is_within):
        raise pa.ArrowInvalid(f"the footer places {chunk.num_bytes:,} bytes of a column at byte {chunk.start:,}")
    return any(chunk[1:])


def _read_pages(data: pa.Buffer, chunk: _Chunk, layout: _VectorLayout, *, check_sums: bool) -> list[_Page] | None:
    """Read all pages of a chunk; None if the first is of version 1, or one of streams is larger than embedder's are."""
    if data.size != chunk.num_bytes:
        raise pa.ArrowInvalid(f"the file ends after {data.size:,} of {chunk.num_bytes:,} bytes of a column")
    whole, position, num_values = memoryview(data).cast("B"), 0, 0
    pages: list[_Page] = []
    while position < len(whole):
        header, position = parse_struct(whole, position)
        kind, unpacked_bytes, num_bytes, check_sum = (header.get(each, 0) for each in (1, 2, 3, 4))
        if kind == DATA_PAGE and isinstance(header.get(5), dict) and not pages:
            return None
        own = header.get(8)
        if kind != DATA_PAGE_V2 or not isinstance(own, dict) or not _is_count(num_bytes, len(whole) - position):
            raise pa.ArrowInvalid("the header of a page is damaged")
        body = whole[position : position + num_bytes]
        is_plain = layout.encoding == PLAIN
        if (is_plain and unpacked_bytes != num_bytes) or not isinstance(check_sum, int):
            raise pa.ArrowInvalid(f"a page of {num_bytes:,} bytes says that it has {unpacked_bytes} uncompressed")
        if check_sums and 4 in header and zlib.crc32(body) != check_sum & 0xFFFFFFFF:
            raise pa.ArrowInvalid("the bytes of a page don't have the checksum in its header")
        if not is_plain:
            if not _is_count(unpacked_bytes, MAX_UNPACKED_BYTES):
                return None
            body = _join_streams(body, own, unpacked_bytes)
        pages.append(_read_page(body, own, chunk, layout.encoding))
        position += num_bytes
        num_values += own[1]
    if sum(len(page.present) for page in pages) != chunk.num_rows or num_values != chunk.num_values:
        raise pa.ArrowInvalid(f"the pages of a column don't add up to the {chunk.num_rows:,} rows of the footer")
    return pages


def _join_streams(body: memoryview, header: dict[int, Any], unpacked_bytes: int) -> memoryview:
    """Return a page with its values unpacked and put together from their four streams; its levels are as they were."""
    levels: list[Any] = [header.get(5), header.get(6)]
    start = sum(levels) if all(_is_count(each, len(body)) for each in levels) else len(body) + 1
    num_bytes = unpacked_bytes - start
    if start > len(body) or num_bytes < 0 or num_bytes % VALUE_BYTES:
        raise pa.ArrowInvalid(f"a page of {len(body):,} bytes says that it has {unpacked_bytes} uncompressed")
    whole = np.empty(unpacked_bytes, np.uint8)
    whole[:start] = np.frombuffer(body[:start], np.uint8)
    values = whole[start:].reshape(-1, VALUE_BYTES)
    streams = _unpack(body[start:], num_bytes, is_packed=header.get(7) is not False)
    for place, stream in enumerate(np.frombuffer(streams, np.uint8).reshape(VALUE_BYTES, -1)):
        values[:, place] = stream
    return memoryview(whole.data)


def _unpack(data: memoryview, num_bytes: int, *, is_packed: bool) -> "memoryview | pa.Buffer":
    """Unpack the values of a page; a writer leaves those as they are that zstd doesn't make smaller."""
    try:
        if is_packed and num_bytes:
            return pa.Codec("zstd").decompress(pa.py_buffer(data), decompressed_size=num_bytes)
    except OSError as error:
        raise pa.ArrowInvalid(f"the values of a page can't be unpacked ({error})") from None
    if len(data) != num_bytes:
        raise pa.ArrowInvalid(f"a page has {len(data):,} bytes of values, and says that it has {num_bytes:,}")
    return data


def _read_page(body: memoryview, header: dict[int, Any], chunk: _Chunk, encoding: int) -> _Page:
    """Prove by the levels that each row is null or a vector of one length; the values stay where they are."""
    limits = (chunk.num_values, chunk.num_rows, chunk.num_rows, encoding, len(body), len(body))
    if header.get(4) != encoding or not all(
        _is_count(header.get(field), limit) for field, limit in enumerate(limits, start=1)
    ):
        raise pa.ArrowInvalid("the header of a page has numbers that can't be")
    num_values, num_nulls, num_rows, _, definition_bytes, repetition_bytes = (header[each] for each in range(1, 7))
    start = repetition_bytes + definition_bytes
    if num_rows > num_values or (num_values - num_nulls) * VALUE_BYTES != len(body) - start:
        raise pa.ArrowInvalid(f"a page of {num_values:,} values in {num_rows:,} rows has {len(body):,} bytes")
    starts, _ = find_unlike(bytes(body[:repetition_bytes]), num_values, MAX_LEVELS[1], num_rows, bits=1)
    nulls, levels = find_unlike(bytes(body[repetition_bytes:start]), num_values, MAX_LEVELS[0], num_nulls, bits=2)
    rows = np.searchsorted(starts, nulls)
    if levels.any() or starts[:1].any() or not np.array_equal(nulls, starts[np.minimum(rows, num_rows - 1)]):
        raise pa.ArrowInvalid("a page has rows that are neither null nor a vector")
    present: Mask = np.ones(num_rows, np.bool_)
    present[rows] = False
    lengths = np.diff(starts, append=num_values)
    width = int(lengths[present][0]) if num_nulls < num_rows else 0
    if (lengths[present] != width).any() or (lengths[~present] != 1).any():
        raise pa.ArrowInvalid("a page has vectors of different lengths")
    return _Page(present, width, body[start:])


def _is_count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def _join(pages: list[_Page], place: Place | None) -> VectorColumn:
    present = np.concatenate([np.zeros(0, np.bool_), *(page.present for page in pages)])
    full = [page for page in pages if page.width]
    width = full[0].width if full else 0
    if any(page.width != width for page in full):
        raise pa.ArrowInvalid("pages have vectors of different lengths")
    if len(full) == 1 and place is None:
        values = np.frombuffer(full[0].values, "<f4").reshape(-1, width)
        if values.flags.aligned:
            return VectorColumn(values, present)
    num_present = int(np.count_nonzero(present))
    memory = (place or _allocate)(num_present, width)
    flat, start = memory.reshape(-1).view(np.uint8), 0  # as bytes, since a page may begin anywhere
    for page in full:
        stop = start + len(page.values)
        flat[start:stop] = np.frombuffer(page.values, np.uint8)
        start = stop
    return VectorColumn(memory, present)
