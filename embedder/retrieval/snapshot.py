"""Data of one publication for searches: each part is read on first use and kept for the next queries."""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval import row_files
from embedder.retrieval.filters import MODIFIED, ROW, SIZE, RowFilter
from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.hybrid import HybridRanker, SearchedWords, open_words
from embedder.retrieval.model_columns import ModelColumns, match_keys
from embedder.retrieval.ranking import ItemRows, RowNumbers, row_numbers
from embedder.retrieval.row_files import (
    OF_FILES,
    ORDER,
    PICTURED,
    TABLE_ROW,
    VECTOR,
    MappedItemRows,
    RowContents,
    RowFiles,
    check_files,
    open_row_files,
    write_row_files,
)
from embedder.sources.byte_ranges import EmbeddedFile
from embedder.sources.item_ranges import ITEM_FILE, embedded_file
from embedder.storage.spill_file import GatheredRows, in_memory_or_mapped
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, StoreInfo
from embedder.store.schema import EMBEDDINGS, ITEMS, VECTOR_COLUMNS, with_nulls
from embedder.store.tables.row_folders import rows_path
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import WORDS_COLUMN
from embedder.store_index.index_versions import open_version, version_folder
from index.checked_files import hash_samples
from index.index_errors import RetrievalError
from index.manifest import IDS_NAME, LIVE_NAME, QUERIES_NAME, read_manifest
from index.vectors import Among, Floats, Mask, Rows

if TYPE_CHECKING:
    from index.search import Index

LOG = logging.getLogger(__name__)

CHECK_AFTER_S = 3.0
SAMPLE_ROWS = 1000  # of vectors, enough to know the deviation of scores to a few per cent
OWN = ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")  # fields of a hit, besides carryover

HAS_PICTURE = "has_picture"  # column for conditions: whether a row has the vector of an image or a video segment


class IdRows:
    """Rows of an item by its id, through binary search in sorted ids; 8 bytes per row."""

    def __init__(self, ids: pa.ChunkedArray, order: RowNumbers | None = None, mapped: RowFiles | None = None) -> None:
        """Sort the ids, which stay in place, possibly on disk; `order` has their rows in sorted order, if known.

        `mapped` are the row files that the ids lie in, if any.
        """
        self._ids, self._mapped = ids, mapped
        self._order = pc.sort_indices(ids).to_numpy().astype(np.int64) if order is None else order

    def rows(self, item_id: str) -> Rows:
        """Return the rows of one item, in their order; empty if there is no such item."""

        def id_at(position: int) -> str:
            value: str = self._ids[int(self._order[position])].as_py()
            return value

        start = bisect_left(range(len(self._order)), item_id, key=id_at)
        stop = bisect_right(range(len(self._order)), item_id, lo=start, key=id_at)
        rows: Rows = np.sort(self._order[start:stop]).astype(np.int64)
        return rows

    def values(self) -> Iterator[str]:
        """Yield the id of each row, a thousand of them in memory at once."""
        if self._mapped is not None:
            self._mapped.read_ahead()
        for start in range(0, len(self._ids), 1000):
            yield from self._ids.slice(start, 1000).to_pylist()


