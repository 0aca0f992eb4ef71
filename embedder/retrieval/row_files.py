"""What searches read of a publication's items, in two mapped Arrow files: nothing of it is loaded, sorted or matched.

`rows.arrow` has the columns of hits and conditions, row by row of the embeddings table: carried ones, the items table's
times and sizes, and a row's number; text of few values is dictionary-encoded. `numbers.arrow` has one batch of int32
columns, padded with -1: the rows in the order of their ids, the row of each vector of the index, and back; where a
vector lies in an index whose lists are in another order; the row of each row of a further model that reads words.

A search touches the pages that it needs, and processes of one machine share them. They are made when a publication is
made; a reader that finds none, or a damaged one, makes them in its cache. Their hashes of samples, and those of the
index's files, are compared when they are opened; the whole hashes by `check_files`, afterwards.
"""

import hashlib
import json
import logging
import mmap
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedder.retrieval.filters import MODIFIED, ROW, SIZE, encode_repeated
from embedder.retrieval.ranking import RowNumbers
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from embedder.store.store_errors import StoreUnwritableError
from embedder.store.tables.arrow_lookup import positions as places_of
from embedder.store.tables.arrow_lookup import take_or_null
from embedder.store_index.index_versions import COPIES_FOLDER, fetched_copy, make_copy, open_copy, write_folder
from index.atomic_folder import hash_files
from index.checked_files import check_hashes, hash_samples
from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME
from index.vectors import Mask, Rows

LOG = logging.getLogger(__name__)
ROWS_NAME, NUMBERS_NAME = "rows.arrow", "numbers.arrow"
NAMES = (ROWS_NAME, NUMBERS_NAME)
SOURCE, STALE, PICTURED = "__source", "__stale", "__has_picture"
OF_FILES = {"source": SOURCE, "size_bytes": SIZE, "modified": MODIFIED, "stale": STALE}
"""Columns of the items table, by their names in the rows."""
HIDDEN = frozenset({ROW, PICTURED, *OF_FILES.values()})
"""Columns of the row files that neither hits nor conditions show."""
ORDER, VECTOR, TABLE_ROW, FIRST, PLACE = "order", "vector", "row", "first", "place"
OF_MODEL = "model."  # before the name of a further model
OF_VECTORS = (TABLE_ROW, PLACE)
ROWS_PER_BATCH = 1 << 17
Int32s = np.ndarray[Any, np.dtype[np.int32]]
MIN_ROWS = 20_000
"""Rows of a store from which on it has these files; fewer are read from the tables in some hundredths of a second."""


class RowsManifest(BaseModel):
    """Manifest of row files; written last, so a folder that has one is complete."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    format_version: Literal[1] = 1
    num_rows: int = Field(ge=0, description="of the embeddings table")
    num_vectors: int = Field(ge=0, description="rows of the index, masked ones included")
    has_groups: bool = Field(description="whether an item has more than one row")
    is_in_order: bool = Field(description="whether the index has the table's rows, in their order")
    sha256: dict[str, str] = Field(description="file name to hex digest")
    samples: dict[str, str] = Field(description="file name to its hash of samples")
    index_samples: dict[str, str] = Field(description="the same of the index's files")


@dataclass(frozen=True)
class RowContents:
    """Rows to be written.

    `rows` are the table's without vectors, `items` the items table's `item_id` and columns of `OF_FILES`; `pictured`,
    bool (rows,), whether a row has a picture's vector. `table_rows` has the row of each vector, `vector_rows` the
    vector of each row, -1 for none; `places` where each vector lies, None if its number says it; `of_models` the row of
    each row of further models, by their names.
    """

    rows: pa.Table
    items: pa.Table
    pictured: Mask
    table_rows: RowNumbers
    vector_rows: RowNumbers
    places: RowNumbers | None
    of_models: Mapping[str, RowNumbers]
    index_samples: Mapping[str, str]


def write_row_files(folder: Path, contents: RowContents) -> None:
    """Write both files and their manifest into an empty folder; OSError if the disk is full."""
    rows, num_rows = contents.rows, contents.rows.num_rows
    order = pc.sort_indices(rows["item_id"]).to_numpy().astype(np.int32)
    numbers = {ORDER: order, TABLE_ROW: contents.table_rows, VECTOR: contents.vector_rows}
    if contents.places is not None:
        numbers[PLACE] = contents.places
    has_groups = bool(pc.any(pc.greater(rows["segment"], 0)).as_py())
    if has_groups:
        numbers[FIRST] = _first_places(rows["item_id"], order)
    plain = rows.column_names
    places = places_of(rows["item_id"], contents.items["item_id"])
    for name, hidden in OF_FILES.items():
        rows = rows.append_column(hidden, take_or_null(contents.items[name], places))
    rows = encode_repeated(rows, {*plain, *OF_FILES.values()} - {"item_id", "uri"})
    rows = rows.append_column(PICTURED, pa.array(contents.pictured))
    rows = rows.add_column(0, ROW, pa.array(np.arange(num_rows, dtype=np.int32)))
    _write(folder / ROWS_NAME, rows.unify_dictionaries(), ROWS_PER_BATCH)
    length = max(num_rows, len(contents.table_rows))
    numbers |= {OF_MODEL + name: each for name, each in contents.of_models.items() if len(each) <= length}
    padded = {name: _pad(values, length) for name, values in numbers.items()}
    _write(folder / NUMBERS_NAME, pa.table(padded), max(1, length))
    manifest = RowsManifest(
        num_rows=num_rows,
        num_vectors=len(contents.table_rows),
        has_groups=has_groups,
        is_in_order=np.array_equal(contents.table_rows, np.arange(num_rows)),
        sha256=hash_files(folder / name for name in NAMES),
        samples={name: hash_samples(folder / name) for name in NAMES},
        index_samples=dict(contents.index_samples),
    )
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _write(path: Path, table: pa.Table, rows_per_batch: int) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)


class _MappedTable:
    """Table of a mapped Arrow file, of which the kernel reads the pages that are touched and none around them.

    So opening reads the descriptions of its batches, which lie megabytes apart, and a hit some kilobytes.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._advise("MADV_RANDOM")  # pyarrow's own mapping has the kernel read the batches, too
        self.table = pa.ipc.open_file(pa.py_buffer(self._pages)).read_all()

    def read_ahead(self) -> None:
        """Have the kernel read what lies around a touched page, too, as whole columns will be read."""
        self._advise("MADV_NORMAL")

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):
            self._pages.madvise(getattr(mmap, advice))


