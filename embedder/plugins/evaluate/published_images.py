"""Images and video segments of one published version, read file by file."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.plugins.evaluate.exact import Ints
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats


class ImageTable:
    """Rows that have an image's vector; all ids are in memory, vectors only of one file at a time.

    `keys` has `item_id` and `segment` of each row; `items`, int64 (N,), the item's position in `item_ids`.
    """

    def __init__(self, table: RecordTable) -> None:
        self._table = table
        names = ["item_id", "segment"]
        parts = [table.read_with_vector(names, "image_embedding", path) for path in table.paths()]
        empty = pa.table({"item_id": pa.array([], pa.string()), "segment": pa.array([], pa.int32())})
        self.keys: pa.Table = pa.concat_tables(parts).combine_chunks() if parts else empty
        coded = self.keys["item_id"].combine_chunks().dictionary_encode()
        self.item_ids: pa.Array = coded.dictionary
        self.items: Ints = coded.indices.to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def blocks(self) -> Iterator[Floats]:
        """Vectors, in order; float32 (n, E) for each file."""
        return (block.values for block in self._table.vector_blocks("image_embedding") if len(block.values))

    def numbers_of(self, item_ids: pa.Array | pa.ChunkedArray) -> Ints:
        """Numbers of items, int64; -1 for one without a row."""
        found = pc.fill_null(pc.index_in(item_ids, value_set=self.item_ids), -1)
        return np.asarray(found.to_numpy(), np.int64)