class RowMetadata:
    """All columns of one version of the embeddings table except the vectors: read once, then taken by row number.

    Columns of other models of the publication are added. Large columns lie in a memory-mapped temporary file, so that
    the kernel can drop pages that no search uses.
    """

    def __init__(
        self,
        table: RecordTable,
        models: ModelColumns | None = None,
        has_picture: Callable[[], Mask] | None = None,
        files: "EmbeddedFiles | None" = None,
        mapped: RowFiles | None = None,
        medium: Collection[str] = (),
    ) -> None:
        """Read the table, or take its rows from `mapped`.

        `models` gives the columns of the other models, if any; `has_picture` the column `HAS_PICTURE` of conditions,
        bool (rows,), if there is one; `files` the times and sizes of the items' files, if conditions read them.
        `medium` are the names of the columns of the medium.
        """
        self._has_picture, self._medium = has_picture, medium
        self._items = None if files is None else files.read
        self._mapped = mapped
        if mapped is not None:
            self._gathered = GatheredRows(mapped.rows.select(mapped.public))
            return
        if models is not None:
            joined = (name for name, each in models.joined.items() if each.name not in VECTOR_COLUMNS)
            names = [*(models.own or OWN), *joined]
        else:
            names = table.schema.names if table.schema is not None else list(OWN)
        names = [name for name in names if name not in VECTOR_COLUMNS]
        pieces = (table if models is None else models).pieces(names)
        first = next(pieces, None)
        if first is None:
            first = table.read(names, [])
        self._gathered = GatheredRows(in_memory_or_mapped(chain([first], pieces), first.schema))

    @property
    def rows(self) -> pa.Table:
        """All rows; whoever asks for them reads whole columns."""
        if self._mapped is not None:
            self._mapped.read_ahead()
        return self._gathered.table

    def rows_of(self, ids: pa.Table, is_live: Mask) -> Rows:
        """Return the row of each vector by its `item_id` and `segment`; -1 if `is_live`, bool (vectors,), is false.

        Raises `RetrievalError` if the table lacks the item of a live vector.
        """
        found = match_keys(ids, self.rows)
        if (found[is_live] < 0).any():
            lost = ids["item_id"][int(np.flatnonzero((found < 0) & is_live)[0])].as_py()
            raise RetrievalError(
                f"the index holds {lost!r}, which the embeddings published with it lack; build the index again"
            )
        return found

    def take(self, rows: Rows, columns: Sequence[str] | None = None) -> pa.Table:
        """Return rows by number, in that order, or some of their columns; only what holds them is read."""
        return without_dictionaries(self._gathered.take(rows, columns))

    def describe(self, rows: Rows) -> list[dict[str, Any]]:
        """Return the fields of hits for some rows, in their order; those of sources under `carryover`."""
        carried = self.carried.names
        medium = [name for name in self._gathered.table.column_names if name in self._medium]
        return [
            {name: row[name] for name in OWN}
            | {"carryover": {name: row[name] for name in carried}}
            | {"medium": {name: row[name] for name in medium if row[name] not in (None, [])}}
            for row in self.take(rows, [*OWN, *carried, *medium]).to_pylist()
        ]

    def texts(self, column: str, rows: Rows) -> list[str | None]:
        """Return the captions, or another column of texts, of some rows, in their order."""
        return self.take(rows, [column])[column].to_pylist()  # type: ignore[no-any-return]

    @locked_cached_property
    def carried(self) -> pa.Schema:
        """Names and types of the carried columns."""
        plain = _without_dictionaries(self._gathered.table.schema)
        return pa.schema([field for field in plain if field.name not in {*EMBEDDINGS.names, *self._medium}])

    @locked_cached_property
    def ids(self) -> IdRows:
        """Rows by the id of their item."""
        order = None if self._mapped is None else self._mapped.numbers(ORDER)
        return IdRows(self._gathered.table["item_id"], order, self._mapped)

    @locked_cached_property
    def filter(self) -> RowFilter:
        """Filter over the rows and over the items table's columns about their files.

        For conditions, `HAS_PICTURE` hides a column of the table with that name.
        """
        if self._mapped is not None:
            self._mapped.read_ahead()
            names = [ROW, *self._mapped.public]
            pictured = {PICTURED: HAS_PICTURE} if HAS_PICTURE not in names else {}
            shown = dict.fromkeys(names) | pictured | dict.fromkeys([MODIFIED, SIZE])
            columns = self._mapped.columns({name: new or name for name, new in shown.items()})
            return RowFilter(columns, is_mapped=True)
        rows = self.rows
        if self._has_picture is not None and HAS_PICTURE not in rows.column_names:
            rows = rows.append_column(HAS_PICTURE, pa.array(self._has_picture()))
        return RowFilter(rows, self._items)


