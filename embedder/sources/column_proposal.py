"""Proposes columns of a table that its user hasn't named, from their names and types."""

from collections.abc import Callable, Collection, Iterator

import pyarrow as pa

from embedder.config_toml.run_sections import Columns
from embedder.sources.column_keys import CONTENT, FILE_AND_ROW
from embedder.sources.columns import (
    column_names,
    column_path,
    find_column,
    holds_images,
    is_binary,
    is_list,
    is_text,
    label_names,
    plain_type,
)

# Names that such columns have in public data sets, the most likely first.
_IMAGES = ("image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "video", "mp4")
_ADDRESSES = (
    *_IMAGES, "image_path", "img_path", "path", "file_path", "filepath", "file_name", "filename", "file", "image_url",
    "url", "uri", "image_uri", "photo_uri", "photo_url", "src",
)  # fmt: skip
_CAPTIONS = (
    "caption", "captions", "text", "sentence", "sentences", "description", "title", "alt_text", "alt", "prompt", "name",
)  # fmt: skip
_IDS = (
    "id", "item_id", "uid", "uuid", "__key__", "key", "image_id", "img_id", "photo_id", "sku", "product_id", "asset_id",
)  # fmt: skip
_NO_CAPTIONS = ("id", "key", "path", "url", "uri", "file", "hash", "split", "license", "license_url", "mime", "format")


def propose_columns(schema: pa.Schema, columns: Columns, is_unique: Callable[[str], bool]) -> dict[str, str]:
    """Choose plausible columns: the user's own stay, and others are added where one fits.

    `is_unique` says whether no value of a column occurs twice in the table's first file. The result has names by key,
    in the order `image`, `caption`, `id`; it is empty if nothing looks like an image or a caption.
    """
    image = columns.image or (None if columns.caption else _image(schema))
    caption = columns.caption or (None if columns.image else _caption(schema, image))
    if image is None and caption is None:
        return {}
    found = {"image": image, "caption": caption, "id": columns.id or _id(schema, image, (caption,), is_unique)}
    return {key: name for key, name in found.items() if name is not None}


def id_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that may hold ids: strings and integers, except labels, captions and addresses."""
    others = {*label_names(schema), *_CAPTIONS}
    return [
        field.name
        for field in schema
        if (is_text(field.type) or pa.types.is_integer(plain_type(field.type))) and field.name.lower() not in others
    ]


def _image(schema: pa.Schema) -> str | None:
    images = [field for field in schema if holds_images(field.type)]
    cells = [field.name for field in images]
    structs = [field.name for field in images if not is_binary(plain_type(field.type))]
    addresses = [name for name, kind in _list_nested(schema) if is_text(kind) and _leaf(name) in _ADDRESSES]
    return _first(structs, _IMAGES) or _first(cells, _IMAGES) or _first(addresses, _ADDRESSES)


def _caption(schema: pa.Schema, image: str | None) -> str | None:
    texts = [name for name, kind in _list_nested(schema) if _is_caption(kind) and not _is_part(name, image)]
    named = [name for name in texts if _leaf(name) in _CAPTIONS or "caption" in name.lower()]
    if named:
        return _first(named, _CAPTIONS)
    labels = [name for name in label_names(schema) if column_path(schema, name)]
    if labels:
        return labels[0]
    others = [name for name in texts if not _leaf(name).endswith(_NO_CAPTIONS) and "." not in name]
    return others[0] if len(others) == 1 else None


def _id(
    schema: pa.Schema, image: str | None, taken: Collection[str | None], is_unique: Callable[[str], bool]
) -> str | None:
    """Choose what gives the ids: `image` if it holds addresses. `taken` has the columns already in use."""
    for name in _IDS:
        for column in id_columns(schema):
            if column.lower() == name and column not in taken and is_unique(column):
                return column
    field = find_column(schema, image) if image is not None else None
    if field is None:
        return FILE_AND_ROW
    return CONTENT if holds_images(field.type) else None


def _list_nested(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    for name in column_names(schema):
        if (field := find_column(schema, name)) is not None:
            yield name, field.type


def _is_caption(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if is_list(kind) else kind)


def _is_part(name: str, column: str | None) -> bool:
    return column is not None and (name == column or name.startswith(f"{column}."))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _first(names: list[str], wanted: tuple[str, ...]) -> str | None:
    ranks = {name: rank for rank, name in enumerate(wanted)}
    return min(names, key=lambda name: ranks.get(_leaf(name), len(ranks)), default=None)
