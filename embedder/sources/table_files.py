"""Files of a table: one, a folder, a pattern, or those named by a Delta log."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from embedder.errors import SourceError
from embedder.sources.file_names import is_hidden, is_shard_statistics
from embedder.sources.listing_schema import time_text
from embedder.sources.local_listing import Entry
from embedder.sources.selection import Selection, find_selected, take_all
from embedder.sources.table_formats import FORMATS, Chunk
from embedder.sources.uris import file_url_path, is_uri
from embedder.storage.object_stores import explain, is_remote, storage_options
from embedder.storage.printable import is_text, readable

_DELTA_LOG = "_delta_log"
_SEGMENT = re.compile(r"([^=]+)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_NULLS = ("__HIVE_DEFAULT_PARTITION__", "")
"""What Hive and Spark write for null in the name of a folder, and what an empty value means to them."""
MAX_COMPARED_ROWS = 100_000
_CARDS = frozenset({"readme.md", "license", "license.md", "license.txt", "dataset_infos.json", "croissant.json"})


@dataclass(frozen=True)
class TableFile:
    """One file of a table, given by path or URI.

    `name` is its path relative to the source, for ids of rows without their own. `modified` is its time or ETag.
    `constants` are columns that all its rows share but the file doesn't contain (partitions).
    """

    uri: str
    name: str
    modified: str
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """The files of one table, all of one format.

    `folder` is the base of relative image URIs; `suffix` is that of the format, such as `.parquet`. `schema` is the
    table's own if it has one apart from its files (Delta); files may then lack columns. `partitions` are columns that
    only the folders' names have.
    """

    folder: str
    suffix: str
    files: tuple[TableFile, ...]
    schema: pa.Schema | None = None
    partitions: pa.Schema = field(default_factory=lambda: pa.schema([]))

    def read_schema(self, text_columns: frozenset[str]) -> pa.Schema:
        """Return names and types of the columns: the table's own, else those of its first file."""
        if self.schema is not None:
            return self.schema
        schema = FORMATS[self.suffix].schema(self.files[0].uri, text_columns)
        for column in self.partitions:
            schema = schema.append(column.with_type(pa.string()) if column.name in text_columns else column)
        return schema

    def version_partitions(self, wanted: pa.Schema) -> "Table":
        """Add the partition values that are read to each file's `modified`, so that a renamed folder is a change."""
        names = [name for name in self.partitions.names if name in wanted.names]
        files = (
            replace(file, modified="|".join([file.modified, *(f"{name}={file.constants[name]}" for name in names)]))
            for file in self.files
        )
        return replace(self, files=tuple(files)) if names else self

    def is_unique(self, name: str) -> bool:
        """Return whether the first rows of the first file all have different, non-null values in a column."""
        first, wanted = self.files[0], pa.schema([pa.field(name, pa.string())])
        if name in first.constants:
            return False
        seen: set[str | None] = {None}
        num_rows = 0
        for chunk in FORMATS[self.suffix].chunks(first.uri, wanted, frozenset({name}), self.schema is not None):
            seen.update(chunk.columns[name].to_pylist())
            num_rows += chunk.num_rows
            if num_rows >= len(seen) or num_rows >= MAX_COMPARED_ROWS:
                break
        return num_rows < len(seen)

    def chunks(self, wanted: pa.Schema, text_columns: frozenset[str]) -> Iterator[tuple[TableFile, Chunk]]:
        """Read the wanted columns of all files in order, cast to the wanted types."""
        for file in self.files:
            for chunk in self.chunks_of(file, wanted, text_columns):
                yield file, chunk

    def chunks_of(self, file: TableFile, wanted: pa.Schema, text_columns: frozenset[str]) -> Iterator[Chunk]:
        """Read the wanted columns of one file."""
        stored = pa.schema(field for field in wanted if field.name not in file.constants)
        shared = [field for field in wanted if field.name in file.constants]
        for chunk in FORMATS[self.suffix].chunks(file.uri, stored, text_columns, self.schema is not None):
            constants = {
                field.name: pa.array([file.constants[field.name]] * chunk.num_rows).cast(field.type) for field in shared
            }
            yield chunk._replace(columns=chunk.columns | constants)


def find_table(path: str, selection: Selection | None = None) -> Table:
    """Find the files of a table at a path (from `normalise_source`); by default all files but junk are selected.

    Raises a SourceError if nothing is there, formats are mixed, or a Delta table uses an unsupported feature.
    """
    if is_delta(path):
        return _delta_table(path)
    found, selection = find_selected(path, selection or take_all(path))
    entries = [entry for entry in selection.without_junk(found) if not (found.is_folder and is_hidden(entry.name))]
    if found.is_folder:
        cards = {entry.name for entry in entries if is_card(entry.name) or is_shard_statistics(entry.name)}
        for name in cards:
            selection.left_out.count("other", name)
        entries = [entry for entry in entries if entry.name not in cards]
    files = tuple(_table_file(entry, found.uri(entry)) for entry in entries)
    suffixes = {_suffix(file) for file in files}
    if not suffixes:
        raise SourceError(f"{path}: the folder holds no table; give a {', '.join(FORMATS)} file or a Delta table")
    if len(suffixes) > 1:
        raise SourceError(
            f"{path}: the folder mixes {' and '.join(sorted(suffixes))} files; name one format by a pattern, "
            f"such as {path}/*{min(suffixes)}"
        )
    return _with_partitions(Table(found.root, suffixes.pop(), files))


