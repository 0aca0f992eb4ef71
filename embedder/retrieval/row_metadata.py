"""Columns of the embeddings table beside the vectors: read once, then taken by row number."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval.filters import RowFilter
from embedder.store.part_writer import VECTOR_COLUMNS
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables import RecordTable
from index.errors import RetrievalError
from index.vectors import Mask, Rows

KEY = ["item_id", "segment"]
OWN = ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")  # fields of a hit, beside carryover


class RowMetadata:
    """Columns of one version but the vectors."""

    def __init__(self, table: RecordTable) -> None:
        schema = table.schema
        names = schema.names if schema is not None else list(OWN)
        self.rows: pa.Table = table.read([name for name in names if name not in VECTOR_COLUMNS]).combine_chunks()

    def rows_of(self, ids: pa.Table, is_live: Mask) -> Rows:
        """Row of each vector; -1 for a vector that is no longer live.

        Args:
            ids: `item_id` and `segment` of each vector.
            is_live: bool (vectors,), false where a vector is masked.

        Raises:
            RetrievalError: a live vector is of an item that the table lacks.
        """
        found = match_keys(ids, self.rows)
        if (found[is_live] < 0).any():
            lost = ids["item_id"][int(np.flatnonzero((found < 0) & is_live)[0])].as_py()
            raise RetrievalError(
                f"the index holds {lost!r}, which the embeddings published with it lack; build the index again"
            )
        return found

    def matching(self, where: str) -> Mask:
        """Mask of the rows that fulfil a SQL condition; bool (rows,)."""
        return self.filter.matching(where)

    def describe(self, rows: Rows) -> list[dict[str, Any]]:
        """Fields of hits for some rows, in their order; columns carried over stand under `carryover`."""
        carried = [name for name in self.rows.column_names if name not in EMBEDDINGS.names]
        taken = self.rows.select([*OWN, *carried]).take(pa.array(rows)).to_pylist()
        return [
            {name: row[name] for name in OWN} | {"carryover": {name: row[name] for name in carried}} for row in taken
        ]

    @locked_cached_property
    def filter(self) -> RowFilter:
        """Filter over the rows."""
        return RowFilter(self.rows)


def match_keys(wanted: pa.Table, known: pa.Table) -> Rows:
    """Row of `known` for each wanted (item_id, segment), else -1; int64 (wanted rows,)."""
    if known.num_rows == 0:
        return np.full(wanted.num_rows, -1, np.int64)
    if wanted.select(KEY).equals(known.select(KEY)):  # as a fresh index of images alone has it
        return np.arange(known.num_rows)
    known_keys, wanted_keys = _keys(known, known["item_id"]), _keys(wanted, known["item_id"])
    known_order, wanted_order = np.argsort(known_keys, kind="stable"), np.argsort(wanted_keys, kind="stable")
    # Both in order, so that neighbours are looked for near each other: ten times faster than at random.
    positions = np.searchsorted(known_keys[known_order], wanted_keys[wanted_order])
    nearest = np.empty(wanted.num_rows, np.int64)
    nearest[wanted_order] = known_order[np.minimum(positions, known.num_rows - 1)]
    rows: Rows = np.where(known_keys[nearest] == wanted_keys, nearest, -1)
    return rows


def _keys(table: pa.Table, names: pa.ChunkedArray) -> Rows:
    """Keys of item and segment as one number; negative for an item that is not among the names."""
    item = pc.fill_null(pc.index_in(table["item_id"], value_set=names), -1).to_numpy().astype(np.int64)
    keys: Rows = (item << 32) | table["segment"].to_numpy().astype(np.int64)
    return keys
