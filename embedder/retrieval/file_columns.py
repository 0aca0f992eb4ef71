"""Columns that tell of the files of items: SQL over what each row has, computed where a condition reads them."""

import pyarrow as pa
import pyarrow.compute as pc

from embedder.sources import uris

ID, MODIFIED, SIZE = "item_id", "__modified", "__size_bytes"  # the last two of the items table, beside each row

OF_IDS = {
    "folder": "rtrim(parse_dirpath(item_id, 'forward_slash'), '/')",
    "file_name": "parse_filename(item_id, false, 'forward_slash')",
}
"""Columns made of ids: that of a file is its path below the folder of its source."""
SUFFIX = r"nullif(lower(regexp_extract({}, '\.([A-Za-z0-9]{{1,5}})$', 1, 's')), '')"
PLACE = rf"""CASE WHEN ends_with(uri, item_id) OR regexp_matches(uri, '({uris.CELL}|{uris.ROW})$') THEN item_id
    WHEN regexp_matches(uri, '{uris.MEMBER}$') THEN regexp_extract(uri, '{uris.MEMBER}$', 1)
    WHEN regexp_matches(uri, '^https?://') THEN regexp_extract(uri, '^[^?#]*')
    ELSE coalesce(uri, item_id) END"""
OF_ITEMS = {
    "file_date": f"TRY_CAST(split_part({MODIFIED}, '|', 1) AS TIMESTAMPTZ)",
    "file_size": f"CAST({SIZE} AS BIGINT)",
}
"""Columns made of the items table."""


def file_columns(names: list[str]) -> dict[str, str]:
    """SQL of the columns of files beside those of a table; a name that it has itself stays its own.

    Args:
        names: columns of the table.
    """
    taken = {name.lower() for name in names}
    file_type = {"file_type": SUFFIX.format(PLACE if "uri" in taken else ID)}
    return {name: sql for name, sql in (OF_IDS | file_type | OF_ITEMS).items() if ID in taken and name not in taken}


def with_items(rows: pa.Table, items: pa.Table) -> pa.Table:
    """Rows with the time and the size of each one's file.

    Args:
        rows: of the embeddings table.
        items: `item_id`, `modified` and `size_bytes` of each item.
    """
    places = pc.index_in(rows[ID], value_set=items[ID].combine_chunks())
    for name, column in ((MODIFIED, "modified"), (SIZE, "size_bytes")):
        rows = rows.append_column(name, pc.take(items[column], places))
    return rows
