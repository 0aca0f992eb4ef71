"""Rows of an embeddings version from which an index is built: those with a vector of the searched side, in fixed order.

They are read file by file, so that at most one file's vectors are in memory, of a bucket those of a few.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.layout import Searched
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats, Rows

MAX_RECALL_QUERIES = 4000
NUM_QUERY_FILES = 64
KEYS = ["item_id", "segment", "run_id"]
NO_KEYS = pa.schema([("item_id", pa.string()), ("segment", pa.int32()), ("run_id", pa.string())])


class IndexRows:
    """Images and video segments (or captions) of one version, numbered across all its files."""

    def __init__(
        self, files: StoreFiles, version: int, paths: Sequence[str] | None = None, searched: Searched = "image"
    ) -> None:
        """Open a version of the embeddings, or some of its files (None: all); StoreError if it can't be read."""
        self.version, self.searched, self._column = version, searched, f"{searched}_embedding"
        self._table = RecordTable(files, "embeddings", version)
        self._paths = self._table.paths() if paths is None else list(paths)

    @cached_property
    def ids(self) -> pa.Table:
        """Return item, segment and run of each row."""
        return pa.concat_tables([NO_KEYS.empty_table(), *self._ids_by_file])

    @cached_property
    def _ids_by_file(self) -> list[pa.Table]:
        read = self._table.read_with_vector
        return [read(KEYS, self._column, path).cast(NO_KEYS) for path in self._paths]

    def num_by_file(self) -> list[tuple[str, int]]:
        """Return the part files with the number of these rows in each."""
        return [(path, ids.num_rows) for path, ids in self._files()]

    def vectors(self) -> Iterator[Floats]:
        """Yield all vectors, float32 (n, E) for each file."""
        paths = [path for path, ids in self._files() if ids.num_rows]
        return (block.values for block in self._table.vector_blocks(self._column, paths))

    def vectors_at(self, rows: Rows) -> Iterator[Floats]:
        """Yield the vectors of ascending rows, float32 (n, E) for each file; files without any are not read."""
        start, wanted = 0, dict[str, Rows]()
        for path, ids in self._files():
            stop = start + ids.num_rows
            here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if len(here):
                wanted[path] = here
            start = stop
        for block, here in zip(self._table.vector_blocks(self._column, [*wanted]), wanted.values(), strict=True):
            yield block.values[here]

    def _files(self) -> Iterator[tuple[str, pa.Table]]:
        return zip(self._paths, self._ids_by_file, strict=True)

    def queries(self) -> Floats | None:
        """Return caption vectors for measuring recall, from files across the whole table; None if there are none."""
        share = -(-MAX_RECALL_QUERIES // min(NUM_QUERY_FILES, max(1, len(self._paths))))
        found: list[Floats] = []
        for block in self._table.vector_blocks("text_embedding", _evenly_spaced(self._paths, NUM_QUERY_FILES)):
            if len(block.values):
                found.append(block.values[:share].copy())
            if sum(map(len, found)) >= MAX_RECALL_QUERIES:
                break
        return np.concatenate(found)[:MAX_RECALL_QUERIES] if found else None


def _evenly_spaced(paths: list[str], number: int) -> list[str]:
    step = max(1, len(paths) // number)
    return [path for start in range(step) for path in paths[start::step]]
