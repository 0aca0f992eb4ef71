"""What searches of one publication read: each part when it is first needed, once, and kept for the next query."""

from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval.bm25_cache import open_words
from embedder.retrieval.flat_index import ExactIndex
from embedder.retrieval.grouping import ItemRows
from embedder.retrieval.hybrid import HybridRanker
from embedder.retrieval.row_metadata import RowMetadata
from embedder.store.files import StoreFiles
from embedder.store.layout import Current
from embedder.store.tables import RecordTable
from embedder.store_index.keep_index import pictures
from embedder.store_index.versions import open_version

if TYPE_CHECKING:
    from index.search import Index

Rows = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Snapshot:
    """The vectors of one publication, and what the table says of them; for several threads at once."""

    def __init__(self, files: StoreFiles, current: Current, model_fingerprint: str) -> None:
        self.files, self.current, self.model_fingerprint = files, current, model_fingerprint

    @locked_cached_property
    def vectors(self) -> "Index | ExactIndex":
        """The published index, or the table's vectors where there is none."""
        if self.current.index is None:
            return ExactIndex(pictures(self._table.read(["item_id", "segment", "image_embedding"])).combine_chunks())
        return open_version(self.files, self.current.index, self.model_fingerprint)

    @locked_cached_property
    def items(self) -> ItemRows:
        """Which vectors belong to one video."""
        return ItemRows(self.vectors.ids)

    @locked_cached_property
    def catalogue(self) -> RowMetadata:
        """The table without its vectors."""
        return RowMetadata(self._table)

    @locked_cached_property
    def catalogue_rows(self) -> Rows:
        """The row of the catalogue that describes each vector; -1 for one that is no longer live."""
        return self.catalogue.rows_of(self.vectors.ids, self.vectors.is_live)

    @locked_cached_property
    def _is_in_order(self) -> bool:
        """Whether the catalogue has the vectors' rows in their order: looking up a million takes a millisecond."""
        num_rows = self.catalogue.rows.num_rows
        return len(self.catalogue_rows) == num_rows and bool((self.catalogue_rows == np.arange(num_rows)).all())

    @locked_cached_property
    def hybrid(self) -> HybridRanker:
        """Ranks by caption words, too."""
        words = open_words(self._table, self.catalogue.rows["caption"])
        return HybridRanker(words, self.vectors, self.catalogue_rows, self.catalogue.rows.num_rows)

    def among(self, where: str | None) -> Mask | None:
        """Which vectors may answer; bool (vectors,), or None for all that are live."""
        if where is None:
            return None
        fulfils = self.catalogue.matching(where)
        if not self._is_in_order:
            fulfils = np.append(fulfils, False)[self.catalogue_rows]  # for the row -1, which nothing describes
        among: Mask = fulfils & self.vectors.is_live
        return among

    def prepare(self, like: "Snapshot | None" = None) -> None:
        """Read what every search needs; else the first one does.

        Args:
            like: a version whose searches this one takes over; what only some of them need is read if it was there.
        """
        _ = self.catalogue_rows, self.items
        if like is not None and "hybrid" in vars(like):
            _ = self.hybrid
        if like is not None and "filter" in vars(like.catalogue):
            _ = self.catalogue.filter

    @locked_cached_property
    def _table(self) -> RecordTable:
        return RecordTable(self.files, "embeddings", self.current.embeddings)
