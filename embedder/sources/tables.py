"""The rows of a table as items: the configuration names the columns, and no image's bytes are read."""

import difflib
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from embedder.config import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.sources.listing_schema import Listing, Row, table_of_rows, time_text
from embedder.sources.selection import Selection
from embedder.sources.table_files import Table, TableFile, find_table
from embedder.sources.table_formats import Chunk
from embedder.sources.uris import cell_prefix, file_url_path, is_uri, row_uri
from embedder.storage.object_stores import is_remote, without_credentials

_MISSING = "missing"  # `modified` of a file that is not there: it changes when the file comes


@dataclass(frozen=True)
class TablePlan:
    """Columns to read of a table, and their use; made once, from the first file.

    Attributes:
        read: fields to read from each file.
        carryover: fields to copy.
        cells: whether images are bytes inside the table (else URIs, or there are none).
    """

    columns: Columns
    read: pa.Schema
    carryover: pa.Schema
    cells: bool


def list_table(source: SourceConfig, path: str, selection: Selection) -> Listing:
    """List the rows of a Parquet, CSV, JSON Lines or Delta table.

    Image columns are bytes (or a struct with `bytes`), which become cell uris, or strings, which are URIs: absolute
    paths, `s3://`, `gs://`, `file://`, or paths relative to the table's folder. `..` is allowed there, as absolute
    paths are: a table is the user's own word, and only bytes that decode as an image leave a trace.

    Args:
        source: its columns and `carryover` count.
        path: as `normalise_source` gives it.
        selection: of the table's files.

    Raises:
        SourceError: a named column is missing or of a wrong type, or a file can't be read.
    """
    columns = source.columns
    text_columns = frozenset(name for name in (columns.id, columns.image, columns.caption) if name)
    table = find_table(path, selection)
    plan = plan_columns(source, path, table.read_schema(text_columns))
    return Listing(_tables(table, plan, text_columns), carryover=plan.carryover)


def plan_columns(source: SourceConfig, path: str, schema: pa.Schema) -> TablePlan:
    """Check the named columns against those that exist, and choose those to read.

    Args:
        source: names the columns.
        path: of the table, for messages.
        schema: the table's own.

    Raises:
        SourceError: a column is missing or of a wrong type, or none can give ids.
    """
    columns = source.columns
    if columns.image is None and columns.caption is None:
        raise SourceError(f"{path}: a table needs columns.image or columns.caption; it has {_names(schema)}")
    for name in (columns.id, columns.image, columns.caption, *source.carryover):
        if name is not None and name not in schema.names:
            raise SourceError(f"{path}: there is no column {name!r}{_similar(name, schema)}; it has {_names(schema)}")
    carryover = pa.schema(_plain(schema.field(name)) for name in source.carryover)
    cells = columns.image is not None and _image_is_bytes(path, schema.field(columns.image))
    if columns.id is None and (columns.image is None or cells):
        raise SourceError(f"{path}: nothing gives stable ids; set columns.id to one of {_names(schema)}")
    fields = {field.name: field for field in carryover}
    for name in (columns.caption, None if cells else columns.image):
        if name is not None:
            fields.setdefault(name, _text_field(path, schema.field(name)))
    if columns.id is not None:
        fields.setdefault(columns.id, _id_field(path, schema.field(columns.id)))
    return TablePlan(columns, pa.schema(list(fields.values())), carryover, cells)


def _image_is_bytes(path: str, field: pa.Field) -> bool:
    kind = _value_type(field.type)
    if pa.types.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        if "bytes" in names and _is_binary(kind.field(names.index("bytes")).type):
            return True
    elif _is_binary(kind):
        return True
    elif _is_text(kind):
        return False
    raise SourceError(
        f"{path}: columns.image = {field.name!r} is {field.type}; it must be bytes, a struct with `bytes`, or URIs"
    )


def _text_field(path: str, field: pa.Field) -> pa.Field:
    if not (_is_text(_value_type(field.type)) or pa.types.is_null(field.type)):
        raise SourceError(f"{path}: column {field.name!r} is {field.type}; captions and URIs must be strings")
    return pa.field(field.name, pa.string())


def _id_field(path: str, field: pa.Field) -> pa.Field:
    kind = _value_type(field.type)
    if not (_is_text(kind) or pa.types.is_integer(kind)):
        raise SourceError(f"{path}: columns.id = {field.name!r} is {field.type}; ids must be strings or integers")
    return pa.field(field.name, pa.string())


