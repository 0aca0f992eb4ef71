"""Finds a table's columns by name: a dot leads into a struct, unless a column's own name contains it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.file_schema import parse_json

_FEATURES = b"huggingface"  # key of a Parquet file's metadata, where the library `datasets` describes its columns


def column_path(schema: pa.Schema, name: str) -> tuple[str, ...] | None:
    """Return the path of a column or of a field of its structs, (`image`, `path`) for `image.path`; None if missing."""
    return _path({field.name: field.type for field in schema}, name)


def _path(types: Mapping[str, pa.DataType], name: str) -> tuple[str, ...] | None:
    if name in types:
        return (name,)
    for dot in reversed([place for place, letter in enumerate(name) if letter == "."]):  # the longest name first
        if name[:dot] in types and (rest := _path(_fields(types[name[:dot]]), name[dot + 1 :])):
            return (name[:dot], *rest)
    return None


def _fields(kind: pa.DataType) -> dict[str, pa.DataType]:
    kind = kind.value_type if is_list(kind) else kind
    return {field.name: field.type for field in kind.fields} if pa.types.is_struct(kind) else {}


def find_column(schema: pa.Schema, name: str) -> pa.Field | None:
    """Find the name and type of a column such as `image.path`; a field inside a list of structs has a list type."""
    path = column_path(schema, name)
    if path is None:
        return None
    kind, is_in_list = schema.field(schema.names.index(path[0])).type, False  # a name may stand twice
    for step in path[1:]:
        is_in_list = is_in_list or is_list(kind)
        kind = _fields(kind)[step]
    return pa.field(name, pa.list_(kind) if is_in_list else kind)


def take_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the values of a column or of a field of its structs; null where the struct is null."""
    path = column_path(batch.schema, name)
    if path is None:
        raise KeyError(name)
    values = batch[path[0]]
    for step in path[1:]:
        values = _child(values, step)
    return values


def _child(values: pa.Array, name: str) -> pa.Array:
    if not is_list(values.type):
        return pc.struct_field(values, [name])
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    inner = pc.struct_field(values.flatten(), [name])
    return pa.ListArray.from_arrays(offsets, inner, mask=pc.is_null(values))


def parquet_name(schema: pa.Schema, name: str) -> str:
    """Return the name Parquet has to read for a column: one field of a struct, all of a list of structs."""
    path = column_path(schema, name) or (name,)
    inside, kind = [path[0]], schema.field(path[0]).type
    for step in path[1:]:
        if is_list(kind):
            break
        inside.append(step)
        kind = _fields(kind)[step]
    return ".".join(inside)


def column_names(schema: pa.Schema) -> Iterator[str]:
    """Yield the names of all columns, each followed by those of its fields."""
    for field in schema:
        yield field.name
        yield from (f"{field.name}.{name}" for name in _fields(field.type))


def label_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Read the label names of integer columns, by column, as Hugging Face's `datasets` stores them."""
    try:
        features = parse_json((schema.metadata or {})[_FEATURES])["info"]["features"]
        return dict(_labels(features)) if isinstance(features, dict) else {}
    except (KeyError, TypeError, ValueError):
        return {}  # another program's metadata


def _labels(features: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for column, feature in features.items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names = feature.get("names")
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                yield column, tuple(names)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary, or the type itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes."""
    return kind in (pa.binary(), pa.large_binary(), pa.binary_view()) or pa.types.is_fixed_size_binary(kind)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds strings, plain or dictionary-encoded."""
    return plain_type(kind) in (pa.string(), pa.large_string(), pa.string_view())


def holds_images(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes, or structs with `bytes` as Hugging Face's `datasets` writes images."""
    kind = plain_type(kind)
    inner = _fields(kind).get("bytes") if pa.types.is_struct(kind) else kind
    return inner is not None and is_binary(inner)
