"""Lists all items of all sources of a run as Arrow tables."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, carried_schema
from embedder.config_toml.run_sections import SourceConfig, WebConfig
from embedder.config_toml.sections import JoinConfig
from embedder.errors import SourceError
from embedder.sources.captions import ANY_CAPTION, IN_FILES, PLACES_MARK, SIDECAR_ALONE, CaptionRules
from embedder.sources.column_keys import format_assignment, key_of, setting
from embedder.sources.join import OpenJoin, open_joins
from embedder.sources.listing_schema import ROW_SCHEMA, Listing
from embedder.sources.selection import LeftOut, Selection
from embedder.sources.source_kinds import KINDS, detect_kind
from embedder.sources.uris import normalise_source
from embedder.sources.web.changes import with_states
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables.arrow_lookup import replace_column

LISTING_SCHEMA = pa.schema([ROW_SCHEMA.field(0), pa.field("source", pa.string()), *list(ROW_SCHEMA)[1:]])
"""Columns of a listing; carryover columns follow under the prefix `CARRIED`. `size_bytes` is null if it can't be known
without reading.
"""


def list_sources(
    sources: Sequence[SourceConfig],
    *,
    rows_per_chunk: int = 10_000,
    own: Collection[str] = (),
    left_out: LeftOut | None = None,
    web: WebConfig | None = None,
    joins: Sequence[JoinConfig] = (),
    unique: bool = True,
    captions: CaptionRules = ANY_CAPTION,
) -> Iterator[pa.Table]:
    """List the items of several sources, in their order, as tables of LISTING_SCHEMA and all carryover columns.

    The call itself opens the sources: a missing source or one of a wrong type is a SourceError before the first row.
    Ids are unique: the first of several equal ones is the item, and the others are rejects with the id
    `ID#duplicate-<n>`. With `unique` False, ids stay as they are, for `with_unique_ids`, and none is kept in memory.
    The name of each of several sources prefixes its ids (`name:id`). `own` are absolute paths and URIs that the run
    itself writes, never items; `left_out` counts other files while the tables are read. `web` None asks no servers.
    """
    left_out = LeftOut() if left_out is None else left_out
    listings = [(source, open_source(source, own, left_out, captions)) for source in sources]
    schema = pa.schema([*LISTING_SCHEMA, *_unified_carryover(listings)])
    opened = open_joins(joins, carried_schema(schema), left_out)
    labelled = (table for source, listing in listings for table in _label(source.name, listing, schema, unique=unique))
    return rechunk(_complete(labelled, web, opened, captions), rows_per_chunk)


def list_given(
    listing: Listing,
    name: str,
    *,
    left_out: LeftOut,
    web: WebConfig | None = None,
    joins: Sequence[JoinConfig] = (),
    captions: CaptionRules = ANY_CAPTION,
) -> Iterator[pa.Table]:
    """List a given listing as `list_sources` does; `name` prefixes the ids unless empty. May raise a SourceError."""
    schema = pa.schema([*LISTING_SCHEMA, *(column.with_name(CARRIED + column.name) for column in listing.carryover)])
    opened = open_joins(joins, listing.carryover, left_out)
    return _complete(_label(name, listing, schema), web, opened, captions)


def _complete(
    tables: Iterator[pa.Table], web: WebConfig | None, joins: Sequence[OpenJoin], captions: CaptionRules
) -> Iterator[pa.Table]:
    tables = (with_states(table, web or WebConfig()) for table in tables)
    for join in joins:
        tables = join.apply(tables)
    return tables if captions.places == SIDECAR_ALONE else (_with_places(table, captions) for table in tables)


def _with_places(table: pa.Table, captions: CaptionRules) -> pa.Table:
    """Add to `modified` where captions are looked for, of items that may have one there."""
    modified = table["modified"]
    marked = pc.binary_join_element_wise(pc.fill_null(modified, ""), captions.mark, PLACES_MARK)
    if not set(IN_FILES) & set(captions.places):
        marked = pc.if_else(pc.is_valid(table["described_by"]), marked, modified)
    return replace_column(table, "modified", marked)


def open_source(
    source: SourceConfig, own: Collection[str], left_out: LeftOut, captions: CaptionRules = ANY_CAPTION
) -> Listing:
    """Detect the kind of a source and start to list it; a SourceError if it can't be listed as configured."""
    _check_names(source.path, key_of(source.columns, "carryover"), source.carryover)
    path = normalise_source(source.path)
    uncounted = Selection(source, path, own, LeftOut())
    kind = source.kind if source.kind != "auto" else detect_kind(path, uncounted)
    entry = KINDS[kind]
    if "columns" not in entry.keys and (given := source.columns.model_dump(exclude_none=True)):
        named = setting(source.columns, given)
        raise SourceError(
            f"{source.path}: {named} names columns of a table, and this is {kind}; take it out, or set "
            f"{format_assignment(source.columns, 'kind', 'table')}"
        )
    if (source.include and "include" not in entry.keys) or (source.exclude and "exclude" not in entry.keys):
        include, exclude = (key_of(source.columns, key) for key in ("include", "exclude"))
        raise SourceError(
            f"{source.path}: `{include}` and `{exclude}` choose files of a folder, and this is {kind}; take them out, "
            f"or set {format_assignment(source.columns, 'kind', 'files')}"
        )
    if source.carryover and "carryover" not in entry.keys:
        carryover = key_of(source.columns, "carryover")
        raise SourceError(
            f"{source.path}: {kind} have no columns to carry over; use a table, or take `{carryover}` out"
        )
    if kind == "files":
        _check_names(source.path, "captions.columns", captions.columns)
    return entry.list_source(source, path, Selection(source, path, own, left_out, captions))


