"""Joins rows of another table to listed items: captions, and columns that are carried over.

The table's keys and the wanted columns stay in memory during the listing. A row's values are part of its items'
`modified`, so a changed row changes only its own items. Captions count as content, so items with a changed caption are
embedded again; if only the columns changed, the file is hashed, found unchanged, and the columns are rewritten
(`embedder.store.journal.metadata_updates`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED
from embedder.config_toml.sections import JoinConfig
from embedder.errors import SourceError
from embedder.quantities import plural
from embedder.sources.columns import is_text, plain_type
from embedder.sources.selection import LeftOut
from embedder.sources.table_files import find_table
from embedder.sources.table_plan import require_column
from embedder.sources.unicode_forms import to_nfc
from embedder.sources.uris import normalise_source
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables.arrow_lookup import positions, replace_column

NUM_EXAMPLES = 3
CAPTION = "caption"
JOINED = "|join:"
"""Precedes the digest of a row's values in `modified`."""


@dataclass(frozen=True)
class OpenJoin:
    """The table of a [[join]], read and checked.

    `keys` are strings without duplicates. `values` are the joined columns, of the same length; the caption comes last,
    under `CAPTION`. `digests` are those of each row's values. `left_out` counts the items without a row.
    """

    join: JoinConfig
    keys: pa.ChunkedArray
    values: pa.Table
    digests: pa.Array
    left_out: LeftOut
    examples: list[str] = field(default_factory=list)

    @cached_property
    def nfc_keys(self) -> pa.ChunkedArray:
        """Return the keys in NFC, null where two keys differ only in their Unicode form."""
        keys = to_nfc(self.keys)
        counts = pc.value_counts(keys)
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
        return pc.if_else(pc.is_in(keys, value_set=twice), pa.scalar(None, keys.type), keys)

    @property
    def carried(self) -> pa.Schema:
        """Return the carried columns under their own names."""
        return pa.schema([self.values.schema.field(number) for number in range(len(self.join.columns))])

    def apply(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Join a listing's tables (`LISTING_SCHEMA`, then carried columns); a SourceError if rows are missing."""
        num_missing = 0
        for table in tables:
            place, is_meant = self._places(table)
            is_missing = pc.and_(pc.and_(is_meant, pc.is_null(place)), pc.is_null(table["error_type"]))
            if missing := pc.sum(is_missing).as_py() or 0:
                num_missing += missing
                found = table["item_id"].filter(is_missing).slice(0, NUM_EXAMPLES - len(self.examples))
                self.examples.extend(found.to_pylist())
            yield self._join(table, place)
        if num_missing and self.join.missing == "error":
            raise SourceError(
                f"{self.join.path}: [[join]]: no row for {plural(num_missing, 'item')} (first: "
                f'{_format_keys(self.examples)}); add rows for them, or write missing = "null" to leave their '
                "columns empty"
            )
        if num_missing:
            self.left_out.unjoined[self.join.path] += num_missing

    def _places(self, table: pa.Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Return each item's row, null if there is none, and whether the join applies to the item."""
        source, left = self.join.source, self.join.on.left
        is_meant = pc.equal(table["source"], source or "") if source else pc.is_valid(table["item_id"])
        if left is not None:
            ids = table[CARRIED + left].cast(pa.string())
        elif source is not None:
            ids = pc.utf8_slice_codeunits(table["item_id"], len(source) + 1)
        else:
            ids = table["item_id"]
        place = positions(ids, self.keys)
        if place.null_count:
            by_form = positions(to_nfc(ids), self.nfc_keys)
            place = pc.coalesce(place, pc.if_else(pc.is_valid(ids), by_form, pa.scalar(None, by_form.type)))
        return pc.if_else(is_meant, place, pa.scalar(None, place.type)), is_meant

    def _join(self, table: pa.Table, place: pa.ChunkedArray) -> pa.Table:
        for name in self.join.columns:
            table = table.append_column(CARRIED + name, self.values[name].take(place))
        if self.join.caption is not None:
            caption = self.values[CAPTION].take(place)
            is_given = pc.is_valid(caption)
            caption_uri = pc.if_else(is_given, pa.scalar(None, pa.string()), table["caption_uri"])
            table = replace_column(table, "caption_uri", caption_uri)
            table = replace_column(table, "caption", pc.if_else(is_given, caption, table["caption"]))
        digest = pa.chunked_array([self.digests]).take(place)
        with_row = pc.binary_join_element_wise(pc.fill_null(table["modified"], ""), digest, JOINED)
        return replace_column(table, "modified", pc.if_else(pc.is_valid(digest), with_row, table["modified"]))


def open_joins(joins: Sequence[JoinConfig], carried: pa.Schema, left_out: LeftOut) -> list[OpenJoin]:
    """Read the tables of all joins, which must not repeat keys or names of `carried` columns, else a SourceError."""
    opened = []
    for join in joins:
        opened.append(_open(join, carried, left_out))
        carried = pa.schema([*carried, *opened[-1].carried])
    return opened


def _open(join: JoinConfig, carried: pa.Schema, left_out: LeftOut) -> OpenJoin:
    where = f"{join.path}: [[join]]"
    _check_left(join, where, carried)
    for name in join.columns:
        if name in EMBEDDINGS.names or name in carried.names:
            raise SourceError(f"{where} columns: {name!r} is already a column of the embeddings table; rename it there")
    texts = frozenset({join.on.key, *([join.caption] if join.caption is not None else [])})
    table = find_table(normalise_source(join.path))
    schema = table.read_schema(texts)
    key = require_column(schema, join.on.key, f"{where} on")
    if not (is_text(key.type) or pa.types.is_integer(plain_type(key.type))):
        raise SourceError(
            f"{where} on: column {key.name!r} is {key.type}; keys are compared as text, so they must be "
            "strings or integers: cast it there"
        )
    fields = {key.name: pa.field(key.name, pa.string())}
    for name in join.columns:
        found = require_column(schema, name, f"{where} columns")
        fields.setdefault(name, pa.field(name, plain_type(found.type)))
    if join.caption is not None:
        found = require_column(schema, join.caption, f"{where} caption")
        if not (is_text(found.type) or pa.types.is_null(found.type)):
            raise SourceError(f"{where} caption: column {found.name!r} is {found.type}; captions are strings")
        fields[join.caption] = pa.field(join.caption, pa.string())
    wanted = pa.schema(list(fields.values()))
    chunks = [
        pa.table([chunk.columns[name] for name in wanted.names], wanted) for _, chunk in table.chunks(wanted, texts)
    ]
    rows = pa.concat_tables(chunks) if chunks else wanted.empty_table()
    return _check_keys(join, where, rows, left_out)


def _check_keys(join: JoinConfig, where: str, rows: pa.Table, left_out: LeftOut) -> OpenJoin:
    has_key = pc.fill_null(pc.not_equal(rows[join.on.key], ""), False)
    if num_without := rows.num_rows - (pc.sum(has_key).as_py() or 0):
        left_out.without_key[join.path] += num_without
        rows = rows.filter(has_key)
    keys = rows[join.on.key]
    counts = pc.value_counts(keys)
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
    if len(twice):
        raise SourceError(
            f"{where} on: column {join.on.key!r} has {plural(len(twice), 'key')} more than once (first: "
            f"{_format_keys(twice.slice(0, NUM_EXAMPLES).to_pylist())}); an item has one row, so leave one of each"
        )
    values = rows.select(list(join.columns))
    if join.caption is not None:
        caption = rows[join.caption]
        is_blank = pc.equal(pc.utf8_trim_whitespace(caption), "")
        values = values.append_column(CAPTION, pc.if_else(is_blank, pa.scalar(None, pa.string()), caption))
    return OpenJoin(join, keys, values.combine_chunks(), _digests(values), left_out)


def _check_left(join: JoinConfig, where: str, carried: pa.Schema) -> None:
    left = join.on.left
    if left is None:
        return
    if left not in carried.names:
        known = ", ".join(carried.names) or "none"
        raise SourceError(f"{where} on: no source carries a column {left!r} ({known}); add it to its carryover")
    kind = carried.field(left).type
    if not (is_text(kind) or pa.types.is_integer(kind)):
        raise SourceError(f"{where} on: the carried column {left!r} is {kind}; keys must be strings or integers")


def _digests(values: pa.Table) -> pa.Array:
    """Return digests of the rows' values for `modified`, 16 hexadecimal digits each."""
    rows = zip(*(column.to_pylist() for column in values.columns), strict=True)
    return pa.array(
        [blake2b(repr(row).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() for row in rows], pa.string()
    )


def _format_keys(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
