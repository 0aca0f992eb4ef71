"""File of queries: `query` and `item_id`, one right answer in each row, and an optional column to group by."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.errors import ConfigError
from embedder.evaluation.images import ImageTable
from embedder.evaluation.query_sets import QuerySet, check_group, group_names, item_groups, table_columns
from embedder.retrieval.store_api import Store
from embedder.sources.table_files import Table, find_table
from embedder.sources.table_formats import FORMATS
from embedder.store.hash_sample import lowest_keys

QUERY, ITEM_ID, GROUP = "query", "item_id", "group"
TEXT_COLUMNS = frozenset({QUERY, ITEM_ID})
# A file made for this store may name a few items that have left it since; one of another store names many.
MAX_UNKNOWN_SHARE = 0.05
NUM_EXAMPLES = 3


@dataclass(frozen=True)
class QueryFile:
    """Rows of a file: right answers, in order.

    Attributes:
        path: the file.
        texts: R queries, the same one several times where several items are right.
        item_ids: R ids.
        groups: R names, where the file has that column.
        num_unknown: rows left out, because the store has no image of their item.
    """

    path: str
    texts: list[str]
    item_ids: list[str]
    groups: list[str] | None
    num_unknown: int = 0


def read_query_file(path: str, group: str | None = None) -> QueryFile:
    """Read Parquet, CSV, TSV, JSON Lines or a Delta table.

    Args:
        path: the file, or a folder of files of one format.
        group: column to group by; `group` by default, where the file has it. A column that it lacks may be one of the
            store.

    Raises:
        SourceError: nothing is there, or it can't be read.
        ConfigError: a column is missing, a cell is empty, or there is no row.
    """
    table = find_table(path)
    schema = _schema(table)
    if missing := sorted(TEXT_COLUMNS - set(schema.names)):
        raise ConfigError(
            f"--queries {path}: there is no column {missing[0]!r}, only {', '.join(schema.names) or 'none'}; a file of "
            f"queries has the columns {QUERY} and {ITEM_ID}"
        )
    own_group = group or GROUP if (group or GROUP) in schema.names else None
    rows = list(_rows(path, table, schema, own_group))
    if not rows:
        raise ConfigError(f"--queries {path}: it holds no query; write one row for each query and right item")
    texts, item_ids, values = (list(column) for column in zip(*rows, strict=True))
    return QueryFile(path, texts, item_ids, None if own_group is None else group_names(values))


def _schema(table: Table) -> pa.Schema:
    if table.schema is not None or not table.files:
        return table.schema if table.schema is not None else pa.schema([])
    return FORMATS[table.suffix].schema(table.files[0].uri, TEXT_COLUMNS)


def _rows(path: str, table: Table, schema: pa.Schema, group: str | None) -> Iterator[tuple[str, str, Any]]:
    fields = {name: pa.field(name, pa.string()) for name in (QUERY, ITEM_ID)}
    if group is not None:
        fields.setdefault(group, schema.field(group))
    number = 0
    for file in table.files:
        has_own_schema = table.schema is not None
        for chunk in FORMATS[table.suffix].chunks(
            file.uri, pa.schema(list(fields.values())), TEXT_COLUMNS, has_own_schema
        ):
            columns = [chunk.columns[name].to_pylist() for name in (QUERY, ITEM_ID, group or QUERY)]
            for text, item_id, value in zip(*columns, strict=True):
                number += 1
                _check_row(f"--queries {path}: row {number}", text, item_id)
                yield text.strip(), item_id, value


def _check_row(where: str, text: str | None, item_id: str | None) -> None:
    if text is None or not text.strip():
        raise ConfigError(f"{where}: the query is empty; write what the image shows, or leave the row out")
    if not item_id:
        raise ConfigError(f"{where}: item_id is empty; write the id of a right item, or leave the row out")


def known_only(found: QueryFile, images: ImageTable) -> QueryFile:
    """Leave out rows whose item the store has no image of, as long as they are few.

    Raises:
        ConfigError: more than `MAX_UNKNOWN_SHARE` of the rows.
    """
    is_known = images.numbers_of(pa.array(found.item_ids, pa.string())) >= 0
    unknown = [item_id for item_id, known in zip(found.item_ids, is_known, strict=True) if not known]
    if len(unknown) > MAX_UNKNOWN_SHARE * len(is_known):
        examples = ", ".join(dict.fromkeys(unknown[:NUM_EXAMPLES]))
        raise ConfigError(
            f"--queries {found.path}: the store has no image of {len(unknown):,} of {len(is_known):,} item ids, such "
            f"as {examples}; at most {MAX_UNKNOWN_SHARE:.0%} may be missing: write ids as `embedder search` prints "
            "them, or check that this is the store you meant"
        )
    keep = np.flatnonzero(is_known)
    groups = None if found.groups is None else [found.groups[row] for row in keep]
    kept = [[column[row] for row in keep] for column in (found.texts, found.item_ids)]
    return QueryFile(found.path, kept[0], kept[1], groups, len(unknown))


def file_query_set(found: QueryFile, store: Store, num_queries: int | None, group: str | None) -> QuerySet:
    """Encode a file's queries; of more than `num_queries`, those with the lowest hashes.

    Args:
        found: the file.
        store: encodes the texts.
        num_queries: most queries; None for all.
        group: column to group by.

    Raises:
        ConfigError: neither the file nor the store has the column to group by.
    """
    texts = list(lowest_keys([found.texts], num_queries if num_queries is not None else len(found.texts)))
    numbers = {text: number for number, text in enumerate(texts)}
    rows = [row for row, text in enumerate(found.texts) if text in numbers]
    item_ids = [found.item_ids[row] for row in rows]
    groups = None if found.groups is None else [found.groups[row] for row in rows]
    if groups is None and group is not None:
        check_group(group, table_columns(store))
        groups = item_groups(store, item_ids, group)
    queries = np.array([numbers[found.texts[row]] for row in rows], np.int64)
    return QuerySet(found.path, texts, store.encode_text(texts), queries, item_ids, groups)
