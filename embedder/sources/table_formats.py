"""Reads Parquet, CSV and JSON Lines files: only the wanted columns, a few thousand rows at a time."""

import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from embedder.errors import SourceError
from embedder.media.sniff import encoding_of
from embedder.quantities import plural
from embedder.sources.byte_ranges import open_file, open_ranges
from embedder.sources.columns import column_path, label_names, parquet_name, take_column
from embedder.sources.csv_dialects import SAMPLE_CHARACTERS, Dialect, find_dialect
from embedder.sources.listing_schema import ROWS_PER_TABLE
from embedder.sources.source_errors import listing_errors
from embedder.sources.type_inference import (
    SAMPLE_ROWS,
    arrow_columns,
    infer_json_type,
    infer_text_type,
    json_value,
    names_in,
    text_value,
    value_at,
)
from embedder.storage.file_adapter import RangeFile
from embedder.storage.printable import is_text, readable
from shards.file_schema import parse_json

LOG = logging.getLogger(__name__)
PAGE_BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # anything longer is a file without line ends, not a JSON Lines row
MAX_FIELD_CHARACTERS = 1 << 24  # of a CSV file, as a picture in base64; a quote that is never closed ends there
csv.field_size_limit(MAX_FIELD_CHARACTERS)
SEPARATOR = b"separator"  # metadata of a schema: what separates the values of a CSV, if the header doesn't say
Rows = Iterator[tuple[int, dict[str, Any]]]


class OpenRows(NamedTuple):
    """The column names of a text table, if it has a header, and its rows with their line numbers."""

    header: list[str]
    rows: Rows
    separator: str = ""


class Chunk(NamedTuple):
    """Some rows of one file, in order; `start` counts within the file, `start_in_group` within the row group.

    `labels` are the names of integer labels, by column. `null_counts` has the number of nulls in the row group by
    Parquet's name of a column or field, if the file records it.
    """

    columns: dict[str, pa.Array]
    num_rows: int
    start: int
    row_group: int = 0
    start_in_group: int = 0
    labels: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    null_counts: Mapping[str, int] = MappingProxyType({})


class TableFormat(Protocol):
    """Reads the columns of one file format."""

    def schema(self, uri: str, text_columns: frozenset[str]) -> pa.Schema:
        """Return names and types; ids, URIs and captions (`text_columns`) are strings if the format has no types."""

    def chunks(self, uri: str, wanted: pa.Schema, text_columns: frozenset[str], fill_missing: bool) -> Iterator[Chunk]:
        """Read the wanted columns, cast; a missing one is null with `fill_missing`, else a SourceError."""


class ParquetFormat:
    """Parquet; the file defines the types."""

    def schema(self, uri: str, text_columns: frozenset[str]) -> pa.Schema:
        """Read the footer."""
        with readable_table(uri, "Parquet file"), _parquet(uri) as file:
            return file.schema_arrow

    def chunks(self, uri: str, wanted: pa.Schema, text_columns: frozenset[str], fill_missing: bool) -> Iterator[Chunk]:
        """Read row group by row group, like `TableFormat.chunks`; unwanted columns and struct fields are never read."""
        with readable_table(uri, "Parquet file"), _parquet(uri) as file:
            schema = file.schema_arrow
            present = [name for name in wanted.names if column_path(schema, name) is not None]
            if len(present) < len(wanted) and not fill_missing:
                missing = sorted(set(wanted.names) - set(present))
                raise SourceError(f"{readable(uri)}: column {missing[0]!r} is missing, which the first file has")
            start, labels = 0, label_names(schema)
            stored = list(dict.fromkeys(parquet_name(schema, name) for name in present))
            for row_group in range(file.num_row_groups):
                start_in_group, nulls = 0, _null_counts(file.metadata.row_group(row_group))
                for batch in file.iter_batches(
                    ROWS_PER_TABLE, row_groups=[row_group], columns=stored, use_threads=False
                ):
                    columns = _as_wanted(batch, wanted, present)
                    yield Chunk(columns, batch.num_rows, start, row_group, start_in_group, labels, nulls)
                    start, start_in_group = start + batch.num_rows, start_in_group + batch.num_rows


