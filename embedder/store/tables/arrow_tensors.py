"""Tensors as Arrow values: one `large_binary` value per row, whose value buffer is the packed tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import TENSOR, VECTOR

Array = np.ndarray[Any, np.dtype[Any]]

HALF_ZEROS = np.uint32(0x1FFF)
"""Bits of a float32 that are 0 in each value of half precision, whose mantissa has ten bits."""
HALF_BLOCK = 1 << 20


def pack(values: Sequence[Array | None]) -> pa.Array:
    """Pack one value per row, None as null; the arrays' bytes are copied once, into one buffer."""
    present = [value for value in values if value is not None]
    flat = np.concatenate([value.reshape(-1).view(np.uint8) for value in present]) if present else np.empty(0, np.uint8)
    return pack_flat(flat, np.array([0 if value is None else value.nbytes for value in values], np.int64))


def pack_flat(flat: Array, sizes_bytes: Array) -> pa.Array:
    """Build a `large_binary` column without a copy, over a buffer that holds all rows in order.

    `flat` is contiguous, of any dtype; `sizes_bytes` is int64 (rows,), where 0 makes the row null.
    """
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes_bytes)])
    validity = np.packbits(sizes_bytes > 0, bitorder="little")
    buffers = [pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(flat.reshape(-1).view(np.uint8))]
    return pa.Array.from_buffers(TENSOR, len(sizes_bytes), buffers)


def unpack(column: pa.Array) -> tuple[Array, Array]:
    """Return the bytes of all rows, uint8 (num_bytes,) and read-only, and each row's size in bytes, without a copy.

    Raises TypeError if the column isn't `large_binary`: something upstream has changed its type.
    """
    if column.type != TENSOR:
        raise TypeError(f"a tensor column must be {TENSOR}, this one is {column.type}")
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    flat = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return flat[offsets[0] : offsets[-1]], np.diff(offsets)


def pack_vectors(vectors: Array, present: Array) -> pa.Array:
    """Build a nullable `list<float>` column from float32 (R, E) and a bool (rows,) mask with R true."""
    width = vectors.shape[1]
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(present * width, dtype=np.int32)])
    values = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets), values, VECTOR, mask=pa.array(~present))


def unpack_vectors(column: pa.ChunkedArray | pa.Array) -> Array:
    """Return the vectors of a `list<float>` column without nulls, float32 (rows, E); one chunk is not copied.

    Raises ValueError if the vectors have different widths.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) == 0:
        return np.empty((0, 0), np.float32)
    return np.asarray(column.flatten().to_numpy(), np.float32).reshape(len(column), -1)


def round_vectors(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Round the values of a `list<float>` column to half precision; they stay float32.

    A column with a value beyond the range of half precision, 65,504, is returned as it is.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    with np.errstate(over="ignore"):
        rounded = column.flatten().to_numpy().astype(np.float16).astype(np.float32)
    if not np.isfinite(rounded).all():
        return column
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    mask = None if column.null_count == 0 else pc.is_null(column)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rounded), column.type, mask=mask)


def is_half(column: pa.ChunkedArray | pa.Array) -> bool:
    """Return whether all values of a `list<float>` column are of half precision: 13 bits of each are 0."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        bits = chunk.flatten().to_numpy().view(np.uint32)
        for start in range(0, len(bits), HALF_BLOCK):
            if (bits[start : start + HALF_BLOCK] & HALF_ZEROS).any():
                return False
    return True
