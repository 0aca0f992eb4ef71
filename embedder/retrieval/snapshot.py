"""Data of one publication for searches: each part is read on first use and kept for the next queries."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval import row_files
from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.hybrid import HybridRanker, SearchedWords, open_words
from embedder.retrieval.model_columns import ModelColumns
from embedder.retrieval.ranking import ItemRows, RowNumbers, row_numbers
from embedder.retrieval.row_files import (
    TABLE_ROW,
    VECTOR,
    MappedItemRows,
    RowContents,
    RowFiles,
    check_files,
    open_row_files,
    write_row_files,
)
from embedder.retrieval.row_metadata import EmbeddedFiles, RowMetadata
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, StoreInfo
from embedder.store.tables.row_folders import rows_path
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import WORDS_COLUMN
from embedder.store_index.index_versions import open_version, version_folder
from index.checked_files import hash_samples
from index.index_errors import RetrievalError
from index.manifest import IDS_NAME, LIVE_NAME, QUERIES_NAME, read_manifest
from index.vectors import Among, Floats, Mask

if TYPE_CHECKING:
    from index.search import Index

LOG = logging.getLogger(__name__)

CHECK_AFTER_S = 3.0
SAMPLE_ROWS = 1000  # of vectors, enough to know the deviation of scores to a few per cent


class FileCheck:
    """Check of whole hashes on its own thread; a process may end before it does.

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


class Snapshot:
    """Vectors and metadata of one model of a publication; safe for several threads."""

    def __init__(
        self,
        files: StoreFiles,
        current: Current,
        info: StoreInfo,
        models: ModelColumns,
        *,
        from_tables: bool = False,
    ) -> None:
        """Choose what is read; nothing is read yet.

        For a further model, `files` is its view and `current` its part of the publication. `models` gives the columns
        of all models; `from_tables` reads the tables even if there are row files.
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

        One of a run in progress has none, as each would have all rows again; it is searched by the tables.
        """
        if self._from_tables or self.current.index is None or self.current.interim_of:
            return False
        schema = self._table.schema
        if schema is None or not row_files.HIDDEN.isdisjoint(schema.names):
            return False
        return self._table.num_rows() >= row_files.MIN_ROWS

    @property
    def row_files_path(self) -> str:
        """Folder of its row files in the store."""
        return rows_path(self.current, self._models.others)

    def write_row_files(self, folder: Path) -> None:
        """Write its row files into an empty folder, from the tables and the index; OSError if the disk is full."""
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
        try:
            return sum(path.stat().st_size for folder in folders for path in folder.iterdir())
        except FileNotFoundError:  # another process has deleted them, and what is open answers all the same
            return 0

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
        return RowMetadata(self._models, self._has_picture, self.embedded_files, self.mapped)

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