@contextmanager
def _parquet(uri: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # By default pyarrow 26 reads all wanted columns of a row group at once; a listing goes page by page instead.
    with (
        RangeFile(open_ranges(uri)) as raw,
        pq.ParquetFile(raw, pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES) as file,
    ):
        yield file


def _as_wanted(batch: pa.RecordBatch, wanted: pa.Schema, present: list[str]) -> dict[str, pa.Array]:
    return {
        field.name: take_column(batch, field.name).cast(field.type)
        if field.name in present
        else pa.nulls(batch.num_rows, field.type)
        for field in wanted
    }


def _null_counts(row_group: Any) -> dict[str, int]:
    leaves = (row_group.column(index) for index in range(row_group.num_columns))
    return {
        leaf.path_in_schema: leaf.statistics.null_count
        for leaf in leaves
        if leaf.statistics is not None and leaf.statistics.has_null_count
    }


@dataclass(frozen=True)
class TextFormat:
    """CSV or JSON Lines; the first rows decide the types of carryover columns.

    `infer` derives a type from values. `convert` turns one value into that type, or raises a ValueError.
    """

    open_rows: Callable[[str], OpenRows]
    infer: Callable[[Iterable[Any]], pa.DataType]
    convert: Callable[[Any, pa.DataType], Any]

    def schema(self, uri: str, text_columns: frozenset[str]) -> pa.Schema:
        """Read the first rows."""
        with readable_table(uri, "text table"):
            header, rows, separator = self.open_rows(uri)
            sample = [row for _, row in islice(rows, SAMPLE_ROWS)]
        inside = (name for row in sample for name in names_in(row) if is_text(name))  # Arrow has no other names
        names = dict.fromkeys([*header, *inside])
        fields = (
            pa.field(name, pa.string() if name in text_columns else self.infer([value_at(row, name) for row in sample]))
            for name in names
        )
        return pa.schema(fields, metadata={SEPARATOR: separator} if separator else None)

    def chunks(self, uri: str, wanted: pa.Schema, text_columns: frozenset[str], fill_missing: bool) -> Iterator[Chunk]:
        """Read line by line, like `TableFormat.chunks`, so that an error can name its line."""
        with readable_table(uri, "text table"):
            header, rows, _ = self.open_rows(uri)
            if header and (missing := sorted(set(wanted.names) - set(header))):
                raise SourceError(f"{readable(uri)}: column {missing[0]!r} is missing, which the first file has")
            start = 0
            while lines := list(islice(rows, ROWS_PER_TABLE)):
                values = [self._convert(f"{readable(uri)}:{line}", row, wanted, text_columns) for line, row in lines]
                yield Chunk(arrow_columns(values, wanted), len(lines), start)
                start += len(lines)

    def _convert(
        self, where: str, row: dict[str, Any], wanted: pa.Schema, text_columns: frozenset[str]
    ) -> dict[str, Any]:
        for name in text_columns:
            if type(value := value_at(row, name)) not in (str, int, type(None)):
                raise SourceError(f"{where}: column {name!r} holds a {type(value).__name__}; it must be a string")
        try:
            return {field.name: self.convert(value_at(row, field.name), field.type) for field in wanted}
        except ValueError as error:
            raise SourceError(f"{where}: {error}; correct that row, or write the column as text") from None


def _open_csv(uri: str, delimiter: str | None = None) -> OpenRows:
    lines = _csv_lines(uri, delimiter)
    dialect, _, header = next(lines, (Dialect(","), 0, []))
    if not header:
        raise SourceError(f"{readable(uri)}: the file is empty; its first line must name the columns")
    if twice := [name for name in header if header.count(name) > 1]:
        raise SourceError(f"{readable(uri)}:1: two columns are named {twice[0]!r}; rename one")
    return OpenRows(header, _csv_rows(lines, header, uri), dialect.delimiter if dialect.is_sniffed else "")


def _csv_rows(lines: Iterator[tuple[Dialect, int, list[str]]], header: list[str], uri: str) -> Rows:
    num_headers = 0
    for dialect, line, row in lines:
        if _is_header(row, header):
            num_headers += 1
            continue
        if not row or dialect.is_comment(row, len(header)):  # a blank line is no row
            continue
        if len(row) != len(header):
            raise SourceError(f"{readable(uri)}:{line}: {_wrong_width(row, header, dialect)}")
        yield line, dict(zip(header, row, strict=True))
    if num_headers:
        _log_headers(uri, num_headers)


def _wrong_width(row: list[str], header: list[str], dialect: Dialect) -> str:
    found = f"{len(row)} fields where the header has {len(header)}"
    if len(header) == 1:
        return f"{found}: the first line, {header[0]!r:.60}, looks like no header of this table; put one there"
    mark, quote = dialect.delimiter, dialect.quote
    if len(row) < len(header):
        return f"{found}: some are missing; write the {mark!r} of those that are empty, too"
    return f"{found}: a {mark!r} within a value separates, too; put that value into quotes: {quote}one{mark} two{quote}"


def _is_header(row: list[str], header: list[str]) -> bool:
    return len(header) > 1 and len(row) == len(header) and [row[0].removeprefix("\ufeff"), *row[1:]] == header


@lru_cache(maxsize=1)  # a small table is read twice: for its types, then its rows
def _log_headers(uri: str, number: int) -> None:
    LOG.info(f"{readable(uri)}: {plural(number, 'line')} with the header again left out")


def _csv_lines(uri: str, delimiter: str | None) -> Iterator[tuple[Dialect, int, list[str]]]:
    with _open_text(uri) as text:
        reader, before, begin = csv.reader([], strict=True), 0, 0
        try:
            dialect = _read_dialect(text, delimiter)
            for before in range(1, dialect.num_before + 1):  # noqa: B007
                text.readline()
            reader = csv.reader(text, **dialect.options)
            for row in reader:
                begin = reader.line_num
                yield dialect, before + begin, row
        except csv.Error as error:
            where = f"{readable(uri)}:{before + begin + 1}"  # where the row begins, which may reach to the file's end
            raise SourceError(f"{where}: no valid CSV ({error}); correct that row") from None
        except UnicodeError as error:
            line, encoding = before + reader.line_num + 1, text.encoding.removesuffix("-sig").upper()
            raise SourceError(
                f"{readable(uri)}:{line}: not {encoding} here or soon after ({getattr(error, 'reason', error)}); "
                "save it as UTF-8 (in Excel: CSV UTF-8)"
            ) from None


def _read_dialect(text: io.TextIOWrapper, delimiter: str | None) -> Dialect:
    try:
        sample = text.read(SAMPLE_CHARACTERS)
        is_whole = len(sample) < SAMPLE_CHARACTERS
    except UnicodeError:  # further down; reading the rows says in which line
        text.seek(0)
        sample, is_whole = text.readline(), False
    text.seek(0)
    return find_dialect(sample, is_whole=is_whole, delimiter=delimiter)


def _open_text(uri: str) -> io.TextIOWrapper:
    """Open a text in the encoding that its byte order mark names; UTF-8 without one."""
    file = open_file(uri)
    encoding = encoding_of(file.read(4))
    file.seek(0)
    return io.TextIOWrapper(file, encoding=encoding, newline="")


def _open_jsonl(uri: str) -> OpenRows:
    return OpenRows([], _jsonl_rows(uri))


def _jsonl_rows(uri: str) -> Rows:
    with open_file(uri) as file:
        line, encoding = 0, encoding_of(file.read(4))
        file.seek(0)
        if encoding != "utf-8-sig":
            yield from _recoded_jsonl_rows(uri)
            return
        while text := file.readline(MAX_LINE_BYTES + 1):
            line += 1
            row = _json_row(text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text, f"{readable(uri)}:{line}")
            if row is not None:
                yield line, row


def _recoded_jsonl_rows(uri: str) -> Rows:
    line = 0
    with _open_text(uri) as text:
        try:
            while row_text := text.readline(MAX_LINE_BYTES + 1):
                line += 1
                row = _json_row(row_text.encode("utf-8", "surrogatepass"), f"{readable(uri)}:{line}")
                if row is not None:
                    yield line, row
        except UnicodeError as error:
            name = text.encoding.upper()
            raise SourceError(f"{readable(uri)}:{line + 1}: not {name} ({error}); save it as UTF-8") from None


def _json_row(text: bytes, where: str) -> dict[str, Any] | None:
    if len(text) > MAX_LINE_BYTES:
        raise SourceError(f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; write one JSON object a line")
    if not text.strip():
        return None
    try:
        row = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise SourceError(f"{where}: no valid JSON ({error}); correct that line") from None
    if not isinstance(row, dict):
        raise SourceError(f"{where}: a {type(row).__name__} where a JSON object is due; write one object a line")
    return row


@contextmanager
def readable_table(uri: str, what: str) -> Iterator[None]:
    """Add the file's name to every error of reading it."""
    with listing_errors():
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise SourceError(
                f"{readable(uri)}: not readable as a {what} ({detail}); repair it, or take it out of the source"
            ) from None


FORMATS: dict[str, TableFormat] = {
    ".parquet": ParquetFormat(),
    ".csv": TextFormat(_open_csv, infer_text_type, text_value),
    ".tsv": TextFormat(partial(_open_csv, delimiter="\t"), infer_text_type, text_value),
    ".jsonl": TextFormat(_open_jsonl, infer_json_type, json_value),
    ".ndjson": TextFormat(_open_jsonl, infer_json_type, json_value),
}
