"""Schemas of the two tables of record; fixed: columns may be added, not changed."""

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import ConfigError, StoreError

FORMAT_VERSION = 2
READABLE_FORMATS = (1, FORMAT_VERSION)
"""Each new column makes a new format.

In 1, `items` had no `stale` and CURRENT.json no model; a store of an earlier format can be read, and can be written
after a migration.
"""
MARKS = ("store.json", "runs")
"""File and folder that identify a store of embeddings."""

PICKLED = "ray.data.arrow_pickled_object"
"""Arrow name of Ray's type for values of any class; a program that has imported Ray unpickles them to objects."""

VECTOR_COLUMNS = ("image_embedding", "text_embedding")

TIMESTAMP = pa.timestamp("us", tz="UTC")

ITEMS = pa.schema(
    {
        "item_id": pa.string(),
        "source": pa.string(),
        "uri": pa.string(),
        "size_bytes": pa.int64(),
        "modified": pa.string(),
        "content_version": pa.string(),
        "state": pa.string(),
        "step": pa.string(),
        "error_type": pa.string(),
        "error": pa.string(),
        "transient": pa.bool_(),
        "attempts": pa.int32(),  # since the file last changed
        "num_vectors": pa.int32(),  # number of the item's rows in embeddings
        "run_id": pa.string(),
        "updated_at": TIMESTAMP,
        "stale": pa.bool_(),  # a reject with the vectors of an earlier content, whose `content_version` it has
    }
)

EMBEDDINGS = pa.schema(
    {
        "item_id": pa.string(),
        "segment": pa.int32(),
        "modality": pa.string(),
        "uri": pa.string(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
        "caption": pa.string(),
        "image_embedding": pa.list_(pa.float32()),
        "text_embedding": pa.list_(pa.float32()),
        "content_version": pa.string(),
        "model_fingerprint": pa.string(),
        "preprocess_fingerprint": pa.string(),
        "run_id": pa.string(),
        "embedded_at": TIMESTAMP,
    }
)

TABLES = {"items": ITEMS, "embeddings": EMBEDDINGS}


def with_nulls(content: pa.Table, schema: pa.Schema) -> pa.Table:
    """Add missing columns as nulls; StoreError for pickled objects, whose code would run on reading."""
    if any(PICKLED in str(kind) for kind in content.schema.types):
        raise StoreError(
            f"a part file of the store has a column of {PICKLED}: Ray runs what such values hold as they are read, and "
            "a store is data; delete its items and embed them again, or use a store of somebody whom you trust"
        )
    for column in schema:
        if column.name not in content.schema.names:
            content = content.append_column(column, pa.nulls(content.num_rows, column.type))
    return content


def with_carryover(schema: pa.Schema, carryover: pa.Schema) -> pa.Schema:
    """Return the schema of the table's own columns, then the carried ones in types that a Delta table can store.

    Raises ConfigError if a carried column has the name of an own column, or a type that Delta lacks.
    """
    for column in carryover:
        if column.name.lower() in map(str.lower, schema.names):  # as Delta compares them
            raise ConfigError(
                f"carryover column {column.name!r}: the embeddings table has a column of that name; "
                "rename it in the source or leave it out"
            )
        schema = schema.append(pa.field(column.name, _storable(column)))
    return schema


# Delta has only signed integers, no half floats and one string type; each of these holds all values of its key.
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.null(): pa.string(),
}
# As a struct's fields they keep their width: so have tables declared them from the beginning.
_SIGNED = {pa.uint8(): pa.int8(), pa.uint16(): pa.int16(), pa.uint32(): pa.int32(), pa.uint64(): pa.int64()}
MAX_DIGITS = 38  # of a decimal number


def to_stored(values: pa.ChunkedArray, column: pa.Field) -> pa.ChunkedArray:
    """Convert values to a column of the table; of times, what is below a microsecond is cut off.

    Raises a ConfigError for a value that the column's type can't hold, such as a large unsigned integer of a struct.
    """
    try:
        return values.cast(options=pc.CastOptions(column.type, allow_time_truncate=True))
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"carryover column {column.name!r}: {error}; a Delta table keeps it as {column.type}: cast it in the "
            "source to a type that this holds, such as a wider signed one for unsigned integers"
        ) from None


def _storable(column: pa.Field) -> pa.DataType:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _storable(pa.field(column.name, kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_storable(pa.field(column.name, kind.value_type)))
    if pa.types.is_struct(kind):
        inner = {each: each.with_name(f"{column.name}.{each.name}") for each in kind.fields}
        return pa.struct([each.with_type(_SIGNED.get(each.type) or _storable(inner[each])) for each in inner])
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_decimal(kind) and kind.precision <= MAX_DIGITS:
        return pa.decimal128(kind.precision, kind.scale)
    others = (pa.types.is_decimal, pa.types.is_duration, pa.types.is_time, pa.types.is_interval)
    if any(is_kind(kind) for is_kind in others):
        raise ConfigError(
            f"carryover column {column.name!r}: a Delta table keeps no {kind}; cast it in the source, or leave it out"
        )
    return _WIDER.get(kind, kind)
