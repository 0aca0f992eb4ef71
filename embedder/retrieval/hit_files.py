"""Hits as an Arrow table and as files: CSV, Parquet or JSON lines, and copies of the files that were found."""

import csv
import io
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from embedder.errors import ConfigError
from embedder.media.formats import IMAGE_FORMATS
from embedder.media.sniff import AVIF_BRANDS, EBML, STILL_BRANDS
from embedder.retrieval.hit import Hit
from embedder.sources.fetch import Fetcher
from embedder.sources.file_names import MEDIA_SUFFIXES
from embedder.storage.atomic_write import atomic_write
from embedder.storage.item_error import ItemError
from embedder.storage.output_file import check_output_file, check_parent_folder, unreachable_refused
from embedder.storage.printable import plain_json, printable, readable
from embedder.storage.web_address import shown_uri

SEGMENTS = pa.list_(pa.struct({"start_s": pa.float64(), "end_s": pa.float64(), "score": pa.float64()}))
DUPLICATES = pa.list_(pa.struct({"item_id": pa.string(), "score": pa.float64()}))
QUERY = pa.schema({"query_number": pa.int32(), "query": pa.string()})
HIT = pa.schema(
    {
        "rank": pa.int32(),  # from 1
        "score": pa.float64(),
        "item_id": pa.string(),
        "segment": pa.int32(),
        "modality": pa.string(),
        "uri": pa.string(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
        "caption": pa.string(),
        "probability": pa.float64(),
        "rank_score": pa.float64(),
        "words_rank": pa.int64(),
        "vector_rank": pa.int64(),
        "rerank_score": pa.float64(),
        "segments": SEGMENTS,
        "duplicates": DUPLICATES,
    }
)
MEDIUM = "medium."  # for a column of the medium whose name is taken
PREFIX = "carryover."  # for a carried column whose name is taken


def hit_table(
    answers: Sequence[Sequence[Hit]], types: Mapping[str, pa.DataType], queries: Sequence[str] | None = None
) -> pa.Table:
    """Make the table of the hits of some queries.

    With `queries`, the name of each query, the columns `query_number`, from 0, and `query` come first. The columns of
    `HIT` and one for each carried column follow; its type is the one in `types`, else that of its values, else JSON
    text. Those of the medium that a hit has come last, and `place`, the city nearest to it.
    """
    hits = [hit for of_query in answers for hit in of_query]
    rows = [
        {"query_number": number, "query": queries and readable(queries[number]), "rank": rank, **vars(hit)}
        for number, of_query in enumerate(answers)
        for rank, hit in enumerate(of_query, 1)
    ]
    columns: dict[str, pa.Array] = {}
    for field in HIT if queries is None else [*QUERY, *HIT]:
        values = [row[field.name] for row in rows]
        if pa.types.is_list(field.type):
            values = [[each._asdict() for each in several] for several in values]
        columns[field.name] = pa.array(values, field.type, from_pandas=True)  # NaN is no score
    names = dict.fromkeys([*types, *(name for hit in hits for name in hit.carryover)])
    for name in names:
        shown = name
        while shown in columns or (shown != name and shown in names):
            shown = PREFIX + shown
        columns[shown] = _array([hit.carryover.get(name) for hit in hits], types.get(name))
    for name in dict.fromkeys(name for hit in hits for name in hit.medium):
        columns[name if name not in columns else MEDIUM + name] = pa.array([hit.medium.get(name) for hit in hits])
    places = pa.array([hit.place for hit in hits], pa.string())
    if places.null_count < len(places):
        columns["place" if "place" not in columns else f"{MEDIUM}place"] = places
    return pa.table(columns)


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    for wanted in (kind, None) if kind is not None else (None,):
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return pa.array(values, wanted)
    return pa.array([None if value is None else json.dumps(value, default=str) for value in values], pa.string())


LISTING = "hits.csv"
HEAD_BYTES = 64  # enough for the suffix
MAX_NAME_BYTES = 120  # of a file name; file systems allow 255
MAX_SUFFIX_CHARACTERS = 8
RANK_DIGITS = 3

_PARTS = re.compile(r"[/\\]")
_RESERVED = frozenset('<>:"|?*')  # on some systems
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""First characters that make a spreadsheet read a formula, with the wide forms of Asian keyboards."""
_FTYP_SUFFIXES = (".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2")
_STILL_SUFFIXES = (".heic", ".heif", ".heics", ".heifs", ".hif", ".cr3")


class CopiedFiles(NamedTuple):
    """Copies of the files of hits.

    Several hits may share one of the `num_files` copies. `problems` has a line for each item that could not be copied.
    """

    folder: Path
    num_files: int
    problems: list[str]


def save_table(path: Path, table: pa.Table) -> None:
    """Write a table in the format that the suffix names; replaces an existing file once the new one is complete.

    Raises `ConfigError` if the suffix names no format, the folder is missing, or the file can't be written.
    """
    write = TABLE_FORMATS[check_output_file(path, TABLE_FORMATS, "hits")]
    try:
        with atomic_write(path) as file:
            write(_without_secrets(table), file)
    except OSError as error:
        raise ConfigError(f"hits {path}: {error.strerror or error}; name a place that can be written") from None


def copy_files(folder: Path, answers: Sequence[Sequence[Hit]], table: pa.Table) -> CopiedFiles:
    """Copy the files of hits into a new or empty folder, with `table` (a row per hit) completed by their names.

    The folder appears once everything is copied. An item's file is copied once, under the name of its first hit. Raises
    `ConfigError` if the folder is not empty, its parent is missing, or it can't be written.
    """
    check_copy_folder(folder)
    copied: dict[str, str] = {}
    problems: dict[str, str] = {}
    has_queries = len(answers) > 1
    try:
        with _whole_folder(folder) as stage, Fetcher() as fetcher:
            for number, hits in enumerate(answers, 1):
                digits = max(RANK_DIGITS, len(str(len(hits))))
                for rank, hit in enumerate(hits, 1):
                    if hit.item_id in copied or hit.item_id in problems:
                        continue
                    prefix = f"q{number}-" if has_queries else ""
                    try:
                        copied[hit.item_id] = _copy(hit, fetcher, stage, f"{prefix}{rank:0{digits}}-")
                    except ItemError as error:
                        problems[hit.item_id] = printable(str(error))
            _write_listing(stage / LISTING, _without_secrets(table), copied, problems)
    except OSError as error:
        raise ConfigError(f"copies {folder}: {error.strerror or error}; name a place that can be written") from None
    return CopiedFiles(folder, len(copied), [f"{item_id}: {line}" for item_id, line in problems.items()])


def check_copy_folder(folder: Path) -> None:
    """Check that a folder can be made, or is empty.

    Raises `ConfigError` if it is not empty, is a file, or its parent is missing, or if it is the working folder, in
    whose place none can be put.
    """
    if folder.name in ("", ".."):
        raise ConfigError(f"copies {folder}: it is where the command runs, or above it; name a new folder")
    check_parent_folder(folder, "copies")
    with unreachable_refused(folder, "copies"):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ConfigError(f"copies {folder}: it is no folder; name a new one")
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"copies {folder}: it holds files already, and none is replaced; name a new folder")


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which is renamed to `folder` if the block succeeds, else removed."""
    stage = folder.parent / f".{folder.name[:50]}.{secrets.token_hex(4)}.tmp"
    stage.mkdir()
    try:
        yield stage
        stage.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _copy(hit: Hit, fetcher: Fetcher, folder: Path, prefix: str) -> str:
    """Copy the file of a hit and return the name of the copy; raises ItemError if the file can't be read completely."""
    pieces = hit.pieces(fetcher)
    first = next(pieces, b"")
    path = folder / file_name(hit.item_id, first[:HEAD_BYTES], prefix)
    try:
        with path.open("xb") as file:
            for piece in chain([first], pieces):
                file.write(piece)
    except ItemError:
        path.unlink(missing_ok=True)
        raise
    return path.name


def file_name(item_id: str, head: bytes, prefix: str) -> str:
    """Return a name for the copy of an item's file that every file system accepts, from the last part of its id.

    `head`, the first bytes of the file, decides the suffix if the format differs from the id's. `prefix` makes it
    unique.
    """
    name = "".join(
        character if character.isprintable() and character not in _RESERVED else "_"
        for character in _PARTS.split(item_id)[-1]
    ).strip(". ")
    stem, dot, last = name.rpartition(".")
    own = f"{dot}{last}" if stem and len(last) <= MAX_SUFFIX_CHARACTERS else ""
    stem = stem if own else name
    known = _suffixes(head)
    is_other_kind = own.lower() not in known and not (".tif" in known and own.lower() in MEDIA_SUFFIXES)
    if known and is_other_kind:  # the content of camera raws is TIFF
        stem, own = stem if own.lower() in MEDIA_SUFFIXES else f"{stem}{own}", known[0]
    room = MAX_NAME_BYTES - len((prefix + own).encode())
    stem = stem.encode()[:room].decode(errors="ignore").strip(". ")
    return f"{prefix}{stem or 'item'}{own}"


def _suffixes(head: bytes) -> tuple[str, ...]:
    """Return the suffixes of the format that begins with `head`, the usual one first; empty if unknown."""
    for each in IMAGE_FORMATS:
        if each.signatures and head.startswith(each.signatures):
            return each.suffixes
    if head[:4] == b"RIFF":
        return (".webp",) if head[8:12] == b"WEBP" else (".avi",)
    if head[:4] == EBML:
        return (".webm", ".mkv") if b"webm" in head else (".mkv", ".webm")
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return (".avif", ".avifs", *_STILL_SUFFIXES) if brand in AVIF_BRANDS | STILL_BRANDS else _FTYP_SUFFIXES
    return ()


def _without_secrets(table: pa.Table) -> pa.Table:
    """Remove signatures from web addresses, as the files are passed on to others."""
    place = table.column_names.index("uri")
    return table.set_column(place, "uri", pa.array(map(shown_uri, table["uri"].to_pylist()), pa.string()))


def _write_listing(path: Path, table: pa.Table, copied: dict[str, str], problems: dict[str, str]) -> None:
    ids = table["item_id"].to_pylist()
    for name, values in (("problem", problems), ("file", copied)):
        while name in table.column_names:
            name += "_"  # noqa: PLW2901  # a carried column has this name
        table = table.add_column(0, name, pa.array([values.get(each) for each in ids], pa.string()))
    with path.open("xb") as file:
        _write_csv(table, file)


def _write_csv(table: pa.Table, file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow([_no_formula(name) for name in table.column_names])
    for row in _rows(table):
        writer.writerow([_cell(value) for value in row.values()])
    text.flush()
    text.detach()


def _write_json_lines(table: pa.Table, file: BinaryIO) -> None:
    for row in _rows(table):
        file.write(json.dumps(plain_json(row), ensure_ascii=False).encode())
        file.write(b"\n")


def _write_parquet(table: pa.Table, file: BinaryIO) -> None:
    from pyarrow import parquet

    parquet.write_table(table, file)


TABLE_FORMATS: dict[str, Callable[[pa.Table, BinaryIO], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".jsonl": _write_json_lines,
}
"""Table formats by file suffix."""


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(1000):
        yield from batch.to_pylist()


def _cell(value: Any) -> Any:
    """Convert a value for a CSV file: numbers as they are, text so that it is not a formula."""
    value = value if isinstance(value, Decimal) else plain_json(value)
    if value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool)):
        return value
    return _no_formula(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _no_formula(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would evaluate or run."""
    return f"'{text}" if _FORMULA.match(text) else text
