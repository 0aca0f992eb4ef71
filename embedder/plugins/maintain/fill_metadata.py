"""Fills the columns of the medium in rows that are published already, only from headers; vectors stay to the byte.

Rows that an earlier release has embedded lack them. Part files with such rows are rewritten, with the same rows in
the same order, and published as a migration. Columns that `[metadata]` leaves out become null. Rows of a release that
had no keywords are read again, once: a file without any has an empty list from then on.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import medium_schema
from embedder.errors import StoreError
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME, NOT_IN_HEADERS
from embedder.sources.fetch import FetchError
from embedder.sources.item_ranges import ITEM_FILE, embedded_file, open_item
from embedder.storage.file_adapter import ByteRanges
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import medium_array, rewritten_name, store_part
from embedder.store.journal.runs import OPERATIONS, all_runs, unfinished_runs
from embedder.store.layout import Current, Published
from embedder.store.publish.current import IndexChoice, begin, parts_at, publish_files, writable
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.arrow_lookup import KnownIds
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)
MARK = "format"
"""Column that each row has whose file was read."""
KEYWORDS = "keywords"
"""Column that is younger than the mark."""
NUM_READERS = 4
"""Files whose headers are read at the same time, each by its own child process."""
PUBLISH_EVERY_S = 600.0
"""Seconds after which what is filled so far is published: a process that ends early has lost no more."""


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


class HeaderReaders:
    """Header readers, each with its own child process, which share the files of a store."""

    def __init__(self, limits: DecodeLimits, columns: Collection[str]) -> None:
        self._all = [HeaderReader(limits, columns) for _ in range(NUM_READERS)]
        self._idle = SimpleQueue[HeaderReader]()
        for reader in self._all:
            self._idle.put(reader)
        self._threads = ThreadPoolExecutor(NUM_READERS, "headers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for reader in self._all:
            reader.decoder.close()

    def read(self, uris: Mapping[str, str], items: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Read the headers of items, whose places are `uris`; return their values by id."""

        def values_of(item: Mapping[str, Any]) -> dict[str, Any]:
            reader = self._idle.get()
            try:
                return reader.read(uris[item["item_id"]], item)
            finally:
                self._idle.put(reader)

        items = list(items)
        found = self._threads.map(values_of, items)
        return {item["item_id"]: values for item, values in zip(items, found, strict=True)}

    def count(self, filled: Filled) -> Filled:
        """Return the result with the files and bytes that were read."""
        num_read, bytes_read = (sum(getattr(each, name) for each in self._all) for name in ("num_read", "bytes_read"))
        return filled._replace(num_read=num_read, bytes_read=bytes_read)


def fill_metadata(
    files: StoreFiles,
    columns: Collection[str],
    choose_index: IndexChoice,
    limits: DecodeLimits | None = None,
    *,
    dry_run: bool = False,
) -> tuple[Published | None, Filled]:
    """Fill the columns of the medium of rows that lack them, and publish that as a new version.

    Of a large store a version is published every ten minutes, so that the next call continues where one has ended.

    Args:
        files: the store, whose write lock the caller holds.
        columns: names of the columns to fill; others that the store has become null.
        choose_index: as for `embedder.store.publish.current.publish_files`.
        limits: of the sandbox.
        dry_run: only count.

    Returns the last publication, None if nothing changed, and what was found. Raises StoreError if there is no
    publication, or an unfinished run's work would be lost.
    """
    current = writable(files)
    table = RecordTable(files, "embeddings", current.embeddings)
    known = served_info(read_store_info(files), current).medium_columns
    taken = {field.name for field in table.schema or ()} - set(known)
    wanted = tuple(name for name in BY_NAME if name in columns and name not in taken)
    dropped = tuple(name for name in known if name not in wanted)
    is_lacking = partial(_is_lacking, wanted, _find_older(files))
    lacking, ids = _count_lacking(table, wanted, dropped, is_lacking)
    if dry_run or not (lacking.num_rows or lacking.emptied):
        return None, lacking
    _refuse_unfinished(files)
    RecordTable(files, "embeddings").add_columns(medium_schema(wanted))
    items = _read_items(RecordTable(files, "items", current.items), ids)
    names = tuple(name for name in BY_NAME if name in {*known, *wanted})
    with HeaderReaders(limits or DecodeLimits(), wanted) as readers:
        fill = partial(_fill, table, items, (wanted, lacking.emptied), is_lacking, readers)
        new = _publish_filled(files, current, fill, choose_index, names)
        return new, readers.count(lacking)


def _refuse_unfinished(files: StoreFiles) -> None:
    for run in unfinished_runs(files):
        raise StoreError(
            f"store {files.address}: run {run.run_id} is not finished, and filling columns would give up what it "
            "embedded; finish it first, by the command that began it"
        )


def _publish_filled(
    files: StoreFiles,
    current: Current,
    fill: Callable[[str], pa.Table | None],
    choose_index: IndexChoice,
    names: tuple[str, ...],
) -> Published | None:
    """Publish part files with the rows that `fill` gives, every ten minutes and at the end; return the last version."""
    new, operation, like, published_s = None, None, current, time.monotonic()
    parts = parts_at(files, current)
    own = parts[""]["embeddings"]
    for number, part in enumerate(own):
        rows = fill(part.path)
        if rows is not None:
            operation = operation or begin(files, "migration", like)
            name = rewritten_name(operation.run_id, "", "metadata", [part.path])
            own[number] = store_part(files, "embeddings", name, rows, session="")
        is_due = time.monotonic() - published_s > PUBLISH_EVERY_S or number == len(own) - 1
        if operation is not None and is_due:
            new = like = publish_files(files, operation, like, parts, choose_index, medium_columns=names)
            operation, published_s = None, time.monotonic()
    return new


