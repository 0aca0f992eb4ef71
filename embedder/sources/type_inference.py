"""Arrow types for carryover values that come as text or JSON, inferred from a sample and then fixed."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from embedder.storage.printable import is_text, readable

SAMPLE_ROWS = 1000
MAX_DEPTH = 3  # of nested objects whose values can be columns
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})\Z")  # at most 18 digits: always in int64
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\Z|[+-]?(nan|inf)\Z", re.IGNORECASE)
_LONG_INTEGER = re.compile(r"[+-]?[0-9]{19,}\Z")  # a code; a double would lose digits
_BOOLEANS = {"true": True, "false": False}
_JSON_TYPES = {pa.bool_(): (bool,), pa.int64(): (int,), pa.float64(): (int, float)}


def infer_json_type(values: Iterable[Any]) -> pa.DataType:
    """Infer the type of JSON values, ignoring None: bool, int64, double, else string (other values as JSON text)."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def infer_text_type(values: Iterable[str | None]) -> pa.DataType:
    """Infer the type of CSV fields, ignoring empty ones; `007` is a code, not a number, and stays text."""
    texts = [value for value in values if value]
    for kind in (pa.bool_(), pa.int64(), pa.float64()) if texts else ():
        if all(_parse(text, kind) is not None for text in texts):
            return kind
    return pa.string()


def _parse(text: str, kind: pa.DataType) -> bool | int | float | None:
    if kind == pa.bool_():
        return _BOOLEANS.get(text.lower())
    if kind == pa.int64():
        return int(text) if _INTEGER.match(text) else None
    return float(text) if _NUMBER.match(text) and not _LONG_INTEGER.match(text) else None


def json_value(value: Any, kind: pa.DataType) -> Any:
    """Convert one JSON value; a ValueError if it doesn't fit the type."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return make_storable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if type(value) not in _JSON_TYPES[kind]:  # exactly: True is not 1
        raise ValueError(f"{value!r:.40} is no {kind}, which the first rows hold")
    if kind == pa.int64() and not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r:.40} is beyond int64")
    try:
        return float(value) if kind == pa.float64() else value
    except OverflowError:
        raise ValueError(f"{value!r:.40} is beyond double") from None


def text_value(text: str | None, kind: pa.DataType) -> Any:
    """Convert one CSV field, a ValueError if it doesn't fit; an empty field is null except in a text column."""
    if text is None or pa.types.is_string(kind):
        return text
    if not text:
        return None
    value = _parse(text, kind)
    if value is None:
        raise ValueError(f"{text!r:.40} is no {kind}, which the first rows hold")
    return value


def arrow_columns(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> dict[str, pa.Array]:
    """Turn converted values into one array per field."""
    return {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in schema}


def names_in(row: Mapping[str, Any], depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the names of a row's values, each object followed by its own: `image`, `image.path`."""
    for name, value in row.items():
        yield name
        if depth and isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in names_in(value, depth - 1))


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return a value; a dot leads into an object, unless a name in the row contains it. None if missing."""
    if name in row:
        return row[name]
    for dot in reversed([place for place, letter in enumerate(name) if letter == "."]):  # the longest name first
        inner = row.get(name[:dot])
        if isinstance(inner, dict) and (value := value_at(inner, name[dot + 1 :])) is not None:
            return value
    return None


def make_storable(text: str) -> str:
    """Make text storable: lone surrogates, which JSON can spell, become visible escapes."""
    return text if is_text(text) else readable(text)
