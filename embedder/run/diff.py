"""What is new or changed since the store saw it. Pure: Arrow tables in, Arrow tables out."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

KNOWN = pa.schema(
    {
        "item_id": pa.string(),
        "size_bytes": pa.int64(),
        "modified": pa.string(),
        "attempts": pa.int32(),
    }
)


@dataclass(frozen=True)
class Difference:
    """One listing, sorted by what is to be done."""

    to_embed: pa.Table
    num_new: int
    num_changed: int
    num_unchanged: int


def diff(listing: pa.Table, known: pa.Table) -> Difference:
    """Sort a listing by comparing size and time of change with what the store knows.

    Args:
        listing: listed items.
        known: the items of `KNOWN` that the store or the run's journal holds, each once.

    Returns:
        The items to embed with a column `attempts`, counted from 1.
    """
    numbers = pa.array(range(listing.num_rows), pa.int64())
    listed = listing.select(["item_id", "size_bytes", "modified"]).append_column("number", numbers)
    renamed = known.select(KNOWN.names).rename_columns(["item_id", "known_size", "known_modified", "attempts"])
    both = listed.join(renamed, "item_id", join_type="left outer").sort_by("number")
    is_known = pc.is_valid(both["attempts"])
    same = pc.and_(_equal(both["size_bytes"], both["known_size"]), _equal(both["modified"], both["known_modified"]))
    unchanged = pc.and_(is_known, same)
    attempts = pc.add(pc.fill_null(both["attempts"], 0), pa.scalar(1, pa.int32()))
    num_unchanged = pc.sum(unchanged).as_py() or 0
    num_known = pc.sum(is_known).as_py() or 0
    return Difference(
        to_embed=listing.append_column("attempts", attempts).filter(pc.invert(unchanged)),
        num_new=listing.num_rows - num_known,
        num_changed=num_known - num_unchanged,
        num_unchanged=num_unchanged,
    )


def _equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ChunkedArray:
    """Equal values, two nulls counted as equal."""
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)
