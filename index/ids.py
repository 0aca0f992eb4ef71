"""The ids beside the vectors: which item and segment each row of an index stands for, and which run made its vector."""

import pyarrow as pa
import pyarrow.parquet as pq

from index.errors import RetrievalError

KEY_NAMES = ("item_id", "segment")
# The same key and run: the same vector. Null where the caller has no runs; such rows are never taken for the same.
IDS_SCHEMA = pa.schema([("item_id", pa.string()), ("segment", pa.int32()), ("run_id", pa.string())])


def check_ids(ids: pa.Table, num_vectors: int) -> pa.Table:
    """Give the columns in their own types, one row a vector.

    Args:
        ids: a table with at least `item_id` (any string type) and `segment` (any integer type); may have `run_id`.
        num_vectors: rows it must have.

    Raises:
        RetrievalError: a column is missing or of another type, a value is null, or the number of rows differs.
    """
    missing = [name for name in KEY_NAMES if name not in ids.column_names]
    if missing:
        raise RetrievalError(f"ids: found columns {ids.column_names}; {' and '.join(missing)} must be among them")
    if ids.num_rows != num_vectors:
        raise RetrievalError(
            f"ids: found {ids.num_rows:,} rows for {num_vectors:,} vectors; give one row a vector, in order"
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
    """Read the table from the bytes of its file, which the caller has checked."""
    return check_ids(found := pq.read_table(pa.BufferReader(content)), found.num_rows)