def _view(column: pa.ChunkedArray) -> Int32s:
    """Return a column of one batch in place; ValueError if it is another. `to_numpy` would import pandas."""
    if column.type != pa.int32() or column.num_chunks > 1:
        raise ValueError(f"found {column.type} in {column.num_chunks} batches where int32 in one is due")
    chunks = column.chunks
    return np.frombuffer(chunks[0].buffers()[1], np.int32, len(column)) if chunks else np.empty(0, np.int32)


def _pad(values: RowNumbers, length: int) -> pa.Array:
    found = np.full(length, -1, np.int32)
    found[: len(values)] = values
    return pa.array(found)


def _first_places(ids: pa.ChunkedArray, order: RowNumbers) -> RowNumbers:
    """Return for each row the place in `order` of the first row of its item."""
    ordered = ids.cast(pa.large_string()).combine_chunks().take(pa.array(order))  # all may exceed 2 GiB
    starts = np.ones(len(order), np.bool_)
    starts[1:] = pc.not_equal(ordered[1:], ordered[:-1]).to_numpy(zero_copy_only=False)
    first = np.empty(len(order), np.int32)
    first[order] = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    return first


class RowFiles:
    """Row files of one publication, mapped; safe for several threads.

    Attributes:
        manifest: their counts and hashes.
        rows: all columns of `rows.arrow`.
    """

    def __init__(self, folder: Path) -> None:
        """Map the files of a folder; RetrievalError if one is missing, altered or malformed."""
        self.folder = folder
        try:
            self.manifest = RowsManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
            found = {name: hash_samples(folder / name) for name in NAMES}
        except (OSError, ValidationError) as error:
            raise RetrievalError(f"{folder}: no row files can be read there ({type(error).__name__})") from None
        if found != self.manifest.samples:
            raise RetrievalError(f"{folder}: a file was altered or cut short, its hash of samples differs")
        try:
            self._mapped, others = (_MappedTable(folder / name) for name in NAMES)
            self.rows, numbers = self._mapped.table, others.table
            others.read_ahead()
            self._numbers = {name: _view(numbers[name]) for name in numbers.column_names}
        except (ValueError, OSError) as error:  # pa.ArrowInvalid is a ValueError
            raise RetrievalError(f"{folder}: {error}") from None
        length = max(self.manifest.num_rows, self.manifest.num_vectors)
        named = HIDDEN | {"item_id"} <= {*self.rows.column_names}
        is_whole = (self.rows.num_rows, numbers.num_rows) == (self.manifest.num_rows, length)
        if not (named and is_whole and {ORDER, VECTOR, TABLE_ROW} <= {*numbers.column_names}):
            raise RetrievalError(f"{folder}: other rows or columns than its manifest says")

    def numbers(self, name: str) -> Int32s:
        """Return a column of numbers in place, int32: of the vectors if it is one of `OF_VECTORS`, else of the rows."""
        return self._numbers[name][: self.manifest.num_vectors if name in OF_VECTORS else self.manifest.num_rows]

    @property
    def places(self) -> Int32s | None:
        """Where each vector of the index lies, int32 (vectors,); None if its number says it, or nobody has noted it."""
        return self.numbers(PLACE) if PLACE in self._numbers else None

    def of_model(self, name: str, num_rows: int) -> Int32s | None:
        """Return the row of each row of a further model, int32 (num_rows,), -1 for none; None if it was not noted."""
        found = self._numbers.get(OF_MODEL + name)
        return None if found is None else found[:num_rows]

    def columns(self, names: Mapping[str, str]) -> pa.Table:
        """Return columns in place: what each is called here -> what it shall be called."""
        return self.rows.select(list(names)).rename_columns(list(names.values()))

    def read_ahead(self) -> None:
        """Prepare for reading whole columns of `rows`, of which single rows are read else."""
        self._mapped.read_ahead()

    @property
    def public(self) -> list[str]:
        """Names of the columns that hits and conditions show."""
        return [name for name in self.rows.column_names if name not in HIDDEN]


