"""Images and video segments of one published version, read file by file."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.evaluation.exact import Ints
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.tables import RecordTable
from embedder.store_index.keep_index import rows_with_images
from index.vectors import Floats

SEGMENT_BITS = 32


class ImageTable:
    """Rows that have an image's vector; ids of all stand in memory, vectors of no more than one file.

    Attributes:
        item_ids: the items, each once; an item's number is its position here.
        items: int64 (N,), the item of each row.
    """

    def __init__(self, table: RecordTable) -> None:
        self._table = table
        parts = [self._read(path, ["item_id", "segment"]) for path in table.paths()]
        keys = pa.concat_tables(parts) if parts else pa.table({"item_id": pa.array([], pa.string()), "segment": []})
        coded = keys["item_id"].combine_chunks().dictionary_encode()
        self.item_ids: pa.Array = coded.dictionary
        self.items: Ints = coded.indices.to_numpy().astype(np.int64)
        self._segments: Ints = keys["segment"].to_numpy().astype(np.int64)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.items)

    def blocks(self) -> Iterator[Floats]:
        """Vectors, in order; float32 (n, E) for each file."""
        for path in self._table.paths():
            rows = self._read(path, [])
            if rows.num_rows:
                yield unpack_vectors(rows["image_embedding"])

    def numbers_of(self, item_ids: pa.Array | pa.ChunkedArray) -> Ints:
        """Numbers of items, -1 for one without a row; int64."""
        found = pc.fill_null(pc.index_in(item_ids, value_set=self.item_ids), -1)
        return np.asarray(found.to_numpy(), np.int64)

    def rows_of(self, items: Ints, segments: Ints) -> Ints:
        """Rows of segments of items, -1 where there is none.

        Args:
            items: int64 (n,), numbers of items; -1 for one that is not here.
            segments: int64 (n,).
        """
        codes, rows = self._rows_by_code
        if not len(codes):
            return np.full(len(items), -1)
        asked = (items << SEGMENT_BITS) + segments
        positions = np.minimum(np.searchsorted(codes, asked), len(codes) - 1)
        return np.where((codes[positions] == asked) & (items >= 0), rows[positions], -1)

    @cached_property
    def _rows_by_code(self) -> tuple[Ints, Ints]:
        codes = (self.items << SEGMENT_BITS) + self._segments
        order = np.argsort(codes)
        return codes[order], order

    def _read(self, path: str, columns: list[str]) -> pa.Table:
        rows = rows_with_images(self._table.read([*columns, "image_embedding"], [path]))
        return rows.select(columns) if columns else rows