def _in_headers(wanted: Collection[str]) -> list[str]:
    """Return the columns that show whether a row's header was read."""
    return [MARK] if MARK in wanted else [name for name in wanted if name not in NOT_IN_HEADERS]


IsOlder = Callable[[pa.ChunkedArray], pa.ChunkedArray]
"""Whether rows that were embedded at some times may lack keywords that their files have."""
IsLacking = Callable[[pa.Table], pa.ChunkedArray]
"""Whether the files of some rows are to be read."""


def _find_older(files: StoreFiles) -> IsOlder:
    """Return a test for rows whose run knew no keywords; one run at a time embeds, and runs are in order."""
    runs = [run for run in all_runs(files) if run.kind not in OPERATIONS]
    starts = np.array([run.started_at.astimezone(UTC).replace(tzinfo=None) for run in runs], "datetime64[us]")
    knew = np.array([KEYWORDS in run.medium_columns for run in runs] + [False])

    def is_older(times: pa.ChunkedArray) -> pa.ChunkedArray:
        return pa.chunked_array([~knew[np.searchsorted(starts, times.to_numpy(), side="right") - 1]])

    return is_older


def _is_lacking(wanted: Collection[str], is_older: IsOlder, rows: pa.Table) -> pa.ChunkedArray:
    """Return which rows are of a picture or clip whose file was not read, or not for all columns."""
    shown = _in_headers(wanted)
    medium = pc.is_in(rows["modality"], value_set=pa.array(["image", "video", "pair"] if shown else [], pa.string()))
    lacking = medium
    for name in shown:
        if name in rows.column_names:
            lacking = pc.and_(lacking, pc.is_null(rows[name]))
    if KEYWORDS not in wanted:
        return lacking
    has_none = pc.is_null(rows[KEYWORDS]) if KEYWORDS in rows.column_names else medium
    return pc.or_(lacking, pc.and_(pc.and_(medium, has_none), is_older(rows["embedded_at"])))


def _narrow(table: RecordTable, names: Collection[str]) -> list[str]:
    has = table.schema.names if table.schema is not None else []
    return ["item_id", "modality", "embedded_at", *{name: None for name in (*names, KEYWORDS) if name in has}]


def _count_lacking(
    table: RecordTable, wanted: Collection[str], dropped: Collection[str], is_lacking: IsLacking
) -> tuple[Filled, pa.Array]:
    """Count the rows that lack columns; return with that their items' ids, and which dropped columns have values."""
    ids, num_rows, emptied = list[pa.Array](), 0, set[str]()
    for rows in table.pieces(_narrow(table, [*_in_headers(wanted), *dropped])):
        lacking = rows["item_id"].filter(is_lacking(rows))
        num_rows, ids = num_rows + len(lacking), [*ids, lacking.unique()]
        emptied |= {name for name in dropped if name in rows.column_names and rows[name].null_count < rows.num_rows}
    found = pa.chunked_array(ids, pa.string()).unique()
    return Filled(num_rows, len(found), emptied=tuple(name for name in dropped if name in emptied)), found


def _read_items(table: RecordTable, ids: pa.Array) -> pa.Table:
    """Read what locates the files of some items."""
    known = KnownIds(ids)
    pieces = [rows.filter(known.are_listed(rows["item_id"])) for rows in table.pieces(list(ITEM_FILE))]
    return pa.concat_tables(pieces) if pieces else table.read(list(ITEM_FILE))


def _fill(
    table: RecordTable,
    items: pa.Table,
    columns: tuple[Collection[str], Collection[str]],
    is_lacking: IsLacking,
    readers: HeaderReaders,
    path: str,
) -> pa.Table | None:
    """Return the rows of a part file with their columns; None if nothing about them changes.

    `columns` are those to fill and those to empty. Vectors are read of a file that changes only.
    """
    wanted, emptied = columns
    narrow = table.read(_narrow(table, [*_in_headers(wanted), *emptied]), [path])
    lacking = is_lacking(narrow)
    found = _read_values(table, path, narrow["item_id"].filter(lacking), items, readers)
    emptied = [name for name in emptied if name in narrow.column_names and narrow[name].null_count < len(narrow)]
    if not emptied and not any(found.values()):
        return None
    rows = table.read(paths=[path])
    ids = rows["item_id"].to_pylist()
    read = {item: {KEYWORDS: []} | values for item, values in found.items() if values}
    values = [read.get(item, {}) if lacks else {} for item, lacks in zip(ids, lacking.to_pylist(), strict=True)]
    for column in medium_schema(wanted):
        new = pa.chunked_array([medium_array([each.get(column.name) for each in values], column)])
        has_old = column.name in rows.column_names
        rows = _with_column(rows, column, pc.coalesce(new, rows[column.name]) if has_old else new)
    for column in medium_schema(emptied):
        rows = _with_column(rows, column, pa.chunked_array([pa.nulls(rows.num_rows, column.type)]))
    return rows


def _with_column(rows: pa.Table, column: pa.Field, values: pa.ChunkedArray) -> pa.Table:
    if column.name not in rows.column_names:
        return rows.append_column(column, values)
    return rows.set_column(rows.schema.get_field_index(column.name), column, values)


def _read_values(
    table: RecordTable, path: str, lacking: pa.ChunkedArray, items: pa.Table, readers: HeaderReaders
) -> dict[str, dict[str, Any]]:
    """Read the headers of a part file's items that lack columns, by id; an item of several rows once."""
    here = items.filter(pc.is_in(items["item_id"], value_set=lacking.unique()))
    if not here.num_rows:
        return {}
    places = table.read(["item_id", "uri"], [path])
    uris = dict(zip(places["item_id"].to_pylist(), places["uri"].to_pylist(), strict=True))
    return readers.read(uris, here.to_pylist())
