"""Data of one publication for searches: each part is read when it is first needed, and kept for the next query."""

from typing import TYPE_CHECKING

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
from embedder.store_index.keep_index import rows_with_images
from embedder.store_index.versions import open_version
from index.vectors import Mask, Rows

if TYPE_CHECKING:
    from index.search import Index


class Snapshot:
    """Vectors and metadata of one publication; safe for several threads."""

    def __init__(self, files: StoreFiles, current: Current, model_fingerprint: str) -> None:
        self.files, self.current, self.model_fingerprint = files, current, model_fingerprint

    @locked_cached_property
    def vectors(self) -> "Index | ExactIndex":
        """Published index, or the table's vectors where there is none."""
        if self.current.index is None:
            return ExactIndex(
                rows_with_images(self._table.read(["item_id", "segment", "image_embedding"])).combine_chunks()
            )
        return open_version(self.files, self.current.index, self.model_fingerprint)

    @locked_cached_property
    def items(self) -> ItemRows:
        """Groups of vectors of one video."""
        return ItemRows(self.vectors.ids)

    @locked_cached_property
    def metadata(self) -> RowMetadata:
        """Table without its vectors."""
        return RowMetadata(self._table)

    @locked_cached_property
    def metadata_rows(self) -> Rows:
        """Row of the metadata that describes each vector; -1 for one that is no longer live."""
        return self.metadata.rows_of(self.vectors.ids, self.vectors.is_live)

    @locked_cached_property
    def _is_in_order(self) -> bool:
        """Whether the catalogue has the vectors' rows in their order: looking up a million takes a millisecond."""
        num_rows = self.metadata.rows.num_rows
        return len(self.metadata_rows) == num_rows and bool((self.metadata_rows == np.arange(num_rows)).all())

    @locked_cached_property
    def hybrid(self) -> HybridRanker:
        """Ranker by vectors and caption words."""
        words = open_words(self._table, self.metadata.rows["caption"])
        return HybridRanker(words, self.vectors, self.metadata_rows, self.metadata.rows.num_rows)

    def among(self, where: str | None) -> Mask | None:
        """Mask of the vectors that fulfil a condition; bool (vectors,), or None for all that are live."""
        if where is None:
            return None
        fulfils = self.metadata.matching(where)
        if not self._is_in_order:
            fulfils = np.append(fulfils, False)[self.metadata_rows]  # for the row -1
        among: Mask = fulfils & self.vectors.is_live
        return among

    def prepare(self, like: "Snapshot | None" = None) -> None:
        """Load all that every search needs; else the first search does.

        Args:
            like: a snapshot whose searches this one takes over; optional parts are loaded if it has them.
        """
        _ = self.metadata_rows, self.items
        if like is not None and "hybrid" in vars(like):
            _ = self.hybrid
        if like is not None and "filter" in vars(like.metadata):
            _ = self.metadata.filter

    @locked_cached_property
    def _table(self) -> RecordTable:
        return RecordTable(self.files, "embeddings", self.current.embeddings)
