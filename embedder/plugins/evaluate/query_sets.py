"""Queries with their right items: the store's own captions, or a file of queries.

A file has the columns `query` and `item_id`, one right answer in each row, and an optional column to group by. A
column `relevance` grades the answers; 0 means judged not right. The columns `position` and `clicked` make it a log of
what was shown, from which `embedder.plugins.evaluate.clicks` estimates the grades.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import ConfigError, StoreError, check_argument
from embedder.plugins.evaluate.clicks import grades_of_clicks
from embedder.plugins.evaluate.exact import Ints
from embedder.plugins.evaluate.published_images import ImageTable
from embedder.quantities import percent, plural
from embedder.retrieval.row_metadata import to_value
from embedder.retrieval.store_api import Store
from embedder.sources.table_files import Table, find_table
from embedder.sources.uris import normalise_source
from embedder.store.journal.hash_sample import SampledPart, lowest_keys, published_pieces
from embedder.store.tables.arrow_tensors import unpack_vectors
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats

OWN_CAPTIONS = "captions of the store"
QUERY, ITEM_ID, GROUP, RELEVANCE = "query", "item_id", "group", "relevance"
POSITION, CLICKED = "position", "clicked"
TEXT_COLUMNS = frozenset({QUERY, ITEM_ID})
# A file made for this store may name a few items that have left it since; a file for another store names many.
MAX_UNKNOWN_SHARE = 0.05
NUM_EXAMPLES = 3
MAX_RELEVANCE = 10  # gains are 2 to the relevance
MAX_POSITION = 10_000
NO_GROUP = "(none)"
ONE_TOWER = (
    "store {address}: its model has no {side} tower, and an evaluation asks for images by texts; evaluate a store "
    "whose model has both towers"
)


@dataclass(frozen=True)
class QuerySet:
    """Q queries, each once, with L2-normalised vectors (Q, E), and R right answers.

    `queries`, int64 (R,), `item_ids`, `groups` (None without groups) and `gains` (above 0; None if each answer is
    simply right) are of the answers. `num_unknown` rows of a file were left out, as the store has no image of their
    item.
    """

    source: str
    texts: list[str]
    vectors: Floats
    queries: Ints
    item_ids: list[str]
    groups: list[str] | None
    num_unknown: int = 0
    gains: list[float] | None = None


def check_counts(**counts: int | None) -> None:
    """Raise `ArgumentTypeError` or `ConfigError` unless each count, by its name, is a whole number above 0, or None."""
    for name, count in counts.items():
        if count is not None:
            check_argument(name, count, Integral, "a whole number, as 10")
            if count < 1:
                raise ConfigError(f"{name} is {count}; give a whole number above 0, as 10")


def own_captions(store: Store, num_queries: int, group: str | None = None) -> QuerySet:
    """Take the captions of the store's own images as queries.

    Identical captions are one query, for which any of their images is right. If there are more than `num_queries`,
    those with the lowest hashes are taken, so that every version has the same, except for new captions. Raises
    `ConfigError` if the table has no such column to group by; `StoreError` if no image has a caption, or the model has
    only one tower.
    """
    parts = list(published_pieces(store.files, store.current.embeddings))
    if group is not None:
        check_group(group, store)
    own_group = group if group in _columns_of_table(store) else None  # else a column of another model
    captions = (_complete(part)["caption"].to_pylist() for part in parts)
    positions = lowest_keys(captions, num_queries)
    if not positions:
        raise _lack_of_captions(store, parts)
    numbers = {text: number for number, text in enumerate(positions)}
    chosen = [parts[position] for position in sorted(set().union(*positions.values()))]
    vectors, answers = _read_answers(chosen, numbers, own_group)
    item_ids = [item_id for _, item_id in answers]
    groups = group_names(list(answers.values()))
    if group is not None and own_group is None:
        groups = item_groups(store, item_ids, group)
    return QuerySet(
        OWN_CAPTIONS,
        list(numbers),
        np.stack([vectors[number] for number in range(len(numbers))]),
        np.array([number for number, _ in answers], np.int64),
        item_ids,
        None if group is None else groups,
    )


def _lack_of_captions(store: Store, parts: Sequence[SampledPart]) -> StoreError:
    """Say why no caption can be a query."""
    if any(_has_captions_alone(part) for part in parts):
        return StoreError(ONE_TOWER.format(address=store.files.address, side="text"))
    return StoreError(
        f"store {store.files.address}: no image in it has a caption to ask with; give --queries FILE with the "
        "columns query and item_id"
    )


def _read_answers(
    parts: Sequence[SampledPart], numbers: Mapping[str, int], group: str | None
) -> tuple[dict[int, Floats], dict[tuple[int, str], Any]]:
    """Read the vector of each query, float32 (E,), and the value to group by of each query with a right item.

    `numbers` are the queries' by their texts; without a `group` column all values are None.
    """
    vectors: dict[int, Floats] = {}
    answers: dict[tuple[int, str], Any] = {}
    for part in parts:
        rows = _complete(part, "item_id", *([group] if group else []))
        rows = rows.filter(pc.is_in(rows["caption"], value_set=pa.array(list(numbers), pa.string())))
        texts, item_ids = rows["caption"].to_pylist(), rows["item_id"].to_pylist()
        values = map(to_value, rows[group]) if group else [None] * rows.num_rows
        for text, item_id, value, vector in zip(
            texts, item_ids, values, unpack_vectors(rows["text_embedding"]), strict=True
        ):
            vectors.setdefault(numbers[text], vector)
            answers.setdefault((numbers[text], item_id), value)
    return vectors, answers


def group_names(values: Sequence[Any]) -> list[str]:
    """Values of any column as names of groups."""
    return [NO_GROUP if value is None or value == "" else str(value) for value in values]


def item_groups(store: Store, item_ids: list[str], group: str) -> list[str]:
    """Group of each item, from a column of the embeddings table or of another model; of a clip, its first segment's."""
    rows = store.to_arrow(["item_id", group])
    rows = rows.filter(pc.is_in(rows["item_id"], value_set=pa.array(item_ids, pa.string())))
    values = [to_value(each) for each in rows[group]]
    by_id = dict(zip(reversed(rows["item_id"].to_pylist()), reversed(values), strict=True))
    return group_names([by_id.get(item_id) for item_id in item_ids])