def _plain(field: pa.Field) -> pa.Field:
    """Take dictionaries apart: each file and row group has its own, and the values are what is carried."""
    return pa.field(field.name, _value_type(field.type))


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary(), pa.binary_view()) or pa.types.is_fixed_size_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _names(schema: pa.Schema) -> str:
    names = schema.names
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"the columns {', '.join(names[:20])}{more}" if names else "no columns"


def _similar(name: str, schema: pa.Schema) -> str:
    close = difflib.get_close_matches(name, schema.names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _tables(table: Table, plan: TablePlan, text_columns: frozenset[str]) -> Iterator[pa.Table]:
    for file, chunk in table.chunks(plan.read, text_columns):
        rows = list(_rows(chunk, plan, file, table.folder))
        yield table_of_rows(rows, {field.name: chunk.columns[field.name].cast(field.type) for field in plan.carryover})


def _rows(chunk: Chunk, plan: TablePlan, file: TableFile, folder: str) -> Iterator[Row]:
    names = plan.columns
    ids = _texts(chunk, names.id)
    captions = _texts(chunk, names.caption)
    images = _texts(chunk, None if plan.cells else names.image)
    cell = cell_prefix(file.uri, names.image or "", chunk.row_group) if plan.cells else None
    for index, (item_id, text, image) in enumerate(zip(ids, captions, images, strict=True)):
        row = chunk.start + index
        caption = text if text and not text.isspace() else None
        if cell is not None:
            listed = Row("", f"{cell}{chunk.start_in_group + index}", None, file.modified, caption)
        elif image:
            listed = image_row(image, caption, file, folder)
        else:
            listed = _caption_row(row_uri(file.uri, row), caption, file)
        yield _with_id(listed, item_id if names.id else image, f"{file.name}#row={row}", names.id or names.image or "")


def _texts(chunk: Chunk, name: str | None) -> list[Any]:
    return [None] * chunk.num_rows if name is None else chunk.columns[name].cast(pa.string()).to_pylist()


def _with_id(row: Row, item_id: str | None, place: str, column: str) -> Row:
    """Put the id on a row; a row without one is a reject named by its place."""
    if item_id:
        return row._replace(item_id=item_id)
    return row._replace(
        item_id=place, error_type="NullId", error=f"column {column!r}, which gives ids, is empty in this row"
    )


def _caption_row(uri: str, caption: str | None, file: TableFile) -> Row:
    if caption is None:
        error = "neither an image nor a caption in this row"
        return Row("", uri, None, file.modified, error_type="Empty", error=error)
    return Row("", uri, None, _digest(caption), caption)


def image_row(reference: str, caption: str | None, file: TableFile, folder: str) -> Row:
    """Make the row of an image that a table names by a URI; a bad URI is a reject, a missing file is for fetch.

    Args:
        reference: the URI or path, as the table has it.
        caption: of the row, if any.
        file: of the table.
        folder: base of relative references.
    """
    uri = _resolve(reference, folder)
    if uri is None or "\0" in uri:
        reference = without_credentials(reference)
        message = (
            f"{reference[:100]!r}: images are named by a path, file://, s3://, gs:// or az://, without credentials; "
            "download others first"
        )
        return Row("", reference, None, file.modified, caption, error_type="UnsupportedUri", error=message)
    if is_remote(uri):  # a request an item would be too much for a listing; the table's version stands in
        return Row("", uri, None, file.modified, caption)
    size_bytes, modified = _local_state(uri)
    return Row("", uri, size_bytes, f"{modified}|{_digest(caption)}" if caption else modified, caption)


def _resolve(reference: str, folder: str) -> str | None:
    """Make a reference absolute; None where its scheme is not served, or it climbs out of its bucket."""
    if is_remote(reference):
        return reference if without_credentials(reference) == reference else None
    if reference.startswith("/"):
        return reference
    if reference.startswith("file://"):
        return file_url_path(reference)
    if is_uri(reference):
        return None
    if not is_remote(folder):
        return f"{folder.rstrip('/')}/{reference}"
    scheme, _, rest = folder.partition("://")
    bucket, _, prefix = rest.partition("/")
    key = posixpath.normpath(posixpath.join(prefix, reference))
    return None if key.startswith("..") else f"{scheme}://{bucket}/{key}"


def _local_state(path: str) -> tuple[int | None, str]:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None, _MISSING
    return status.st_size, time_text(status.st_mtime_ns)


def _digest(caption: str) -> str:
    """Stand for a caption in `modified`, so that a changed caption is a change."""
    return "caption:" + blake2b(caption.encode("utf-8"), digest_size=8).hexdigest()
