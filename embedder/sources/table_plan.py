"""Plans the use of a table's columns: named ones are checked against those that exist, others are proposed."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.sources.column_keys import CONTENT, FILE_AND_ROW, ROW_IDS, format_assignment, key_of, setting
from embedder.sources.column_proposal import id_columns, propose_columns
from embedder.sources.columns import (
    column_names,
    column_path,
    find_column,
    holds_images,
    is_list,
    is_text,
    label_names,
    parquet_name,
    plain_type,
)
from embedder.sources.file_names import MEDIA_SUFFIXES, suffix_of
from embedder.sources.table_formats import SEPARATOR

IdRule = Literal["column", "address", "content", "file+row"]
"""Where ids come from: the named column, the images' own addresses, a hash of the content, the row's place."""

MAX_SHOWN = 20
_RULES = {
    CONTENT: f"{CONTENT} hashes each image (the same one twice is one item; each run reads all images for it)",
    FILE_AND_ROW: f"{FILE_AND_ROW} counts the rows of each file (ids are stable while the files don't change)",
}


@dataclass(frozen=True)
class CellColumn:
    """Column of images whose bytes are in the table.

    `name` is the column's name in the configuration. `references` is the struct field with the file name to use where
    the bytes are null; None if there is none. `bytes_leaf` is Parquet's name of the field with the bytes.
    """

    name: str
    references: str | None
    bytes_leaf: str


@dataclass(frozen=True)
class TablePlan:
    """The columns to read from a table, and their use; made once, from the first file.

    `read` are the fields to read from each file, `carryover` the fields to copy. `cells` are the images if their bytes
    are in the table; else they are URIs, or there are none.
    """

    columns: Columns
    read: pa.Schema
    carryover: pa.Schema
    cells: CellColumn | None
    ids: IdRule


def plan_columns(source: SourceConfig, path: str, schema: pa.Schema, is_unique: Callable[[str], bool]) -> TablePlan:
    """Check the named columns and choose those to read, else a SourceError; `path` is for messages.

    `is_unique` says whether no value of a column occurs twice, for a proposal.
    """
    table, columns = _NamedTable(path, schema, source.columns, is_unique), source.columns
    if columns.image is None and columns.caption is None:
        raise table.nothing_named()
    has_rule = columns.id in ROW_IDS and find_column(schema, columns.id) is None
    carryover = pa.schema(table.carried_field(name) for name in source.carryover)
    fields = {field.name: field for field in carryover}
    image = None if columns.image is None else table.find("image", columns.image)
    cells = None if image is None else table.cells(image)
    wanted = [] if columns.id is None or has_rule else [table.id_field(table.find("id", columns.id))]
    if columns.caption is not None:
        wanted.append(table.caption_field(table.find("caption", columns.caption)))
    if image is not None and cells is None:
        wanted.append(pa.field(image.name, pa.string()))
    if cells is not None and cells.references is not None:
        wanted.append(pa.field(cells.references, pa.string()))
    for field in wanted:
        fields.setdefault(field.name, field)
    ids = table.id_rule(has_rule=has_rule, has_addresses=image is not None and cells is None)
    return TablePlan(columns, pa.schema(list(fields.values())), carryover, cells, ids)


@dataclass(frozen=True)
class _NamedTable:
    """A table and the columns its user names; errors spell keys as the user does."""

    path: str
    schema: pa.Schema
    columns: Columns
    is_unique: Callable[[str], bool]

    def find(self, key: str, name: str) -> pa.Field:
        """Find the column that a key names."""
        return require_column(self.schema, name, f"{self.path}: {key_of(self.columns, key)}", self._without_header())

    def _without_header(self) -> str:
        """Say so if the names of a text table's columns look like values of a row."""
        is_text = self.path.lower().endswith((".csv", ".tsv"))
        if not is_text or not any(suffix_of(name) in MEDIA_SUFFIXES for name in self.schema.names):
            return ""
        return "; its first line looks like a row: put a header before it, a line that names the columns"

    def carried_field(self, name: str) -> pa.Field:
        """Return the field with the value type of a dictionary: each file and row group has its own dictionary."""
        return pa.field(name, plain_type(self.find("carryover", name).type))

    def cells(self, field: pa.Field) -> CellColumn | None:
        """Describe a column of bytes; None if it holds URIs."""
        if is_text(field.type):
            return None
        kind = plain_type(field.type)
        if not holds_images(kind):
            raise self._wrong(
                "image", field, f"it must be bytes, a struct with `bytes`, or URIs{_image_hint(field.name, kind)}"
            )
        leaf, references = parquet_name(self.schema, field.name), None
        if pa.types.is_struct(kind):
            leaf = f"{leaf}.bytes"
            inside = (*(column_path(self.schema, field.name) or ()), "path")
            inner = find_column(self.schema, f"{field.name}.path")
            is_there = inner is not None and is_text(inner.type)
            if is_there and column_path(self.schema, f"{field.name}.path") == inside:
                references = f"{field.name}.path"
        return CellColumn(field.name, references, leaf)

    def caption_field(self, field: pa.Field) -> pa.Field:
        """Return the field to read captions as: strings, lists of strings, or labels whose names the file has."""
        kind = plain_type(field.type)
        if is_text(kind) or pa.types.is_null(kind):
            return pa.field(field.name, pa.string())
        if is_list(kind) and is_text(kind.value_type):
            return pa.field(field.name, pa.list_(pa.string()))
        if pa.types.is_integer(kind) and field.name in label_names(self.schema):
            return pa.field(field.name, pa.int64())
        raise self._wrong("caption", field, "it must be strings, lists of strings, or labels whose names the file has")

    def id_field(self, field: pa.Field) -> pa.Field:
        """Return the field to read ids as."""
        if not (is_text(field.type) or pa.types.is_integer(plain_type(field.type))):
            raise self._wrong("id", field, "ids must be strings or integers")
        return pa.field(field.name, pa.string())

    def id_rule(self, *, has_rule: bool, has_addresses: bool) -> IdRule:
        """Decide where ids come from: a rule (`has_rule`), a column, or image URIs (`has_addresses`)."""
        if not has_rule:
            if self.columns.id is None and not has_addresses:
                raise self._no_ids()
            return "address" if self.columns.id is None else "column"
        if self.columns.id == CONTENT and has_addresses:
            raise SourceError(
                f"{self.path}: {format_assignment(self.columns, 'id', CONTENT)} hashes bytes, and "
                f"{self.columns.image!r} holds "
                f"the addresses of files; leave {key_of(self.columns, 'id')} out: the addresses are the ids then"
            )
        return "content" if self.columns.id == CONTENT else "file+row"

    def nothing_named(self) -> SourceError:
        """Return the error that proposes columns."""
        image, caption = (key_of(self.columns, key) for key in ("image", "caption"))
        found = propose_columns(self.schema, self.columns, self.is_unique)
        rule = f"; {_RULES[found['id']]}" if found.get("id") in _RULES else ""
        proposal = f"{rule}; these look right: {setting(self.columns, found)}" if found else "; name one of them"
        return SourceError(
            f"{self.path}: a table needs {image} or {caption}; it has {shown_columns(self.schema)}{proposal}"
        )

    def _no_ids(self) -> SourceError:
        found = propose_columns(self.schema, self.columns, self.is_unique)
        names = [name for name in id_columns(self.schema) if name not in (self.columns.image, self.columns.caption)]
        ways = [
            *_RULES.values(),
            *([f"or name a column without repetition ({', '.join(names[:MAX_SHOWN])})"] * bool(names)),
        ]
        return SourceError(
            f"{self.path}: nothing gives stable ids; set {key_of(self.columns, 'id')}: {', '.join(ways)}; "
            f"this looks right: {setting(self.columns, found)}"
        )

    def _wrong(self, key: str, field: pa.Field, rule: str) -> SourceError:
        return SourceError(
            f"{self.path}: {format_assignment(self.columns, key, field.name)} is {_short(field.type)}; {rule}"
        )