def _with_partitions(table: Table) -> Table:
    """Add the columns that folders such as `lang=de` name, also above the source, as DuckDB does.

    A column that the files have is read from them.
    """
    values = [_partition_values(file.uri) for file in table.files]
    if not any(values):
        return table
    partitions = _partition_schema(values, table.read_schema(frozenset()).names)
    files = (
        replace(file, constants={name: value.get(name) for name in partitions.names})
        for file, value in zip(table.files, values, strict=True)
    )
    return replace(table, files=tuple(files), partitions=partitions)


def _partition_values(name: str) -> dict[str, str | None]:
    """Return the values that the folders of a path say, percent-escapes decoded; null for Hive's word for it."""
    found = (_SEGMENT.fullmatch(segment) for segment in name.split("/")[:-1])
    return {unquote(match[1]): None if match[2] in _NULLS else unquote(match[2]) for match in found if match}


def _partition_schema(files: Iterable[dict[str, str | None]], stored: Sequence[str]) -> pa.Schema:
    """Return the partition columns but those that the files have themselves, `stored`.

    They are int64 where all values are whole numbers (`month=01` is 1, as for pyarrow and Polars), else strings.
    """
    values: dict[str, list[str]] = {}
    for file in files:
        for name, value in file.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return pa.schema(
        pa.field(name, pa.int64() if texts and all(map(_INTEGER.match, texts)) else pa.string())
        for name, texts in values.items()
        if name not in stored
    )


def is_card(name: str) -> bool:
    """Return whether a file describes the data set of its folder, as on the Hugging Face hub; it is no table."""
    return name.rpartition("/")[2].lower() in _CARDS


def is_delta(path: str) -> bool:
    """Return whether a folder holds a Delta transaction log."""
    if is_remote(path):
        from embedder.sources.object_listing import stream_names

        return next(stream_names(f"{path}/{_DELTA_LOG}"), None) is not None
    return os.path.isdir(os.path.join(path, _DELTA_LOG))  # noqa: PTH112, PTH118


def _table_file(entry: Entry, uri: str) -> TableFile:
    if entry.error_type or not is_text(uri):
        reason = entry.error or "its name is no UTF-8"
        raise SourceError(f"{readable(uri)}: part of a table, but {reason}; take it out of the source")
    return TableFile(uri, entry.name, entry.modified)


def _suffix(file: TableFile) -> str:
    suffix = os.path.splitext(file.name)[1].lower()  # noqa: PTH122
    if suffix not in FORMATS:
        raise SourceError(
            f"{file.uri}: this is no table by its suffix; known are {', '.join(FORMATS)} (unpacked); "
            "rename it, unpack it, or take it out of the source"
        )
    return suffix


def _delta_table(path: str) -> Table:
    """Read the log of a Delta table.

    The import of `deltalake` stays inside this function: its home is the module of the store's tables, but a source is
    read before there is a store and needs only Delta's list of files. Paths come from the log because
    `DeltaTable.file_uris` percent-encodes the table's own folder (deltalake 1.6.6: a space in its name becomes `%20`).
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(path, storage_options=storage_options(path))
        _check_features(table.protocol().reader_features, table.deletion_vectors, path)
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        schema = pa.schema(table.schema().to_arrow())
        partitions = table.metadata().partition_columns
    except (DeltaError, OSError) as error:
        if is_remote(path) and (problem := explain(error, path)).kind != "NetworkError":
            raise SourceError(problem.message) from None
        raise SourceError(
            f"{path}: not readable as a Delta table ({str(error).splitlines()[0]}); repair its log"
        ) from None
    files = [_delta_file(path, action, partitions) for action in actions]
    return Table(path, ".parquet", tuple(sorted(files, key=lambda file: file.name)), schema)


def _check_features(features: list[str] | None, deletion_vectors: Any, path: str) -> None:
    if "columnMapping" in (features or ()):
        raise SourceError(f"{path}: the Delta table maps column names; write a copy without column mapping")
    if "deletionVectors" in (features or ()) and any(batch.num_rows for batch in deletion_vectors()):
        raise SourceError(
            f"{path}: rows are deleted by deletion vectors; run REORG TABLE ... APPLY (PURGE) on it first"
        )


def _delta_file(path: str, action: dict[str, Any], partitions: list[str]) -> TableFile:
    name = unquote(action["path"])
    if name.startswith("file://"):
        uri = file_url_path(action["path"])
    else:  # tables made by a shallow clone name files elsewhere
        uri = name if is_uri(name) or name.startswith("/") else f"{path}/{name}"
    constants = {column: action.get(f"partition.{column}") for column in partitions}
    return TableFile(uri, name, time_text(action["modification_time"] * 1_000_000), constants)
