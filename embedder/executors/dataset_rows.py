"""Rows of any Ray dataset as items: what a run lists of each, and the files with the pictures of those it embeds.

A dataset is computed twice: the first pass gives the listing, some hundred bytes a row; the second writes only the
pictures to embed into Parquet files below the run's folder, deleted when the run ends. So journal, resumption and
comparison are those of any source. Pictures given as addresses need no second pass.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedder.batch_schema import CARRIED
from embedder.errors import EmbedderError, SourceError
from embedder.media.given_inputs import checked_pixels, file_or_content, is_array
from embedder.servables.predict import cells_of
from embedder.sources.columns import is_text, plain_type
from embedder.sources.listing_schema import HASHED, ROW_SCHEMA, Row, table_of_rows
from embedder.sources.table_files import TableFile
from embedder.sources.table_items import image_row
from embedder.sources.uris import cell_prefix, row_uri
from embedder.storage.web_address import public_name
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from ray.data import Dataset

IMAGE = "image"
GROUP_BYTES = 16 << 20  # of a row group, which decode tasks read as a whole
DIGEST_BYTES = 16
PLACED = pa.schema({"item_id": pa.string(), "modified": pa.string(), "cell": pa.string()})


@dataclass(frozen=True)
class DatasetColumns:
    """Columns of a dataset, and their use; plain values, for tasks.

    Without `id` an item's id is a hash of the content, or the address. `image` has encoded bytes, uint8 arrays (H, W,
    3), addresses, or structs with `bytes` or `path`; `uri` the addresses that hits show instead. `name` is used in the
    addresses of items that have none; `folder` is the base of relative ones.
    """

    id: str | None
    image: str | None
    caption: str | None
    uri: str | None
    carryover: tuple[str, ...]
    name: str
    folder: str

    def check(self, columns: dict[str, Any]) -> None:
        """Check that a dataset has the named columns, with supported types.

        `columns` has Arrow types by name; any other value means that a type is unknown before the rows are read. Raises
        `SourceError` if one is missing, or of another type.
        """
        for key in ("id", "image", "caption", "uri"):
            name = getattr(self, key)
            if name is None:
                continue
            kind = self._kind(key, name, columns)
            is_id = key == "id" and isinstance(kind, pa.DataType) and pa.types.is_integer(plain_type(kind))
            is_plain = isinstance(kind, pa.DataType) and not isinstance(kind, pa.BaseExtensionType)
            if key != "image" and is_plain and not (is_text(kind) or pa.types.is_null(kind) or is_id):
                rule = "strings or integers" if key == "id" else "strings"
                raise SourceError(f"dataset: {key}={name!r} is a column of {kind}; it must be {rule}: convert it")
        for name in self.carryover:
            kind = self._kind("carryover", name, columns)
            if isinstance(kind, pa.BaseExtensionType):
                raise SourceError(
                    f"dataset: carryover names {name!r}, of the type {kind}, which no table holds; leave it out, or "
                    "convert it to numbers, strings, bytes or lists"
                )

    @staticmethod
    def _kind(key: str, name: str, columns: dict[str, Any]) -> Any:
        if name not in columns:
            raise SourceError(f"dataset: {key}: there is no column {name!r}; it has {', '.join(columns) or 'none'}")
        return columns[name]


class _Item(NamedTuple):
    """Row of the listing, and the picture (a file's bytes, or pixels) if it is in the dataset itself."""

    row: Row
    content: bytes | NDArray[np.uint8] | None


def items_in(table: pa.Table, columns: DatasetColumns) -> Iterator[_Item]:
    """Yield the items of a block; what is wrong with one is said in its row.

    Raises `SourceError` if a column is missing or of a wrong type.
    """
    columns.check({field.name: field.type for field in table.schema})
    images = _cells(table, columns.image)
    ids, captions, uris = (_texts(table, name) for name in (columns.id, columns.caption, columns.uri))
    carried = [_cells(table, name) for name in columns.carryover]
    for number, (item_id, image, caption, uri) in enumerate(zip(ids, images, captions, uris, strict=True)):
        others = _digest(repr((caption, uri, [cells[number] for cells in carried])).encode("utf-8", "surrogatepass"))
        item = _item(image, caption if caption and not caption.isspace() else None, columns)
        row = item.row._replace(modified=f"{item.row.modified}|{others}")
        if uri and item.content is not None:
            row = row._replace(uri=uri)
        yield item._replace(row=_with_id(row, item_id, columns))


def _item(image: Any, caption: str | None, columns: DatasetColumns) -> _Item:
    """Make the item of one cell, its content hashed; an address is examined as in a table."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image:
        return _Item(image_row(image, caption, TableFile("", "", "address"), columns.folder), None)
    if image is None or (isinstance(image, str | bytes | bytearray) and not image):
        problem = (None, None) if caption else ("Empty", "neither an image nor a caption in this row")
        return _Item(Row("", "", None, "caption", caption, None, *problem), None)
    try:
        content = checked_pixels(np.asarray(image), "image") if is_array(image) else file_or_content(image)
        if not isinstance(content, bytes | np.ndarray):
            raise SourceError("it names a file; give its path as a string")
    except EmbedderError as error:
        return _Item(Row("", "", None, "unusable", caption, None, "NotAPicture", str(error)), None)
    size_bytes, shape = (len(content), "") if isinstance(content, bytes) else (content.nbytes, str(content.shape))
    return _Item(Row("", "", size_bytes, HASHED + _digest(content, shape), caption), content)


def _with_id(row: Row, item_id: str | None, columns: DatasetColumns) -> Row:
    """Put id and address on a row; one with an empty id is a reject that is named by its content."""
    if columns.id is None:
        item_id = _own_id(row)
    elif not item_id:
        error = f"column {columns.id!r}, which gives ids, is empty in this row"
        item_id, row = _name_of(row), row._replace(error_type="NullId", error=error)
    own = f"dataset:{columns.name}/{item_id}"
    is_text = not row.modified.startswith(HASHED) and row.error_type is None
    return row._replace(item_id=item_id, uri=row.uri or (row_uri(own, 0) if is_text else own))


def _own_id(row: Row) -> str:
    """Return the id of a row if no column gives it: a hash of its picture, its address, or a hash of its caption.

    As in a table, an address has no secrets there, so one that is signed again is the same item.
    """
    if row.modified.startswith(HASHED):
        return row.modified.removeprefix(HASHED).partition("|")[0]
    if row.uri:
        return public_name(row.uri)
    return _name_of(row) if row.error_type is not None else _digest((row.caption or "").encode())


def _name_of(row: Row) -> str:
    return f"no-id-{_digest(repr(row).encode('utf-8', 'surrogatepass'))}"


def list_block(table: pa.Table, columns: DatasetColumns) -> pa.Table:
    """List the items of a block: `ROW_SCHEMA`, followed by carried columns."""
    if table.num_rows == 0:
        return table_of_rows([])
    carried = {name: table[name].cast(plain_type(table[name].type)) for name in columns.carryover}
    return table_of_rows([item.row for item in items_in(table, columns)], carried)


def store_block(table: pa.Table, columns: DatasetColumns, wanted: Any, files: StoreFiles, folder: str) -> pa.Table:
    """Write the wanted pictures of a block into a file of the store, and return where each lies: `PLACED`.

    `wanted` refers to a table with `item_id` and `modified` of the pictures. Each attempt writes its own file into
    `folder`.
    """
    if table.num_rows == 0:
        return PLACED.empty_table()
    import ray

    pairs = ray.get(wanted)
    items = [item for item in items_in(table, columns) if item.content is not None]
    places = pc.index_in(pa.array([item.row.item_id for item in items], pa.string()), value_set=pairs["item_id"])
    versions = pairs["modified"].take(places).to_pylist()
    items = [item for item, version in zip(items, versions, strict=True) if version == item.row.modified]
    if not items:
        return PLACED.empty_table()
    contents = [_encode(item.content) for item in items]
    groups = _groups([len(content) for content in contents])
    path = f"{folder}/{secrets.token_hex(8)}.parquet"
    files.write(path, _parquet(contents, groups))
    cells = [f"{cell_prefix(files.uri(path), IMAGE, group)}{row}" for group, row in groups]
    rows = [item.row for item in items]
    return pa.table([[row.item_id for row in rows], [row.modified for row in rows], cells], schema=PLACED)


def _encode(content: bytes | NDArray[np.uint8] | None) -> bytes:
    encoded = file_or_content(content) if isinstance(content, np.ndarray) else content
    return encoded if isinstance(encoded, bytes) else b""


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the row group of each picture, and its row there: a group holds `GROUP_BYTES`, or one picture."""
    found, group, row, num_bytes = list[tuple[int, int]](), 0, 0, 0
    for size in sizes:
        if row and num_bytes + size > GROUP_BYTES:
            group, row, num_bytes = group + 1, 0, 0
        found.append((group, row))
        row, num_bytes = row + 1, num_bytes + size
    return found


def _parquet(contents: Sequence[bytes], places: Sequence[tuple[int, int]]) -> bytes:
    """Encode pictures as one column, in the row groups of `_groups`."""
    import pyarrow.parquet as pq

    schema, sink = pa.schema({IMAGE: pa.large_binary()}), pa.BufferOutputStream()
    groups: dict[int, list[bytes]] = {}
    for content, (group, _) in zip(contents, places, strict=True):
        groups.setdefault(group, []).append(content)
    with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for rows in groups.values():
            writer.write_table(pa.table([rows], schema=schema), row_group_size=len(rows))
    return bytes(sink.getvalue())


def stream_listing(dataset: "Dataset", columns: DatasetColumns) -> Iterator[pa.Table]:
    """Compute a dataset, and yield the listing of its blocks in any order."""
    return _stream(dataset, partial(list_block, columns=columns))


def store_pictures(
    dataset: "Dataset", columns: DatasetColumns, wanted: pa.Table, files: StoreFiles, folder: str
) -> pa.Table:
    """Compute a dataset once more, and write the wanted pictures into files in `folder`.

    `wanted` has `item_id` and `modified` as `stream_listing` gave them. Returns where each picture lies, in rows of
    `PLACED`, without those that the dataset no longer gives.
    """
    import ray

    reference = ray.put(wanted.select(["item_id", "modified"]).combine_chunks())
    store = partial(store_block, columns=columns, wanted=reference, files=files, folder=folder)
    return pa.concat_tables([PLACED.empty_table(), *_stream(dataset, store)])


def _stream(dataset: "Dataset", function: Any) -> Iterator[pa.Table]:
    from embedder.compat.ray_start import replace_attribute

    blocks = dataset.map_batches(function, batch_format="pyarrow", batch_size=None)
    settings = {
        "max_errored_blocks": 0,  # a dropped block would silently lose items
        "raise_original_map_exception": True,  # else a step's exception arrives as text
        "print_on_execution_start": False,
    }
    with ExitStack() as changes:
        for name, value in settings.items():
            changes.enter_context(replace_attribute(blocks.context, name, value))
        for block in blocks.iter_batches(batch_format="pyarrow", batch_size=None):
            if block.num_rows:
                yield block


def carried_types(tables: Sequence[pa.Table]) -> pa.Schema:
    """Return the types of a listing's carried columns, under their own names; a column without values is of strings.

    Raises `SourceError` if blocks have different ones.
    """
    found: dict[str, pa.DataType] = {}
    for table in tables:
        for field in list(table.schema)[len(ROW_SCHEMA) :]:
            name = field.name.removeprefix(CARRIED)
            before = found.setdefault(name, field.type)
            if pa.types.is_null(before):
                found[name] = field.type
            elif field.type != before and not pa.types.is_null(field.type):
                raise SourceError(
                    f"dataset: carryover {name!r} is {before} in one block and {field.type} in another; one column has "
                    "one type: convert it"
                )
    return pa.schema([pa.field(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in found.items()])


def _cells(table: pa.Table, name: str | None) -> list[Any]:
    return [None] * table.num_rows if name is None else cells_of(table, name)


def _texts(table: pa.Table, name: str | None) -> list[Any]:
    cells = _cells(table, name)
    odd = next((cell for cell in cells if cell is not None and not isinstance(cell, str | int)), None)
    if odd is not None:
        raise SourceError(f"dataset: column {name!r} holds a {type(odd).__name__}; it must be strings: convert it")
    return [None if cell is None else str(cell) for cell in cells]


def _digest(content: bytes | NDArray[np.uint8], shape: str = "") -> str:
    digest = blake2b(shape.encode(), digest_size=DIGEST_BYTES)
    digest.update(content if isinstance(content, bytes) else content.data)
    return digest.hexdigest()
