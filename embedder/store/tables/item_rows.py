"""Items whose rows in the embeddings table don't match their records: found by parts, by the hash of their ids.

A store of an earlier release may have published items without their vectors. `embedder store check` names such items,
and a run with `--repair` embeds them again.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows, common_parts
from embedder.store.schema import EMBEDDINGS, ITEMS
from embedder.store.tables.arrow_lookup import positions, take_or_null, without_items

RECORD_KEYS = pa.schema([ITEMS.field(name) for name in ("item_id", "state", "num_vectors")])
ROW_KEYS = pa.schema([EMBEDDINGS.field(name) for name in ("item_id", "segment")])
MISMATCHES = pa.schema(
    {
        "item_id": pa.string(),
        "state": pa.string(),  # of its record; null if it has none
        "num_records": pa.int64(),  # rows of items
        "num_told": pa.int64(),  # number of vectors by its record; null: unknown
        "num_rows": pa.int64(),  # rows of embeddings
        "num_segments": pa.int64(),  # distinct ones of these
    }
)


def mismatches(items: HashedRows, rows: HashedRows) -> Iterator[pa.Table]:
    """Yield `MISMATCHES` of each part: items that don't appear exactly once, with each of their rows once and in full.

    `items` has all rows of a version with `RECORD_KEYS`, `rows` those of the matching embeddings with `ROW_KEYS`.
    """
    num_parts = common_parts(items, rows)
    return (compare(items.part(number, num_parts), rows.part(number, num_parts)) for number in range(num_parts))


def compare(items: pa.Table, rows: pa.Table) -> pa.Table:
    """Compare records of items (`RECORD_KEYS`) with the rows of embeddings (`ROW_KEYS`) of the same ids."""
    records = items.group_by("item_id").aggregate([([], "count_all"), ("state", "min"), ("num_vectors", "max")])
    count = pc.CountOptions(mode="all")
    held = rows.group_by("item_id").aggregate([([], "count_all"), ("segment", "count_distinct", count)])
    place = positions(records["item_id"], held["item_id"])
    without_record = without_items(held, records["item_id"])
    number = without_record.num_rows
    columns = [
        [records["item_id"], without_record["item_id"]],
        [records["state_min"], pa.nulls(number, pa.string())],
        [records["count_all"], pa.repeat(0, number)],
        [records["num_vectors_max"], pa.nulls(number, pa.int64())],
        [_or_zero(held["count_all"], place), without_record["count_all"]],
        [_or_zero(held["segment_count_distinct"], place), without_record["segment_count_distinct"]],
    ]
    joined = [_join(pieces, field.type) for pieces, field in zip(columns, MISMATCHES, strict=True)]
    found = pa.Table.from_arrays(joined, schema=MISMATCHES)
    # A record of an older format may not say how many vectors there are.
    is_embedded = pc.fill_null(pc.equal(found["state"], "embedded"), False)
    told = pc.coalesce(found["num_told"], pc.if_else(is_embedded, 1, found["num_rows"]))
    is_told = pc.is_valid(found["num_told"])
    has_all = pc.if_else(is_told, pc.equal(found["num_rows"], told), pc.greater_equal(found["num_rows"], told))
    is_once = pc.and_(pc.equal(found["num_records"], 1), pc.equal(found["num_rows"], found["num_segments"]))
    return found.filter(pc.invert(pc.and_(is_once, has_all)))


def _or_zero(counts: pa.ChunkedArray, place: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(take_or_null(counts, place), 0)


def _join(pieces: list[pa.ChunkedArray | pa.Array], kind: pa.DataType) -> pa.ChunkedArray:
    chunked = [each if isinstance(each, pa.ChunkedArray) else pa.chunked_array([each]) for each in pieces]
    return pa.chunked_array([chunk.cast(kind) for each in chunked for chunk in each.chunks], kind)
