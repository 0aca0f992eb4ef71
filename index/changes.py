"""Differences between the rows of an index and the rows of a table."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from index.ids import IDS_SCHEMA
from index.vectors import Mask, Rows


@dataclass(frozen=True)
class Changes:
    """Changes that an update has to apply.

    Attributes:
        removed: bool (rows of the index,), whether a row can be found and is no longer in the table.
        added: int64 (n,), rows of the table that are not in the index, ascending.
    """

    removed: Mask
    added: Rows

    @property
    def num_removed(self) -> int:
        """Number of rows to mask."""
        return int(np.count_nonzero(self.removed))

    def __bool__(self) -> bool:
        """Whether there are changes."""
        return bool(self.num_removed or len(self.added))


def compare_ids(before: pa.Table, is_live: Mask, now: pa.Table) -> Changes:
    """Compare an index with a table; a row is the same where item, segment and run are.

    Args:
        before: `item_id`, `segment`, `run_id` of each row of the index, masked ones included.
        is_live: bool (rows of the index,), whether a row can be found.
        now: the same columns of each row of the table.
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
