"""Ids of an index's rows (item, segment, and the run that made the vector), and their changes."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from index.index_errors import RetrievalError
from index.vectors import Mask, Rows, vectors_text

KEY_NAMES = ("item_id", "segment")
# Equal keys and runs mean equal vectors. Null if the caller has no runs; such rows never count as equal.
IDS_SCHEMA = pa.schema([("item_id", pa.string()), ("segment", pa.int32()), ("run_id", pa.string())])


@dataclass(frozen=True)
class Changes:
    """Changes that an update has to apply: `removed`, bool (index rows,), and `added`, ascending int64 table rows."""

    removed: Mask
    added: Rows

    @property
    def num_removed(self) -> int:
        """Number of rows to mask."""
        return int(np.count_nonzero(self.removed))

    def __bool__(self) -> bool:
        return bool(self.num_removed or len(self.added))


def check_ids(ids: pa.Table, num_vectors: int) -> pa.Table:
    """Select and cast the columns (`item_id`, `segment`, and `run_id` if present), one row per vector.

    Any string and integer types are accepted. Raises a RetrievalError if a column is missing or of another type, a
    value is null, or the number of rows differs.
    """
    missing = [name for name in KEY_NAMES if name not in ids.column_names]
    if missing:
        found = ", ".join(ids.column_names) or "no column"
        raise RetrievalError(f"ids: found {found}; {' and '.join(missing)} must be among the columns")
    if ids.num_rows != num_vectors:
        raise RetrievalError(
            f"ids: found {ids.num_rows:,} for {vectors_text(num_vectors)}; give one row per vector, in order"
        )
    for name in KEY_NAMES:
        if ids[name].null_count:
            raise RetrievalError(f"ids: {name} is null {ids[name].null_count:,} times; every vector needs one")
    if "run_id" not in ids.column_names:
        ids = ids.append_column("run_id", pa.nulls(ids.num_rows, pa.string()))
    try:
        return ids.select(IDS_SCHEMA.names).cast(IDS_SCHEMA).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RetrievalError(f"ids: {error}; give item_id as a string and segment as a 32-bit integer") from None


def compare_ids(before: pa.Table, is_live: Mask, now: pa.Table) -> Changes:
    """Compare an index (masked rows included) with a table; a row is the same if item, segment and run are.

    `is_live` is bool (rows of the index,), whether a row can be found.
    """
    live = np.flatnonzero(is_live)
    old = before.select(IDS_SCHEMA.names).take(pa.array(live)).append_column("old_row", pa.array(live))
    new = now.select(IDS_SCHEMA.names).cast(IDS_SCHEMA).append_column("new_row", pa.array(np.arange(now.num_rows)))
    # A null run equals nothing: rows without one are removed and added.
    both = old.join(new, IDS_SCHEMA.names, join_type="inner")
    removed = is_live.copy()
    removed[both["old_row"].to_numpy()] = False
    is_added = np.ones(now.num_rows, dtype=bool)
    is_added[both["new_row"].to_numpy()] = False
    return Changes(removed, np.flatnonzero(is_added & pc.is_valid(new["item_id"]).to_numpy()))