def _check_names(path: str, key: str, names: Sequence[str]) -> None:
    for name in names:
        if name in EMBEDDINGS.names:
            raise SourceError(f"{path}: {key} {name!r} is already a column of the embeddings table; rename it there")
    if len(set(names)) < len(names):
        raise SourceError(f"{path}: {key} names a column twice; name each once")


def _unified_carryover(listings: Iterable[tuple[SourceConfig, Listing]]) -> list[pa.Field]:
    fields: dict[str, tuple[pa.Field, str]] = {}
    for source, listing in listings:
        for field in listing.carryover:
            first, path = fields.setdefault(field.name, (field, source.path))
            if first.type != field.type:
                raise SourceError(
                    f"{source.path}: carryover {field.name!r} is {field.type}, and {first.type} in {path}; "
                    "one column has one type, so cast it in one of them"
                )
    return [pa.field(CARRIED + field.name, field.type) for field, _ in fields.values()]


def _label(name: str | None, listing: Listing, schema: pa.Schema, *, unique: bool = True) -> Iterator[pa.Table]:
    """Convert a source's tables to the common schema, with its name and, if `unique`, with unique ids."""
    seen: set[str] = set()
    for rows in listing.tables:
        table = reject_duplicates(rows, seen) if unique and not listing.unique_ids else rows
        columns = {column: table[column] for column in table.schema.names}
        columns["source"] = pa.repeat(pa.scalar(name or ""), table.num_rows)
        if name:
            columns["item_id"] = pc.binary_join_element_wise(name, table["item_id"], ":")
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(table.num_rows, field.type) for field in schema
        ]
        yield pa.table(arrays, schema=schema)


def with_unique_ids(listed: pa.Table) -> pa.Table:
    """Turn items whose id occurs earlier into rejects; the table must hold all items that share such ids."""
    ids = listed["item_id"]
    return listed if pc.count_distinct(ids).as_py() == len(ids) else reject_duplicates(listed, set())


def reject_duplicates(rows: pa.Table, seen: set[str]) -> pa.Table:
    """Turn rows whose id was seen before into rejects; all ids are added to `seen`, about 100 bytes each."""
    ids = rows["item_id"].to_pylist()
    replaced: dict[int, str] = {}
    for index, item_id in enumerate(ids):
        if item_id in seen:
            replaced[index] = _free_id(item_id, seen)
        seen.add(replaced.get(index, item_id))
    return _with_rejects(rows, ids, replaced) if replaced else rows


def _free_id(item_id: str, seen: set[str]) -> str:
    number = 1
    while (candidate := f"{item_id}#duplicate-{number}") in seen:
        number += 1
    return candidate


def _with_rejects(rows: pa.Table, ids: list[str], replaced: dict[int, str]) -> pa.Table:
    types, errors = rows["error_type"].to_pylist(), rows["error"].to_pylist()
    sources = rows["source"].to_pylist() if "source" in rows.schema.names else [""] * len(ids)
    new_ids = list(ids)
    for index, new_id in replaced.items():
        new_ids[index] = new_id
        types[index] = "DuplicateId"
        own_id = ids[index].removeprefix(f"{sources[index]}:") if sources[index] else ids[index]
        errors[index] = f"the id {own_id!r} was listed before; ids must be unique in a source"
    for name, values in (("item_id", new_ids), ("error_type", types), ("error", errors)):
        rows = replace_column(rows, name, pa.array(values, pa.string()))
    return rows


def rechunk(tables: Iterable[pa.Table], rows_per_chunk: int) -> Iterator[pa.Table]:
    """Cut tables into chunks of one size, the last one smaller; every column is contiguous."""
    waiting: pa.Table | None = None
    for table in tables:
        waiting = table if waiting is None else pa.concat_tables([waiting, table])
        while waiting.num_rows >= rows_per_chunk:
            yield waiting.slice(0, rows_per_chunk).combine_chunks()
            waiting = waiting.slice(rows_per_chunk)
    if waiting is not None and waiting.num_rows:
        yield waiting.combine_chunks()
