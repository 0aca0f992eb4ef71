"""Data of one publication for searches: each part is read when it is first needed, and kept for the next query."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval.filters import RowFilter
from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.hybrid import HybridRanker, open_words
from embedder.retrieval.model_columns import ModelColumns, match_keys
from embedder.retrieval.ranking import ItemRows, RowNumbers, row_numbers
from embedder.sources.byte_ranges import EmbeddedFile
from embedder.sources.item_ranges import embedded_file
from embedder.storage.spill_file import GatheredRows, in_memory_or_mapped
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import VECTOR_COLUMNS
from embedder.store.layout import Current, StoreInfo
from embedder.store.schema import EMBEDDINGS, ITEMS, with_nulls
from embedder.store.tables.tables import RecordTable
from embedder.store_index.versions import open_version
from index.errors import RetrievalError
from index.vectors import Among, Floats, Mask, Rows

if TYPE_CHECKING:
    from index.search import Index

SAMPLE_ROWS = 1000  # of vectors, from which the deviation of scores is known to a few per cent
OWN = ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")  # fields of a hit, beside carryover

HAS_PICTURE = "has_picture"  # column of conditions: whether a row has the vector of an image or of a video's segment
ITEM_FILE = ("item_id", "source", "size_bytes", "modified", "stale")  # what tells an item's file


class IdRows:
    """Rows of an item, found by its id: by binary search in the order of the ids, 8 bytes for each row."""

    def __init__(self, ids: pa.ChunkedArray) -> None:
        self._ids = ids  # where they lie, which may be on disk
        self._order: Rows = pc.sort_indices(ids).to_numpy().astype(np.int64)

    def rows(self, item_id: str) -> Rows:
        """Rows of one item, in their order; none where there is no such item."""

        def id_at(position: int) -> str:
            value: str = self._ids[int(self._order[position])].as_py()
            return value

        start = bisect_left(range(len(self._order)), item_id, key=id_at)
        stop = bisect_right(range(len(self._order)), item_id, lo=start, key=id_at)
        rows: Rows = np.sort(self._order[start:stop])
        return rows

    def values(self) -> Iterator[str]:
        """All ids, one for each row, a thousand of them in memory at once."""
        for start in range(0, len(self._ids), 1000):
            yield from self._ids.slice(start, 1000).to_pylist()


class RowMetadata:
    """Columns of one version of the embeddings table but the vectors: read once, then taken by row number.

    Those that other models of the publication give stand beside them. Large ones lie in a temporary file that is mapped
    into memory: the kernel gives up pages that no search looks at.
    """

    def __init__(
        self,
        table: RecordTable,
        models: ModelColumns | None = None,
        has_picture: Callable[[], Mask] | None = None,
        files: "EmbeddedFiles | None" = None,
    ) -> None:
        """Read them.

        Args:
            table: the version.
            models: columns of the other models; None where there are none.
            has_picture: gives bool (rows,), the column `HAS_PICTURE` of conditions; None: they have no such column.
            files: of the items, whose times and sizes conditions read; None where none does.
        """
        self._has_picture = has_picture
        self._items = None if files is None else files.read
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
        """All of them."""
        return self._gathered.table

    def rows_of(self, ids: pa.Table, is_live: Mask) -> Rows:
        """Row of each vector; -1 for a vector that is no longer live.

        Args:
            ids: `item_id` and `segment` of each vector.
            is_live: bool (vectors,), false where a vector is masked.

        Raises:
            RetrievalError: a live vector is of an item that the table lacks.
        """
        found = match_keys(ids, self.rows)
        if (found[is_live] < 0).any():
            lost = ids["item_id"][int(np.flatnonzero((found < 0) & is_live)[0])].as_py()
            raise RetrievalError(
                f"the index holds {lost!r}, which the embeddings published with it lack; build the index again"
            )
        return found

    def take(self, rows: Rows) -> pa.Table:
        """Rows by their numbers, in their order; of a table in pieces this looks at those pieces alone."""
        return self._gathered.take(rows)

    def describe(self, rows: Rows) -> list[dict[str, Any]]:
        """Fields of hits for some rows, in their order; columns carried over stand under `carryover`."""
        carried = self.carried.names
        taken = self.take(rows).select([*OWN, *carried]).to_pylist()
        return [
            {name: row[name] for name in OWN} | {"carryover": {name: row[name] for name in carried}} for row in taken
        ]

    def captions(self, rows: Rows) -> list[str | None]:
        """Captions of some rows, in their order."""
        return self.take(rows)["caption"].to_pylist()  # type: ignore[no-any-return]

    @locked_cached_property
    def carried(self) -> pa.Schema:
        """Names and types of the columns that were carried over."""
        return pa.schema([field for field in self.rows.schema if field.name not in EMBEDDINGS.names])

    @locked_cached_property
    def ids(self) -> IdRows:
        """Rows by the id of their item."""
        return IdRows(self.rows["item_id"])

    @locked_cached_property
    def filter(self) -> RowFilter:
        """Filter over the rows, and over what the items table says of their files.

        A column of the table that is named `HAS_PICTURE` is what conditions read.
        """
        rows = self.rows
        if self._has_picture is not None and HAS_PICTURE not in rows.column_names:
            rows = rows.append_column(HAS_PICTURE, pa.array(self._has_picture()))
        return RowFilter(rows, self._items)


class EmbeddedFiles:
    """What one version of the items table says of the files of its items; read when it is first needed."""

    def __init__(self, files: StoreFiles, version: int) -> None:
        self._files, self._version = files, version

    def read(self) -> pa.Table:
        """Columns `ITEM_FILE` of all items."""
        return self._items[0].table

    def load(self) -> None:
        """Read it now."""
        _ = self._items

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedFiles, (self._files, self._version)

    def of(self, item_id: str, uri: str, modality: str) -> EmbeddedFile | None:
        """What the local file of an item has to be; None of the web and of object stores."""
        gathered, ids = self._items
        found = gathered.take(ids.rows(item_id)[:1]).to_pylist()
        item = found[0] if found else dict.fromkeys(ITEM_FILE) | {"item_id": item_id}
        return embedded_file(uri, item, is_text=modality == "text")

    @locked_cached_property
    def _items(self) -> tuple[GatheredRows, IdRows]:
        """All items, on disk where they are many, and the rows of each id."""
        table = RecordTable(self._files, "items", self._version)
        schema = pa.schema([ITEMS.field(name) for name in ITEM_FILE])
        pieces = (with_nulls(piece, schema).select(ITEM_FILE) for piece in table.pieces(list(ITEM_FILE)))
        gathered = GatheredRows(in_memory_or_mapped(pieces, schema))
        return gathered, IdRows(gathered.table["item_id"])


class Snapshot:
    """Vectors and metadata of one model of a publication; safe for several threads."""

    def __init__(
        self, files: StoreFiles, current: Current, info: StoreInfo, models: ModelColumns | None = None
    ) -> None:
        """Name what is read.

        Args:
            files: the store, or the view of a further model.
            current: the publication, or that model's part of it.
            info: model of the vectors.
            models: columns of the publication's other models; None where there are none.
        """
        self.files, self.current, self.info, self._models = files, current, info, models

    @locked_cached_property
    def vectors(self) -> "Index | ExactIndex":
        """Published index, or the table's vectors where there is none."""
        if self.current.index is None:
            column = f"{self.info.searched}_embedding"
            rows = self._table.read(["item_id", "segment", column])
            return ExactIndex(rows.filter(pc.is_valid(rows[column])).combine_chunks(), column)
        return open_version(self.files, self.current.index, self.info.model_fingerprint)

    @locked_cached_property
    def embedded_files(self) -> EmbeddedFiles:
        """What the files of the items have to be."""
        return EmbeddedFiles(self.files, self.current.items)

    @locked_cached_property
    def items(self) -> ItemRows:
        """Groups of vectors of one video."""
        return ItemRows(self.vectors.ids)

    @locked_cached_property
    def sample(self) -> Floats:
        """Vectors of up to a thousand rows, evenly from the first to the last; float32 (S, E)."""
        live = np.flatnonzero(self.vectors.is_live)
        if len(live) == 0:
            return np.empty((0, 0), np.float32)
        chosen = np.linspace(0, len(live) - 1, min(len(live), SAMPLE_ROWS)).round().astype(np.int64)
        return self.vectors.vectors(live[chosen])

    @locked_cached_property
    def metadata(self) -> RowMetadata:
        """Table without its vectors, and the columns of other models."""
        return RowMetadata(self._table, self._models, self._has_picture, self.embedded_files)

    @locked_cached_property
    def is_found(self) -> Mask:
        """Rows of the metadata that a search can find, as they have a vector of the kind that is searched.

        A caption whose picture is broken has none where pictures are searched.
        """
        found: Mask = np.zeros(self.metadata.rows.num_rows, np.bool_)
        found[self.metadata_rows[self.vectors.is_live]] = True
        return found

    def _has_picture(self) -> Mask:
        if self.info.searched == "image":
            return self.is_found
        shows: Mask = pc.not_equal(self.metadata.rows["modality"], "text").to_numpy()  # of its images it has no vectors
        return shows

    @locked_cached_property
    def metadata_rows(self) -> RowNumbers:
        """Row of the metadata that describes each vector; -1 for one that is no longer live."""
        rows = row_numbers(len(self.vectors.is_live), self.metadata.rows.num_rows)
        rows[:] = self.metadata.rows_of(self.vectors.ids, self.vectors.is_live)
        return rows

    @locked_cached_property
    def _is_in_order(self) -> bool:
        """Whether the catalogue has the vectors' rows in their order: looking up a million takes a millisecond."""
        num_rows = self.metadata.rows.num_rows
        return len(self.metadata_rows) == num_rows and bool((self.metadata_rows == np.arange(num_rows)).all())

    @locked_cached_property
    def hybrid(self) -> HybridRanker:
        """Ranker by vectors and caption words."""
        words = open_words(self.files, self._table)
        return HybridRanker(words, self.vectors, self.vector_rows, self.metadata.captions)

    def filter_rows(self, where: str | None) -> Among | None:
        """Vectors that fulfil a condition: a mask, or row numbers where they are few; None for all that are live."""
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
        """Row of the vector of each row of the metadata; -1 where it has none that can be found."""
        live = np.flatnonzero(self.vectors.is_live)
        rows = row_numbers(self.metadata.rows.num_rows, len(self.vectors.is_live))
        rows[self.metadata_rows[live]] = live
        return rows

    def prepare(self, like: "Snapshot | None" = None) -> None:
        """Load all that every search needs; else the first search does.

        Args:
            like: a snapshot whose searches this one takes over; optional parts are loaded if it has them.
        """
        _ = self.metadata_rows, self.items
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