def require_column(schema: pa.Schema, name: str, where: str, hint: str = "") -> pa.Field:
    """Find a column that a key names, `where` being file and key; a SourceError unless there is exactly one."""
    if schema.names.count(name) > 1:
        raise SourceError(f"{where}: two columns are named {name!r}; rename one")
    found = find_column(schema, name)
    if found is None:
        close = difflib.get_close_matches(name, list(column_names(schema)), n=1)
        similar = f" (did you mean {close[0]!r}?)" if close else ""
        raise SourceError(f"{where}: there is no column {name!r}{similar}; it has {shown_columns(schema)}{hint}")
    return found


def shown_columns(schema: pa.Schema) -> str:
    """List the columns of a table and the fields of its structs for a message."""
    names = list(column_names(schema))
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    separator = (schema.metadata or {}).get(SEPARATOR, b"").decode()
    between = f" (separated by {separator!r})" if separator else ""
    return f"the columns {', '.join(names[:MAX_SHOWN])}{more}{between}" if names else "no columns"


def _image_hint(name: str, kind: pa.DataType) -> str:
    if is_list(kind):
        return "; an item is one image, so write a table with one of them in each row"
    texts = [f"{name}.{field.name}" for field in kind.fields if is_text(field.type)] if pa.types.is_struct(kind) else []
    return f"; it has {', '.join(texts)}" if texts else ""


def _short(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= 100 else text[:97] + "..."
