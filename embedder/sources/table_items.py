"""Lists the rows of a table as items; the configuration names the columns.

Images are read only if they give the ids.
"""

import os
import posixpath
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.sources.column_keys import FILE_AND_ROW, ROW_IDS, format_assignment
from embedder.sources.columns import is_list
from embedder.sources.listing_schema import ROW_SCHEMA, Listing, Row, file_version, table_of_rows, without_change_time
from embedder.sources.read_ahead import read_ahead
from embedder.sources.row_ids import ContentIds
from embedder.sources.selection import Selection
from embedder.sources.table_files import Table, TableFile, find_table
from embedder.sources.table_formats import Chunk
from embedder.sources.table_plan import TablePlan, plan_columns
from embedder.sources.unicode_forms import find_unicode_twin
from embedder.sources.uris import cell_prefix, file_url_path, holds_base64, is_uri, row_uri
from embedder.storage.object_stores import is_remote, without_credentials
from embedder.storage.printable import readable
from embedder.storage.web_address import is_address, is_web, public_name

_MISSING = "missing"  # `modified` of a missing file: it changes when the file appears


def list_table(source: SourceConfig, path: str, selection: Selection) -> Listing:
    """List the rows of a Parquet, CSV, JSON Lines or Delta table; raises a SourceError.

    Image columns are bytes (or a struct with `bytes`), which become cell uris, or strings, which are URIs: absolute
    paths, `s3://`, `gs://`, `file://`, or paths relative to the table's folder. `..` and absolute paths are allowed:
    the table is the user's own, and only bytes that decode as an image leave a trace.
    """
    columns = source.columns
    text_columns = frozenset(name for name in (columns.id, columns.image, columns.caption) if name)
    table = find_table(path, selection)
    plan = plan_columns(source, path, table.read_schema(text_columns), table.is_unique)
    way_out = format_assignment(columns, "id", FILE_AND_ROW)
    hashes = ContentIds(selection.left_out, way_out) if plan.ids == "content" else None
    tables = _tables(table.version_partitions(plan.read), plan, text_columns, hashes)
    return Listing(tables, carryover=plan.carryover, unique_ids=plan.ids in ROW_IDS)


def _tables(
    table: Table, plan: TablePlan, text_columns: frozenset[str], hashes: ContentIds | None
) -> Iterator[pa.Table]:
    """Yield the rows of the files in order; several files are read at once, unless content hashes give the ids.

    `text_columns` has the names of ids, URIs and captions. `hashes` makes the ids if they are hashes; it is closed at
    the end.
    """
    if hashes is None:

        def tables_of(file: TableFile) -> Generator[pa.Table]:
            for chunk in table.chunks_of(file, plan.read, text_columns):
                carried = _carried_columns(chunk, plan)
                plain = _plain_rows(chunk, plan, file, carried)
                yield table_of_rows(list(_rows(chunk, plan, file, table.folder)), carried) if plain is None else plain

        yield from read_ahead(partial(tables_of, file) for file in table.files)
        return
    with closing(hashes):
        for file, chunk in table.chunks(plan.read, text_columns):
            rows = [
                hashes.identify(row, _place(file, chunk, index))
                for index, row in enumerate(_rows(chunk, plan, file, table.folder))
            ]
            kept = pa.array([row is not None for row in rows], pa.bool_())
            carried = {name: column.filter(kept) for name, column in _carried_columns(chunk, plan).items()}
            yield table_of_rows([row for row in rows if row is not None], carried)


def _carried_columns(chunk: Chunk, plan: TablePlan) -> dict[str, pa.Array]:
    return {field.name: chunk.columns[field.name].cast(field.type) for field in plan.carryover}


