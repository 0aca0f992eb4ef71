"""Records of items from finished rows: each item's state, and whether its new or its published rows are valid."""

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import LEFT_OUT

# Columns of a listing about items that are published, or were and may be taken over; rows carry them through all steps.
KNOWN_COLUMNS = {"known_version": pa.string(), "known_vectors": pa.int32()}
HELD_VERSIONS = pa.field("held_versions", pa.list_(pa.string()))


def split_records(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Decide, for each item whose last row is here (the one with `num_vectors`), which rows are valid.

    The published rows stay if the content is equal. They also stay if an item that had all its vectors can't be
    embedded completely any more, or one that had some can't be embedded at all: such an item is `stale`. An item whose
    content is one of `held_versions` gets a new record without rows, so it is incomplete until they are copied.

    `rows` are finished rows (`embedder.batch_schema`). They may have `known_version` (content of the published rows,
    null if those were incomplete) and `known_vectors` (their number), and `held_versions`, contents that a publication
    has otherwise: one that was rolled back, or the present one under another id.

    Returns the rows of items with new rows, and of those whose published rows stay, with `state` and `stale`;
    `num_vectors` and `content_version` of the latter are the published ones.
    """
    rows = rows.filter(pc.is_valid(rows["num_vectors"]))
    is_reject = pc.is_valid(rows["error_type"])
    version, num_published = (_optional(rows, name, kind) for name, kind in KNOWN_COLUMNS.items())
    num_published = pc.fill_null(num_published, 0)
    has_more = pc.or_(pc.is_valid(version), pc.equal(rows["num_vectors"], 0))
    stale = pc.and_(is_reject, pc.and_(pc.greater(num_published, 0), has_more))
    # A file that was an image and no longer is one was damaged or replaced: that is a reject.
    is_left_out = pc.and_(pc.is_in(rows["error_type"], value_set=pa.array(LEFT_OUT)), pc.invert(stale))
    unchanged = pc.fill_null(_optional(rows, "unchanged", pa.bool_()), False)
    is_known = pc.fill_null(pc.equal(rows["content_version"], version), False)
    held = pc.and_(unchanged, pc.and_(_is_held(rows), pc.invert(is_known)))
    kept = pc.or_(stale, pc.and_(unchanged, pc.invert(held)))
    values = {
        "num_vectors": pc.if_else(kept, num_published, pc.if_else(held, 1, rows["num_vectors"])).cast(pa.int32()),
        "content_version": pc.if_else(kept, pc.coalesce(version, rows["content_version"]), rows["content_version"]),
        "state": pc.if_else(is_left_out, "left_out", pc.if_else(is_reject, "rejected", "embedded")),
        "stale": stale,
    }
    for name, column in values.items():
        rows = (rows.drop_columns([name]) if name in rows.schema.names else rows).append_column(name, column)
    return rows.filter(pc.invert(kept)), rows.filter(kept)


def _optional(rows: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    return rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows, kind)


def _is_held(rows: pa.Table) -> pa.Array:
    versions = _optional(rows, HELD_VERSIONS.name, HELD_VERSIONS.type)
    parents = pc.list_parent_indices(versions)
    found = pc.equal(pc.list_flatten(versions), rows["content_version"].take(parents))
    return pc.is_in(pa.array(range(rows.num_rows)), value_set=parents.filter(found).cast(pa.int64()))