def check_group(group: str, store: Store) -> None:
    """Refuse (ConfigError) to group by a column of vectors, or one that neither the table nor another model has."""
    fit = [name for name in store.columns if not name.endswith("_embedding")]
    if group not in fit:
        raise ConfigError(f"--group {group}: there is no such column; group by one of {', '.join(fit)}")


def _columns_of_table(store: Store) -> list[str]:
    schema = RecordTable(store.files, "embeddings", store.current.embeddings).schema
    return list(schema.names) if schema is not None else []


def _has_captions_alone(part: SampledPart) -> bool:
    """Whether a part file has captions without vectors, as written by a model without a text tower."""
    rows = part.read(["caption", "text_embedding"])
    return bool(pc.any(pc.and_(pc.is_valid(rows["caption"]), pc.is_null(rows["text_embedding"]))).as_py())


def _complete(part: SampledPart, *columns: str) -> pa.Table:
    """Rows of one part file that have vectors of both caption and image, with these and the given columns."""
    names = ("caption", "image_embedding", "text_embedding")
    rows = part.read(list(dict.fromkeys([*names, *columns])))
    for name in names:
        rows = rows.filter(pc.is_valid(rows[name]))
    return rows


@dataclass(frozen=True)
class QueryFile:
    """Right answers of a file, in order; `query` is repeated if several items are right.

    `group` is there if the file has it, `relevance`, float64 above 0, if it has grades or clicks. `num_irrelevant`
    pairs were judged not right, or found so by clicks.
    """

    path: str
    rows: pa.Table
    num_irrelevant: int = 0


def read_query_file(path: str, group: str | None = None) -> QueryFile:
    """Read Parquet, CSV, TSV, JSON Lines or a Delta table: a file, or a folder of files of one format.

    `group` is the column to group by; by default `group`, if the file has it. A column that it lacks may be one of the
    store. Raises `SourceError` if nothing is there, or it can't be read; `ConfigError` if a column is missing, a cell
    is empty, or there is no row.
    """
    table = find_table(normalise_source(path))
    schema = table.read_schema(TEXT_COLUMNS)
    if missing := sorted(TEXT_COLUMNS - set(schema.names)):
        raise ConfigError(
            f"--queries {path}: there is no column {missing[0]!r}, only {', '.join(schema.names) or 'none'}; a file of "
            f"queries has the columns {QUERY} and {ITEM_ID}"
        )
    own_group = group or GROUP if (group or GROUP) in schema.names else None
    is_log = {POSITION, CLICKED} <= set(schema.names)
    judged_by = [POSITION, CLICKED] if is_log else [name for name in (RELEVANCE,) if name in schema.names]
    wanted = dict.fromkeys([QUERY, ITEM_ID, *judged_by, *([own_group] if own_group is not None else [])])
    rows = list(_rows(path, table, schema, list(wanted)))
    if not rows:
        raise ConfigError(f"--queries {path}: it holds no query; write one row for each query and right item")
    if is_log:
        try:
            rows = grades_of_clicks(rows, own_group)
        except ConfigError as error:
            raise ConfigError(f"--queries {path}: {error}") from None
    judged = [row for row in rows if row.get(RELEVANCE, 1.0) > 0]
    if not judged:
        raise ConfigError(f"--queries {path}: no item is right for any query; grade some of them above 0")
    columns = {QUERY: [row[QUERY] for row in judged], ITEM_ID: [row[ITEM_ID] for row in judged]}
    if own_group is not None:
        columns[GROUP] = group_names([row[own_group] for row in judged])
    if RELEVANCE in judged[0]:
        columns[RELEVANCE] = [row[RELEVANCE] for row in judged]
    return QueryFile(path, pa.table(columns), len(rows) - len(judged))