class EmbeddedFiles:
    """What one version of the items table says about the files of its items; read on first use."""

    def __init__(self, files: StoreFiles, version: int, mapped: Callable[[], RowFiles | None] | None = None) -> None:
        """Choose the version; `mapped` gives the row files that have the same, if there are any."""
        self._files, self._version, self._mapped = files, version, mapped

    def read(self) -> pa.Table:
        """Read the columns `ITEM_FILE` of all items."""
        return self._items[0].table

    def load(self) -> None:
        """Read it now."""
        _ = self._items

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedFiles, (self._files, self._version)

    def of(self, item_id: str, uri: str, modality: str) -> EmbeddedFile | None:
        """Return what the local file of an item must be; None on the web and in object stores."""
        gathered, ids = self._items
        found = gathered.take(ids.rows(item_id)[:1]).to_pylist()
        item = found[0] if found else dict.fromkeys(ITEM_FILE) | {"item_id": item_id}
        return embedded_file(uri, item, is_text=modality == "text")

    @locked_cached_property
    def _items(self) -> tuple[GatheredRows, IdRows]:
        """All items, on disk if there are many, and the rows of each id; of row files those that have vectors."""
        mapped = None if self._mapped is None else self._mapped()
        if mapped is not None:
            shown = {"item_id": "item_id"} | {hidden: name for name, hidden in OF_FILES.items()}
            found = mapped.columns(shown).select(ITEM_FILE)
            return GatheredRows(found), IdRows(found["item_id"], mapped.numbers(ORDER))
        table = RecordTable(self._files, "items", self._version)
        schema = pa.schema([ITEMS.field(name) for name in ITEM_FILE])
        pieces = (with_nulls(piece, schema).select(ITEM_FILE) for piece in table.pieces(list(ITEM_FILE)))
        gathered = GatheredRows(in_memory_or_mapped(pieces, schema))
        return gathered, IdRows(gathered.table["item_id"])


class FileCheck:
    """Check of whole hashes on a thread of its own, which a process may end before.

    It begins after some seconds, so that what opens the store has disk and processors to itself, or once it is waited
    for.

    Attributes:
        problem: the first file that was altered, once it is found.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """Start the thread."""
        self.problem: RetrievalError | None = None
        self._check, self._is_awaited = check, Event()
        self._thread = Thread(target=self._run, name="check-files", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Begin now, and wait for the end, at most so long; return whether it has ended."""
        self._is_awaited.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._is_awaited.wait(CHECK_AFTER_S)
        try:
            self._check()
        except RetrievalError as error:
            LOG.error(str(error))
            self.problem = error
        except OSError as error:  # deleted meanwhile, or too many files are open: that is no damage
            LOG.info(f"the whole hashes of a publication's files can't be checked: {error}")


def without_dictionaries(rows: pa.Table) -> pa.Table:
    """Return the rows with each dictionary-encoded column as its values."""
    return rows.cast(_without_dictionaries(rows.schema))


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])


