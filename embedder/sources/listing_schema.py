"""The rows that every kind of source yields, before the source's name is prefixed to the ids."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED
from embedder.sources.type_inference import SAMPLE_ROWS, arrow_columns, infer_json_type, json_value

ROW_SCHEMA = pa.schema(
    [
        pa.field("item_id", pa.string()),
        pa.field("uri", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("modified", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("caption_uri", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("error", pa.string()),
        pa.field("is_media", pa.bool_()),
        pa.field("described_by", pa.string()),
    ]
)
ROWS_PER_TABLE = 4096
HASHED = "bytes:"
"""Prefix of `modified` for an item that is identified by the hash of its content."""
SECONDS = len("2000-01-01T00:00:00")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z([+-]\d+)?")
_CHANGE = r"(:\d\d\.\d{9}Z|@-?\d+ns)[+-]\d+"
_CHANGED_AT = r"(?P<time>(?:19|20)\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9})Z\+?(?P<later>-?\d{1,18})"


class Row(NamedTuple):
    """One item, or one reject if `error_type` is set.

    `size_bytes` is None if the listing can't know it without reading (cells of a table, or remote files named in one).
    `modified` changes when the item may have changed: `file_version` of a local file, an ETag, a digest of a row.
    `is_media` means that the name or the user says it is media; if it turns out to be something else, it is a reject
    instead of being left out. `described_by` is JSON: by place of `[captions] from`, the URI of a further file that
    describes the item, or its text.
    """

    item_id: str
    uri: str
    size_bytes: int | None
    modified: str
    caption: str | None = None
    caption_uri: str | None = None
    error_type: str | None = None
    error: str | None = None
    is_media: bool = True
    described_by: str | None = None


@dataclass(frozen=True)
class Listing:
    """Content of one source: its carryover columns are known at once, its rows come as they are read."""

    tables: Iterator[pa.Table]
    carryover: pa.Schema = field(default_factory=lambda: pa.schema([]))
    unique_ids: bool = False


def tables_of_rows(rows: Iterable[Row]) -> Iterator[pa.Table]:
    """Gather rows into tables of ROW_SCHEMA, a few thousand rows each."""
    rows = iter(rows)
    while chunk := list(islice(rows, ROWS_PER_TABLE)):
        yield table_of_rows(chunk)


def table_of_rows(rows: list[Row], carryover: dict[str, pa.Array] | None = None) -> pa.Table:
    """Make one table of rows and their carryover columns, which get a prefix."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(ROW_SCHEMA)
    arrays: dict[str, Any] = {
        column.name: pa.array(values, column.type) for column, values in zip(ROW_SCHEMA, columns, strict=True)
    }
    return pa.table(arrays | {CARRIED + name: values for name, values in (carryover or {}).items()})


RowWithValues = tuple[Row, dict[str, Any]]
"""A row, and named values of a JSON object that belongs to it."""


def list_with_values(rows: Iterator[RowWithValues], names: Sequence[str], *, unique_ids: bool = False) -> Listing:
    """List rows with columns of JSON values named `names`; the first rows decide the types.

    `unique_ids` asserts that no two rows share an id.
    """
    first = list(islice(rows, SAMPLE_ROWS)) if names else []
    columns = pa.schema(pa.field(name, infer_json_type([values.get(name) for _, values in first])) for name in names)
    return Listing(_tables_with_values(chain(first, rows), columns), columns, unique_ids)


def _tables_with_values(rows: Iterator[RowWithValues], columns: pa.Schema) -> Iterator[pa.Table]:
    while chunk := list(islice(rows, ROWS_PER_TABLE)):
        converted = [_convert(row, values, columns) for row, values in chunk]
        arrays = arrow_columns([values for _, values in converted], columns)
        yield table_of_rows([row for row, _ in converted], arrays)


def _convert(row: Row, values: dict[str, Any], columns: pa.Schema) -> RowWithValues:
    """Convert the carried values; a value of another type rejects only its own item."""
    try:
        return row, {column.name: json_value(values.get(column.name), column.type) for column in columns}
    except ValueError as error:
        return row._replace(error_type="CarryoverType", error=f"carryover from .json: {error}"), {}


def time_text(mtime_ns: int) -> str:
    """Format a modification time as UTC ISO 8601 with nanoseconds; a time beyond the calendar as a number."""
    seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
    try:
        return f"{_second_text(seconds)}.{nanoseconds:09d}Z"
    except (OverflowError, ValueError, OSError):
        return f"@{mtime_ns}ns"


def file_version(status: os.stat_result) -> str:
    """Return a local file's modification time, and by how many nanoseconds its change time is later: `...Z+1500`.

    Programs that exchange a file can set the first, but not the second.
    """
    return f"{time_text(status.st_mtime_ns)}{status.st_ctime_ns - status.st_mtime_ns:+d}"


def without_change_time(modified: str) -> str:
    """Leave out the change times of files from a row's `modified`."""
    return re.sub(_CHANGE, r"\1", modified)


def without_change_times(modified: pa.ChunkedArray) -> pa.ChunkedArray:
    """Leave out the change times of files from a column `modified`."""
    return pc.replace_substring_regex(modified, _CHANGE, r"\1")


def changed_after(modified: pa.ChunkedArray, times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return whether an item's file, or the file of its caption, has a change time after a time; false if unknown."""
    is_after = pa.scalar(False)
    for before in ("^", r"^[^|]*\|"):
        found = pc.extract_regex(modified, before + _CHANGED_AT)
        time = pc.struct_field(found, "time").cast(pa.timestamp("ns"))
        later = pc.struct_field(found, "later").cast(pa.int64()).cast(pa.duration("ns"))
        changed = pc.add(time, later).cast(pa.timestamp("us"), safe=False)
        is_after = pc.or_(is_after, pc.fill_null(pc.greater(changed, times.cast(pa.timestamp("us"))), False))
    return is_after


def shown_modified(modified: str | None) -> str | None:
    """Format an item's `modified` for people: to the second, with the caption file's time if there is one."""
    if modified is None:
        return None
    own, _, of_caption = modified.partition("|")
    return f"{_shown_time(own)}, caption {_shown_time(of_caption)}" if _TIME.fullmatch(of_caption) else _shown_time(own)


def _shown_time(text: str) -> str:
    return f"{text[:SECONDS].replace('T', ' ')} UTC" if _TIME.fullmatch(text) else text


@lru_cache(maxsize=4096)
def _second_text(seconds: int) -> str:
    """Format a time in seconds; cached because many files of an archive share theirs."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:SECONDS]
