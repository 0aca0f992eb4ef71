"""Fills the columns of the medium in rows that are published already, from headers alone; vectors stay to the byte.

Rows that an earlier release has embedded lack them. Part files with such rows are written anew, with the same rows in
the same order, and published as a migration. Columns that `[metadata]` leaves out become null.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import medium_schema
from embedder.errors import StoreError
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME
from embedder.sources.fetch import FetchError
from embedder.sources.item_ranges import ITEM_FILE, embedded_file, open_item
from embedder.storage.file_adapter import ByteRanges
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import medium_array, rewritten_name, store_part
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import Published
from embedder.store.part_file import PartFile
from embedder.store.publish.current import IndexChoice, begin, parts_at, publish_files, writable
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.arrow_lookup import positions
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)
MARK = "format"
"""Column that each row has whose file was read."""


class Filled(NamedTuple):
    """Result: rows and files that lacked columns, files that could be read, bytes of them, columns made null."""

    num_rows: int
    num_files: int
    num_read: int = 0
    bytes_read: int = 0
    emptied: tuple[str, ...] = ()


@dataclass
class CountedRanges:
    """Ranges of a file that count the bytes that are read."""

    ranges: ByteRanges
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.size, self.version = self.ranges.size, self.ranges.version

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end."""
        found = self.ranges.read_at(offset, length)
        self.num_bytes += len(found)
        return found

    def close(self) -> None:
        """Close the file."""
        self.ranges.close()


class HeaderReader:
    """Reads the headers of items, each file once in a row."""

    def __init__(self, limits: DecodeLimits, columns: Collection[str]) -> None:
        self._limits, self.decoder = limits, SandboxedDecoder(limits, columns)
        self.num_read = self.bytes_read = 0

    def read(self, uri: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the medium's columns of an item; none if it is gone, has changed, or can't be read."""
        try:
            embedded = embedded_file(uri, item, is_text=False)
            counted = CountedRanges(open_item(uri, max_bytes=self._limits.max_file_bytes, embedded=embedded))
        except FetchError as error:
            LOG.info(f"{error.message}: its columns stay empty")
            return {}
        try:
            values = self.decoder.header(counted)
        except (DecodeError, FetchError) as error:
            LOG.info(f"{uri}: its header can't be read ({error.error_type}): its columns stay empty")
            return {}
        finally:
            counted.close()
            self.bytes_read += counted.num_bytes
        self.num_read += 1
        return values


def fill_metadata(
    files: StoreFiles,
    columns: Collection[str],
    choose_index: IndexChoice,
    limits: DecodeLimits | None = None,
    *,
    dry_run: bool = False,
) -> tuple[Published | None, Filled]:
    """Fill the columns of the medium of rows that lack them, and publish that as a new version.

    Args:
        files: the store, whose write lock the caller holds.
        columns: names of the columns to fill; others that the store has become null.
        choose_index: as for `embedder.store.publish.current.publish_files`.
        limits: of the sandbox.
        dry_run: only count.

    Returns the publication, None if nothing changed, and what was found. Raises StoreError if there is no publication,
    or an unfinished run's work would be lost.
    """
    current = writable(files)
    table = RecordTable(files, "embeddings", current.embeddings)
    known = served_info(read_store_info(files), current).medium_columns
    taken = {field.name for field in table.schema or ()} - set(known)
    wanted = tuple(name for name in BY_NAME if name in columns and name not in taken)
    dropped = tuple(name for name in known if name not in wanted)
    lacking = _count_lacking(table, wanted)
    if dry_run or not (lacking.num_rows or dropped):
        return None, lacking._replace(emptied=dropped)
    for run in unfinished_runs(files):
        raise StoreError(
            f"store {files.address}: run {run.run_id} is not finished, and filling columns would give up what it "
            "embedded; finish it first, by the command that began it"
        )
    RecordTable(files, "embeddings").add_columns(medium_schema(wanted))
    operation, reader = begin(files, "migration", current), HeaderReader(limits or DecodeLimits(), wanted)
    parts = parts_at(files, current)
    items = RecordTable(files, "items", current.items).read(list(ITEM_FILE))
    parts[""]["embeddings"] = [
        part if filled is None else store_part(files, "embeddings", _name(operation.run_id, part), filled, session="")
        for part in parts[""]["embeddings"]
        for filled in [_fill(table.read(paths=[part.path]), items, wanted, dropped, reader)]
    ]
    names = tuple(name for name in BY_NAME if name in {*known, *wanted})
    new = publish_files(files, operation, current, parts, choose_index, medium_columns=names)
    return new, lacking._replace(num_read=reader.num_read, bytes_read=reader.bytes_read, emptied=dropped)


def _name(run_id: str, part: PartFile) -> str:
    return rewritten_name(run_id, "", "metadata", [part.path])


def _is_lacking(rows: pa.Table, wanted: Collection[str]) -> pa.ChunkedArray:
    """Return which rows are of a picture or clip whose file was not read."""
    has_medium = pc.is_in(rows["modality"], value_set=pa.array(["image", "video", "pair"]))
    if MARK not in rows.column_names or MARK not in wanted:
        return has_medium
    return pc.and_(has_medium, pc.is_null(rows[MARK]))


def _count_lacking(table: RecordTable, wanted: Collection[str]) -> Filled:
    names = ["item_id", "modality", *([MARK] if MARK in (table.schema or pa.schema([])).names else [])]
    num_rows = num_files = 0
    for rows in table.pieces(names) if wanted else ():
        lacking = rows["item_id"].filter(_is_lacking(rows, wanted))
        num_rows, num_files = num_rows + len(lacking), num_files + len(lacking.unique())
    return Filled(num_rows, num_files)


def _fill(
    rows: pa.Table, items: pa.Table, wanted: Collection[str], dropped: Collection[str], reader: HeaderReader
) -> pa.Table | None:
    """Return the rows of one part file with their columns; None if nothing about them changes."""
    lacking = _is_lacking(rows, wanted) if wanted else pa.chunked_array([pa.repeat(False, rows.num_rows)])
    found = _read_values(rows.filter(lacking), items, reader)
    dropped = [name for name in dropped if name in rows.column_names and rows[name].null_count < rows.num_rows]
    if not dropped and not any(found.values()):
        return None
    ids = rows["item_id"].to_pylist()
    values = [found.get(item, {}) if lacks else {} for item, lacks in zip(ids, lacking.to_pylist(), strict=True)]
    for column in medium_schema(wanted):
        new = pa.chunked_array([medium_array([each.get(column.name) for each in values], column)])
        has_old = column.name in rows.column_names
        rows = _with_column(rows, column, pc.coalesce(new, rows[column.name]) if has_old else new)
    for column in medium_schema(dropped):
        rows = _with_column(rows, column, pa.chunked_array([pa.nulls(rows.num_rows, column.type)]))
    return rows


def _with_column(rows: pa.Table, column: pa.Field, values: pa.ChunkedArray) -> pa.Table:
    if column.name not in rows.column_names:
        return rows.append_column(column, values)
    return rows.set_column(rows.schema.get_field_index(column.name), column, values)


def _read_values(rows: pa.Table, items: pa.Table, reader: HeaderReader) -> dict[str, dict[str, Any]]:
    """Read the headers of the rows' items, by id; an item of several rows once."""
    uris = dict(zip(rows["item_id"].to_pylist(), rows["uri"].to_pylist(), strict=True))
    if not uris:
        return {}
    places = positions(pa.chunked_array([pa.array(list(uris), pa.string())]), items["item_id"]).drop_null()
    return {each["item_id"]: reader.read(uris[each["item_id"]], each) for each in items.take(places).to_pylist()}