def _rows(path: str, table: Table, schema: pa.Schema, names: list[str]) -> Iterator[dict[str, Any]]:
    fields = {name: schema.field(name) for name in names} | {
        name: pa.field(name, pa.string()) for name in (QUERY, ITEM_ID)
    }
    number = 0
    for _, chunk in table.chunks(pa.schema([fields[name] for name in names]), TEXT_COLUMNS):
        columns = [chunk.columns[name].to_pylist() for name in names]
        for values in zip(*columns, strict=True):
            number += 1
            row, where = dict(zip(names, values, strict=True)), f"--queries {path}: row {number}"
            _check_row(where, row[QUERY], row[ITEM_ID])
            yield row | {QUERY: row[QUERY].strip()} | _judgement(where, row)


def _judgement(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Grade of a row, or its position and click, as numbers; ConfigError if a cell is invalid."""
    if RELEVANCE in row:
        return {RELEVANCE: _number(where, RELEVANCE, row[RELEVANCE], 0, MAX_RELEVANCE)}
    if POSITION in row:
        position = _number(where, POSITION, row[POSITION], 1, MAX_POSITION)
        if position % 1:
            raise ConfigError(f"{where}: {POSITION} is {position:g}; write a whole number, 1 for the first")
        return {POSITION: int(position), CLICKED: _number(where, CLICKED, row[CLICKED], 0, 1) > 0}
    return {}


def _number(where: str, name: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(f"{where}: {name} is {str(value)!r}; write a number from {least:g} to {most:g}")
    return number


def _check_row(where: str, text: str | None, item_id: str | None) -> None:
    if text is None or not text.strip():
        raise ConfigError(f"{where}: the query is empty; write what the image shows, or leave the row out")
    if not item_id:
        raise ConfigError(f"{where}: item_id is empty; write the id of a right item, or leave the row out")


def _known_rows(found: QueryFile, images: ImageTable) -> pa.Table:
    """Leave out rows whose item has no image in the store; ConfigError if they are more than `MAX_UNKNOWN_SHARE`."""
    is_known = images.numbers_of(found.rows[ITEM_ID]) >= 0
    unknown = found.rows[ITEM_ID].filter(pa.array(~is_known)).to_pylist()
    if len(unknown) > MAX_UNKNOWN_SHARE * len(is_known):
        examples = ", ".join(dict.fromkeys(unknown[:NUM_EXAMPLES]))
        raise ConfigError(
            f"--queries {found.path}: the store has no image of {len(unknown):,} of "
            f"{plural(len(is_known), 'item id')}, such as {examples}; at most {percent(MAX_UNKNOWN_SHARE)} may be "
            "missing: write ids as `embedder search` prints them, or check that this is the store you meant"
        )
    return found.rows.filter(pa.array(is_known))


def file_query_set(
    found: QueryFile, store: Store, images: ImageTable, num_queries: int | None, group: str | None
) -> QuerySet:
    """Encode a file's queries; of more than `num_queries`, those with the lowest hashes (None: all).

    Rows whose item has no image in the store are left out. Raises `ConfigError` if neither the file nor the store has
    the column to group by, or too many items have no image.
    """
    rows = _known_rows(found, images)
    num_unknown = found.rows.num_rows - rows.num_rows
    texts = list(lowest_keys([rows[QUERY].to_pylist()], num_queries if num_queries is not None else rows.num_rows))
    rows = rows.filter(pc.is_in(rows[QUERY], value_set=pa.array(texts, pa.string())))
    item_ids = rows[ITEM_ID].to_pylist()
    groups = rows[GROUP].to_pylist() if GROUP in rows.column_names else None
    if groups is None and group is not None:
        check_group(group, store)
        groups = item_groups(store, item_ids, group)
    queries = pc.index_in(rows[QUERY], value_set=pa.array(texts, pa.string())).to_numpy().astype(np.int64)
    gains = rows[RELEVANCE].to_pylist() if RELEVANCE in rows.column_names else None
    return QuerySet(found.path, texts, store.encode_text(texts), queries, item_ids, groups, num_unknown, gains)
