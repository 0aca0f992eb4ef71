"""Ids of an index's rows: the item and segment of each vector, and the run that made it."""

import pyarrow as pa
import pyarrow.parquet as pq

from index.errors import RetrievalError

KEY_NAMES = ("item_id", "segment")
# Equal key and run mean an equal vector. Null where the caller has no runs; such rows never count as equal.
IDS_SCHEMA = pa.schema([("item_id", pa.string()), ("segment", pa.int32()), ("run_id", pa.string())])


def check_ids(ids: pa.Table, num_vectors: int) -> pa.Table:
    """Select and cast the columns, one row per vector.

    Args:
        ids: a table with at least `item_id` (any string type) and `segment` (any integer type); may have `run_id`.
        num_vectors: number of rows it must have.

    Raises:
        RetrievalError: a column is missing or of another type, a value is null, or the number of rows differs.
    """
    missing = [name for name in KEY_NAMES if name not in ids.column_names]
    if missing:
        raise RetrievalError(f"ids: found columns {ids.column_names}; {' and '.join(missing)} must be among them")
    if ids.num_rows != num_vectors:
        raise RetrievalError(
            f"ids: found {ids.num_rows:,} rows for {num_vectors:,} vectors; give one row per vector, in order"
        )
    for name in KEY_NAMES:
        if ids[name].null_count:
            raise RetrievalError(f"ids: {ids[name].null_count:,} rows have no {name}; every vector needs one")
    if "run_id" not in ids.column_names:
        ids = ids.append_column("run_id", pa.nulls(ids.num_rows, pa.string()))
    try:
        return ids.select(IDS_SCHEMA.names).cast(IDS_SCHEMA).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RetrievalError(f"ids: {error}; give item_id as a string and segment as a 32-bit integer") from None


def read_ids(content: bytes) -> pa.Table:
    """Read the table from the bytes of its file, whose hash the caller has checked."""
    return check_ids(found := pq.read_table(pa.BufferReader(content)), found.num_rows)
