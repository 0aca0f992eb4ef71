"""Items whose rows in the embeddings table don't match their records: found by parts, by the hash of their ids.

A store of an earlier release may have published items without their vectors. `embedder store check` names such items,
and a run with `--repair` embeds them again.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.schema import EMBEDDINGS, ITEMS
from embedder.store.tables.arrow_lookup import replace_column

RECORD_KEYS = pa.schema([ITEMS.field(name) for name in ("item_id", "state", "num_vectors")])
ROW_KEYS = pa.schema([EMBEDDINGS.field(name) for name in ("item_id", "segment")])
MISMATCHES = pa.schema(
    {
        "item_id": pa.string(),
        "state": pa.string(),  # of its record; null if it has none
        "num_records": pa.int64(),  # rows of items
        "num_expected": pa.int64(),  # number of vectors by its record; null: unknown
        "num_rows": pa.int64(),  # rows of embeddings
        "num_segments": pa.int64(),  # distinct ones of these
    }
)


def mismatches(items: HashedRows, rows: HashedRows) -> Iterator[pa.Table]:
    """Yield `MISMATCHES` of each part: items that don't appear exactly once, with each of their rows once and in full.

    `items` has all rows of a version with `RECORD_KEYS`, `rows` those of the matching embeddings with `ROW_KEYS`.
    """
    return (compare(records, keys) for records, keys in read_parts(items, rows))


def compare(items: pa.Table, rows: pa.Table) -> pa.Table:
    """Compare records of items (`RECORD_KEYS`) with rows of embeddings (`ROW_KEYS`); `MISMATCHES`, ordered by id."""
    records = items.group_by("item_id").aggregate([([], "count_all"), ("state", "min"), ("num_vectors", "max")])
    records = records.rename_columns(["item_id", "num_records", "state", "num_expected"])
    count = pc.CountOptions(mode="all")
    held = rows.group_by("item_id").aggregate([([], "count_all"), ("segment", "count_distinct", count)])
    held = held.rename_columns(["item_id", "num_rows", "num_segments"])
    both = records.join(held, "item_id", join_type="full outer").select(MISMATCHES.names).cast(MISMATCHES)
    for name in ("num_records", "num_rows", "num_segments"):
        both = replace_column(both, name, pc.fill_null(both[name], 0))
    # A record of an older format may not say how many vectors there are.
    is_embedded = pc.fill_null(pc.equal(both["state"], "embedded"), False)
    expected = pc.coalesce(both["num_expected"], pc.if_else(is_embedded, 1, both["num_rows"]))
    is_known = pc.is_valid(both["num_expected"])
    has_all = pc.if_else(is_known, pc.equal(both["num_rows"], expected), pc.greater_equal(both["num_rows"], expected))
    is_once = pc.and_(pc.equal(both["num_records"], 1), pc.equal(both["num_rows"], both["num_segments"]))
    return both.filter(pc.invert(pc.and_(is_once, has_all))).sort_by("item_id")