class Snapshot:
    """Vectors and metadata of one model of a publication; safe for several threads."""

    def __init__(
        self,
        files: StoreFiles,
        current: Current,
        info: StoreInfo,
        models: ModelColumns | None = None,
        *,
        from_tables: bool = False,
    ) -> None:
        """Choose what is read; nothing is read yet.

        For a further model, `files` is its view and `current` its part of the publication. `models` gives the columns
        of the other models, None if there are none; `from_tables` reads the tables even if there are row files.
        """
        self.files, self.current, self.info, self._models = files, current, info, models
        self._from_tables = from_tables

    @locked_cached_property
    def mapped(self) -> RowFiles | None:
        """Row files of this publication; None if it is small or interim, has no index, or can have none here."""
        if not self.has_row_files:
            return None
        tables = (self._table, RecordTable(self.files, "items", self.current.items))
        content = [[*part.key, part.size_bytes] for table in tables for part in table.parts()]
        return open_row_files(self.files, self.row_files_path, content, self.write_row_files)

    @property
    def has_row_files(self) -> bool:
        """Whether the publication is large enough for row files, and has an index, whose rows are in them.

        One of a run that goes on has none, as each would have all rows again; it is searched by the tables.
        """
        if self._from_tables or self._models is None or self.current.index is None or self.current.interim_of:
            return False
        schema = self._table.schema
        if schema is None or not row_files.HIDDEN.isdisjoint(schema.names):
            return False
        return self._table.num_rows() >= row_files.MIN_ROWS

    @property
    def row_files_path(self) -> str:
        """Folder of its row files in the store."""
        return rows_path(self.current, "" if self._models is None else self._models.others)

    def write_row_files(self, folder: Path) -> None:
        """Write its row files into an empty folder, from the tables and the index; OSError if the disk is full."""
        if self._models is None:
            raise ValueError("row files have the columns of all models, so these must be given")
        own = Snapshot(self.files, self.current, self.info, self._models, from_tables=True)
        index_folder = version_folder(self.files, self.current.index or 0)
        names = [name for name in read_manifest(index_folder).sha256 if name not in (IDS_NAME, LIVE_NAME, QUERIES_NAME)]
        contents = RowContents(
            own.metadata.rows,
            own.embedded_files.read(),
            own._has_picture(),
            own.metadata_rows,
            own.vector_rows,
            own.vectors.places(),
            {view.model: self._models.rows_of(table) for view, table, _ in self._models.word_tables()},
            {name: hash_samples(index_folder / name) for name in names},
        )
        write_row_files(folder, contents)

    @locked_cached_property
    def check(self) -> "FileCheck | None":
        """Check of whole hashes, which begins when this is first asked for; None without row files."""
        if self.mapped is None or self.current.index is None:
            return None
        index_folder = version_folder(self.files, self.current.index)
        return FileCheck(partial(check_files, self.mapped, index_folder, read_manifest(index_folder).sha256))

    @property
    def checked_bytes(self) -> int:
        """Size of the files whose whole hashes `check` compares; 0 without row files."""
        if self.mapped is None or self.current.index is None:
            return 0
        folders = (self.mapped.folder, version_folder(self.files, self.current.index))
        return sum(path.stat().st_size for folder in folders for path in folder.iterdir())

    @locked_cached_property
    def vectors(self) -> "Index | ExactIndex":
        """Published index, or the table's vectors if there is none."""
        if self.current.index is None:
            found = self._table.read_vectors(f"{self.info.searched}_embedding")
            ids = self._table.read(["item_id", "segment"]).filter(pa.array(found.present))
            return ExactIndex(ids.combine_chunks(), found.values)
        _ = self.check
        known = () if self.mapped is None else (self.mapped.manifest.index_samples, self.mapped.places)
        return open_version(self.files, self.current.index, self.info.model_fingerprint, *known)

    @locked_cached_property
    def embedded_files(self) -> EmbeddedFiles:
        """What the items' files must be."""
        return EmbeddedFiles(self.files, self.current.items, None if self._from_tables else lambda: self.mapped)

    @locked_cached_property
    def items(self) -> ItemRows | MappedItemRows:
        """Groups of vectors of one video."""
        return ItemRows(self.vectors.ids) if self.mapped is None else MappedItemRows(self.mapped)

    @locked_cached_property
    def sample(self) -> Floats:
        """Vectors of up to a thousand evenly spaced rows; float32 (S, E)."""
        live = np.flatnonzero(self.vectors.is_live).astype(np.int32)
        if len(live) == 0:
            return np.empty((0, 0), np.float32)
        chosen = np.linspace(0, len(live) - 1, min(len(live), SAMPLE_ROWS)).round().astype(np.int64)
        return self.vectors.vectors(live[chosen].astype(np.int64))

    @locked_cached_property
    def metadata(self) -> RowMetadata:
        """Table without its vectors, with the columns of other models."""
        medium = self.current.medium_columns if self._models is None else self._models.medium_columns
        return RowMetadata(self._table, self._models, self._has_picture, self.embedded_files, self.mapped, medium)

    @locked_cached_property
    def is_found(self) -> Mask:
        """Mask of the metadata rows that a search can find, which have a vector of the kind that is searched.

        Where pictures are searched, a caption whose picture is broken has none.
        """
        if self.mapped is not None:
            return self.vector_rows >= 0
        found: Mask = np.zeros(self.metadata.rows.num_rows, np.bool_)
        found[self.metadata_rows[self.vectors.is_live]] = True
        return found

    def _has_picture(self) -> Mask:
        if self.info.searched == "image":
            return self.is_found
        shows: Mask = pc.not_equal(self.metadata.rows["modality"], "text").to_numpy()  # they have no vectors of images
        return shows

    @locked_cached_property
    def metadata_rows(self) -> RowNumbers:
        """Metadata row of each vector; -1 for one that is no longer live."""
        if self.mapped is not None:
            return self.mapped.numbers(TABLE_ROW)
        rows = row_numbers(len(self.vectors.is_live), self.metadata.rows.num_rows)
        rows[:] = self.metadata.rows_of(self.vectors.ids, self.vectors.is_live)
        return rows

    @locked_cached_property
    def _is_in_order(self) -> bool:
        """Whether the catalogue has the vectors' rows in their order; then looking up a million takes a millisecond."""
        if self.mapped is not None:
            return self.mapped.manifest.is_in_order
        num_rows = self.metadata.rows.num_rows
        return len(self.metadata_rows) == num_rows and bool((self.metadata_rows == np.arange(num_rows)).all())

    @locked_cached_property
    def hybrid(self) -> HybridRanker:
        """Ranker by vectors, words of captions, and words that further models read in pictures."""
        words = [SearchedWords(open_words(self.files, self._table), partial(self.metadata.texts, "caption"))]
        if self._models is not None:
            for view, table, shown in self._models.word_tables():
                texts = partial(self.metadata.texts, shown)
                noted = None if self.mapped is None else self.mapped.of_model(view.model, table.num_rows())
                places = self._models.rows_of(table) if noted is None else noted
                words.append(SearchedWords(open_words(view, table, WORDS_COLUMN), texts, places))
        return HybridRanker(words, self.vectors, self.vector_rows)

    def filter_rows(self, where: str | None) -> Among | None:
        """Return the vectors that fulfil a condition: a mask, or row numbers if few; None for all live ones."""
        if where is None:
            return None
        passing = self.metadata.filter.passing(where)
        if passing.dtype != np.bool_:
            rows = np.sort(self.vector_rows[passing]).astype(np.int64)
            return rows[np.searchsorted(rows, 0) :]  # without the row -1
        fulfils: Mask = passing.astype(np.bool_, copy=False)
        if not self._is_in_order:
            fulfils = np.append(fulfils, False)[self.metadata_rows]  # for the row -1
        among: Mask = fulfils & self.vectors.is_live
        return among

    @locked_cached_property
    def vector_rows(self) -> RowNumbers:
        """Vector of each metadata row; -1 if it has none that can be found."""
        if self.mapped is not None:
            return self.mapped.numbers(VECTOR)
        live = np.flatnonzero(self.vectors.is_live)
        rows = row_numbers(self.metadata.rows.num_rows, len(self.vectors.is_live))
        rows[self.metadata_rows[live]] = live
        return rows

    def prepare(self, like: "Snapshot | None" = None) -> None:
        """Load all that every search needs; else the first search does.

        `like` is a snapshot that this one replaces; optional parts are loaded if it has them.
        """
        _ = self.vectors, self.metadata_rows, self.items
        if like is not None and "sample" in vars(like):
            _ = self.sample
        if like is not None and "hybrid" in vars(like):
            _ = self.hybrid
        if like is not None and "filter" in vars(like.metadata):
            _ = self.metadata.filter
        if like is not None and "ids" in vars(like.metadata):
            _ = self.metadata.ids
        if like is not None and "embedded_files" in vars(like):
            self.embedded_files.load()

    @locked_cached_property
    def _table(self) -> RecordTable:
        return RecordTable(self.files, "embeddings", self.current.embeddings)