def _plain_rows(chunk: Chunk, plan: TablePlan, file: TableFile, carried: dict[str, pa.Array]) -> pa.Table | None:
    """Make the rows of `_rows` column by column, which takes a third of its time.

    Returns None if a row names a file, lacks an id, or is a reject.
    """
    cells, names, start = plan.cells, plan.columns, chunk.start
    if cells is None:
        images = names.image
    else:
        images = cells.references if chunk.null_counts.get(cells.bytes_leaf) != 0 else None
    if images is not None and chunk.columns[images].null_count < chunk.num_rows:
        return None
    numbers = pa.array(range(start, start + chunk.num_rows), pa.int64())
    if plan.ids == "column" and names.id is not None:
        ids = chunk.columns[names.id].cast(pa.string())
        if ids.null_count or pc.any(pc.equal(ids, "")).as_py():
            return None
    elif plan.ids == "file+row":
        ids = _join(f"{file.name}#", numbers)
    else:
        return None
    captions = [text if text and not text.isspace() else None for text in _captions(chunk, names.caption, file)]
    if cells is None:
        texts = [text for text in captions if text is not None]
        if len(texts) < chunk.num_rows:
            return None
        uris = _join(row_uri(file.uri, start).removesuffix(str(start)), numbers)
        modified = pa.array(map(_digest, texts), pa.string())
    else:
        in_group = pc.add(numbers, chunk.start_in_group - start)
        uris = _join(cell_prefix(file.uri, cells.name, chunk.row_group), in_group)
        modified = pa.repeat(pa.scalar(file.modified), chunk.num_rows)
    columns = {"item_id": ids, "uri": uris, "modified": modified, "caption": pa.array(captions, pa.string())}
    columns["is_media"] = pa.repeat(pa.scalar(True), chunk.num_rows)
    filled = (
        columns[field.name] if field.name in columns else pa.nulls(chunk.num_rows, field.type) for field in ROW_SCHEMA
    )
    return pa.table(
        dict(zip(ROW_SCHEMA.names, filled, strict=True)) | {CARRIED + name: carried[name] for name in carried}
    )