class MappedItemRows:
    """Rows of the index of each item, with the interface of `embedder.retrieval.ranking.ItemRows`."""

    def __init__(self, found: RowFiles) -> None:
        """Keep the files, which say which rows belong together."""
        self.has_groups = found.manifest.has_groups
        self._rows, self._vectors, self._order = (found.numbers(name) for name in (TABLE_ROW, VECTOR, ORDER))
        self._first = found.numbers(FIRST) if self.has_groups else self._order

    def first_of_each(self, rows: Rows) -> Rows:
        """Return the positions in `rows` where an item occurs for the first time."""
        if not self.has_groups:
            return np.arange(len(rows))
        _, first = np.unique(self._first[self._rows[rows]], return_index=True)
        positions: Rows = np.sort(first)
        return positions

    def others(self, row: int) -> Rows:
        """Return the other rows of the item that a row belongs to; none for an image."""
        if not self.has_groups:
            return np.empty(0, np.int64)
        start = stop = int(self._first[self._rows[row]])
        while stop < len(self._order) and self._first[self._order[stop]] == start:
            stop += 1
        found: Rows = np.sort(self._vectors[self._order[start:stop]]).astype(np.int64)
        others: Rows = found[(found >= 0) & (found != row)]
        return others


class DamagedCopyError(RetrievalError):
    """A copy of a store's files in this machine's cache was altered, and is deleted."""


Make = Callable[[Path], None]
"""Writes row files into an empty folder."""


def open_row_files(files: StoreFiles, path: str, content: object, make: Make) -> RowFiles | None:
    """Open the row files at a path of a store, or those in the cache, which `make` writes; None if neither can be had.

    `content` is what distinguishes the rows from others of the same store and path.
    """
    if files.exists(f"{path}/{MANIFEST_NAME}"):
        try:
            return _open_stored(files, path)
        except (RetrievalError, StoreUnwritableError, OSError) as error:
            LOG.warning(f"store {files.address}: its row files can't be used, so the tables are read: {error}")
    digest = hashlib.sha256(json.dumps([files.address, path, content]).encode()).hexdigest()
    try:
        return open_copy(lambda: make_copy(f"rows-{digest[:32]}", make), RowFiles)
    except (RetrievalError, OSError) as error:
        LOG.info(f"the rows of a search can't be kept in {cache_folder(COPIES_FOLDER)}: {error}")
        return None


def _open_or_drop(folder: Path) -> RowFiles | None:
    try:
        return RowFiles(folder)
    except RetrievalError:
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _open_stored(files: StoreFiles, path: str) -> RowFiles:
    if files.folder is not None:
        return RowFiles(files.folder / path)
    return open_copy(lambda: fetched_copy(files, path, lambda stage: NAMES), RowFiles)


def add_row_files(files: StoreFiles, path: str, make: Make) -> None:
    """Write row files into a store, the manifest last, unless they are there; OSError or StoreError if it can't."""
    has_manifest = files.exists(f"{path}/{MANIFEST_NAME}")
    if has_manifest and (files.folder is None or _open_or_drop(files.folder / path) is not None):
        return
    files.confirm_lease()

    def write(folder: Path) -> Iterable[str]:
        make(folder)
        return NAMES

    write_folder(files, path, write)


def check_files(found: RowFiles, index_folder: Path, index_hashes: Mapping[str, str]) -> None:
    """Compare the whole hashes of the row files and of an index's files.

    Raises a RetrievalError if one differs; of a copy in this machine's cache, which is deleted, a `DamagedCopyError`.
    OSError if a file can't be read, which says nothing about it.
    """
    checks = ((found.folder, found.manifest.sha256, NAMES), (index_folder, index_hashes, found.manifest.index_samples))
    for folder, hashes, names in checks:
        try:
            check_hashes(folder, hashes, names)
        except RetrievalError as error:
            if not folder.is_relative_to(cache_folder(COPIES_FOLDER)):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise DamagedCopyError(f"{error}; this copy was deleted, so the next search makes another") from None