def _join(prefix: str, numbers: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(prefix, numbers.cast(pa.string()), "")


def _rows(chunk: Chunk, plan: TablePlan, file: TableFile, folder: str) -> Iterator[Row]:
    names, cells = plan.columns, plan.cells
    ids = _texts(chunk, names.id if plan.ids == "column" else None)
    captions = _captions(chunk, names.caption, file)
    images = _texts(chunk, names.image if cells is None else cells.references)
    cell = cell_prefix(file.uri, cells.name, chunk.row_group) if cells is not None else None
    may_refer = cells is not None and chunk.null_counts.get(cells.bytes_leaf) != 0
    for index, (item_id, text, image) in enumerate(zip(ids, captions, images, strict=True)):
        row = chunk.start + index
        caption = text if text and not text.isspace() else None
        if cell is not None:
            modified = _modified_beside(file, image) if image and may_refer else file.modified
            listed = Row("", f"{cell}{chunk.start_in_group + index}", None, modified, caption)
        elif image:
            listed = image_row(image, caption, file, folder)
        else:
            listed = _caption_row(row_uri(file.uri, row), caption, file)
        place = _place(file, chunk, index)
        match plan.ids:
            case "content":  # a row may have moved to another file of the same age
                yield listed._replace(modified=f"{listed.modified}|{place}")
            case "file+row":
                yield listed._replace(item_id=f"{file.name}#{row}")
            case "column":
                yield _with_id(listed, item_id, place, names.id or "")
            case "address":
                address = listed.uri if image and holds_base64(image) else image and public_name(image)
                yield _with_id(listed, address, place, names.image or "")


def _place(file: TableFile, chunk: Chunk, index: int) -> str:
    return f"{file.name}#row={chunk.start + index}"


def _texts(chunk: Chunk, name: str | None) -> list[Any]:
    return [None] * chunk.num_rows if name is None else chunk.columns[name].cast(pa.string()).to_pylist()


def _captions(chunk: Chunk, name: str | None, file: TableFile) -> list[str | None]:
    """Return the rows' captions: of lists the first that isn't blank, of labels their names."""
    if name is None or not (is_list(kind := chunk.columns[name].type) or pa.types.is_integer(kind)):
        return _texts(chunk, name)
    values = chunk.columns[name].to_pylist()
    if is_list(kind):
        return [next((text for text in texts or () if text and not text.isspace()), None) for texts in values]
    labels = chunk.labels.get(name, ())
    for index, value in enumerate(values):
        if value is not None and value >= len(labels):
            raise SourceError(
                f"{readable(file.uri)}: row {chunk.start + index}: column {name!r} is {value}, and the file names "
                f"{len(labels)} labels; write the names into a column of strings"
            )
    return [labels[value] if value is not None and value >= 0 else None for value in values]  # -1: unknown


def _modified_beside(file: TableFile, reference: str) -> str:
    """Return the version of a row whose image may be in a file next to the table's, as `Fetcher` finds it."""
    path = _resolve(reference, file.uri.rpartition("/")[0])
    if path is None or is_remote(path) or is_web(path):
        return file.modified
    return f"{file.modified}|{_local_state(find_unicode_twin(path) or path)[1]}"


def _with_id(row: Row, item_id: str | None, place: str, column: str) -> Row:
    """Put the id on a row; a row without one is a reject identified by its place."""
    if item_id:
        return Row(item_id, *row[1:])  # takes a fifth of the time of `_replace`
    return row._replace(
        item_id=place, error_type="NullId", error=f"column {column!r}, which gives ids, is empty in this row"
    )


def _caption_row(uri: str, caption: str | None, file: TableFile) -> Row:
    if caption is None:
        error = "neither an image nor a caption in this row"
        return Row("", uri, None, file.modified, error_type="Empty", error=error)
    return Row("", uri, None, _digest(caption), caption)


def image_row(reference: str, caption: str | None, file: TableFile, folder: str) -> Row:
    """Make the row of an image that a table names by a URI or path, which may be relative to `folder`.

    A bad URI is a reject; a missing file is left to the fetch.
    """
    if holds_base64(reference):
        message = (
            "the column holds images as base64 text, not addresses; decode it into a column of bytes in Parquet "
            "(in DuckDB: from_base64(column)), without a prefix such as data:image/jpeg;base64,"
        )
        digest = blake2b(reference.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return Row("", f"base64:{digest}", None, file.modified, caption, error_type="UnsupportedUri", error=message)
    uri = _resolve(reference, folder)
    if uri is None or "\0" in uri:
        reference = without_credentials(reference)
        message = (
            f"{reference[:100]!r}: images are named by a path, file://, http(s)://, s3://, gs:// or az://, without "
            "credentials; download others first"
        )
        return Row("", reference, None, file.modified, caption, error_type="UnsupportedUri", error=message)
    if is_remote(uri) or is_web(uri):  # a request an item would be too much for a listing; the table's stands in
        return Row("", uri, None, without_change_time(file.modified), caption)
    size_bytes, modified = _local_state(uri)
    if modified == _MISSING and (twin := find_unicode_twin(uri)):
        uri = twin
        size_bytes, modified = _local_state(uri)
    return Row("", uri, size_bytes, f"{modified}|{_digest(caption)}" if caption else modified, caption)


def _resolve(reference: str, folder: str) -> str | None:
    """Make a reference absolute; None if its scheme is unsupported or it climbs out of its bucket."""
    if is_web(reference) or is_remote(reference):
        is_served = is_address(reference) or (is_remote(reference) and without_credentials(reference) == reference)
        return reference if is_served else None
    if reference.startswith("file://"):
        reference = file_url_path(reference)
    elif is_uri(reference):
        return None
    if reference.startswith("/"):
        return reference
    if not is_remote(folder):
        return f"{folder.rstrip('/')}/{reference}"
    scheme, _, rest = folder.partition("://")
    bucket, _, prefix = rest.partition("/")
    key = posixpath.normpath(posixpath.join(prefix, reference))
    return None if key.startswith("..") else f"{scheme}://{bucket}/{key}"


def _local_state(path: str) -> tuple[int | None, str]:
    try:
        status = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):  # the latter for a NUL in the path
        return None, _MISSING
    return status.st_size, file_version(status)


def _digest(caption: str) -> str:
    """Return a caption's digest for `modified`, so that a changed caption is a change."""
    return "caption:" + blake2b(caption.encode("utf-8"), digest_size=8).hexdigest()
