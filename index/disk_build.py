"""Build of an index larger than memory: a template trained on a sample, and parts, one in memory at a time."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import faiss
import numpy as np

from index import faiss_build
from index.designs import Design
from index.disk_index import Codes, DiskIndex, DiskPart, MappedCodes, template_lists, template_weights
from index.index_errors import RetrievalError
from index.manifest import TEMPLATE_NAME, PartRecord
from index.query_weights import query_weights
from index.vectors import Floats, Rows, VectorTable, vectors_text

DEFAULT_BUILD_BYTES = 2 << 30
# Share of a build's memory; the rest is for the training sample, ids, and one block of vectors.
_PART_SHARE = 0.4
_GROWN_LISTS = 2  # FAISS's lists double when they are full
_LEAST_PART_ROWS = 4096
_WRITTEN_ROWS = 65_536


def rows_per_part(design: Design, dim: int, build_bytes: int) -> int:
    """Compute how many rows a part may have; raises a RetrievalError if memory is too small for a few thousand."""
    in_lists = _GROWN_LISTS * (design.num_code_groups // 2 + np.dtype(np.int64).itemsize)
    row_bytes = design.row_code_bytes(dim) + in_lists + np.dtype(np.uint32).itemsize
    rows = int(_PART_SHARE * build_bytes / row_bytes)
    if rows < _LEAST_PART_ROWS:
        least = int(_LEAST_PART_ROWS * row_bytes / _PART_SHARE)
        raise RetrievalError(f"index design {design}: build_bytes is {build_bytes}; give it {least:,} bytes or more")
    return rows


def build(design: Design, table: VectorTable, queries: Floats, folder: Path, build_bytes: int) -> DiskIndex:
    """Train a template, and write and open the parts of a table; `build_bytes` is the memory of the whole build.

    `queries` (Q, E) weight the directions and may be empty. Raises a RetrievalError if FAISS can't make or train the
    design for this table, or the memory is too small for a part.
    """
    capacity = rows_per_part(design, table.dim, build_bytes)
    template = train(design, table, queries)
    faiss_build.write(template, folder / TEMPLATE_NAME)
    parts: list[DiskPart] = []
    builder = PartBuilder(template, 0, min(capacity, table.num_vectors), on_disk=design.on_disk)
    for block in table.blocks():
        start = 0
        while start < len(block):
            taken = block[start : start + builder.num_free]
            builder.add(np.ascontiguousarray(taken))
            start += len(taken)
            first_row = builder.first_row + builder.num_rows
            if builder.num_free == 0 and first_row < table.num_vectors:
                parts.append(builder.write(folder, len(parts)))
                left = min(capacity, table.num_vectors - first_row)
                builder = PartBuilder(template, first_row, left, on_disk=design.on_disk)
    parts.append(builder.write(folder, len(parts)))
    return DiskIndex(template, parts)


def train(design: Design, table: VectorTable, queries: Floats) -> faiss.IndexRefine:
    """Train a template on a sample of a table; `queries` (Q, E) weight the directions and may be empty.

    Raises a RetrievalError if FAISS can't make or train it for this table.
    """
    sample = table.take(table.sample(design.num_training, faiss_build.TRAINING_SEED))
    if not design.num_code_groups or table.dim % design.num_code_groups:
        raise RetrievalError(
            f"index design {design}: {table.dim} dimensions do not fall into {design.num_code_groups} equal groups; "
            "choose another number after PQ"
        )
    weights = query_weights(queries, sample, design.num_code_groups)
    with faiss_build.failures_named(design, f"train it on {vectors_text(table.num_vectors)}"):
        lists = faiss.index_factory(table.dim, design.factory, faiss.METRIC_INNER_PRODUCT)
        coder = faiss.index_factory(table.dim, design.rerank, faiss.METRIC_INNER_PRODUCT)
        faiss_build.set_up(lists)
        lists.pq.cp.min_points_per_centroid = 1  # silences the warning on standard error about few vectors
        coder.train(sample)
        lists.train(np.ascontiguousarray(sample @ weights.T))
    # Each Python object keeps alive what it is made of.
    return faiss.IndexRefine(faiss.IndexPreTransform(faiss_build.linear(weights), lists), coder)


class PartBuilder:
    """Builder of one part, in memory until it is written."""

    def __init__(self, template: faiss.IndexRefine, first_row: int, capacity: int, *, on_disk: bool) -> None:
        """Begin a part of an empty, trained template, of at most `capacity` rows.

        `first_row` is the number of its first row in the whole index; with `on_disk`, searches leave its vectors on
        disk.
        """
        self.first_row, self.num_rows, self._on_disk = first_row, 0, on_disk
        self._lists = faiss.clone_index(template_lists(template))
        self._coder = faiss.downcast_index(template.refine_index)
        self._weights = template_weights(template)
        self._codes: Codes = np.empty((capacity, self._coder.sa_code_size()), np.uint8)

    @property
    def num_free(self) -> int:
        """Number of rows that still fit."""
        return len(self._codes) - self.num_rows

    def add(self, vectors: Floats) -> None:
        """Add the next rows, (n, E)."""
        stop = self.num_rows + len(vectors)
        rows = np.arange(self.first_row + self.num_rows, self.first_row + stop)
        self._put(rows, vectors, self._coder.sa_encode(vectors))
        self.num_rows = stop

    def add_part(self, index: DiskIndex, part: DiskPart) -> None:
        """Append all rows of a part of the same template; their codes stay the same."""
        for rows, codes in part.blocks():
            self._put(rows, index.coder.sa_decode(codes), codes)
        self.num_rows += part.num_rows

    def _put(self, rows: Rows, vectors: Floats, codes: Codes) -> None:
        self._lists.add_with_ids(np.ascontiguousarray(vectors @ self._weights.T), rows)
        self._codes[rows - self.first_row] = codes

    def write(self, folder: Path, number: int) -> DiskPart:
        """Write the files of the part, all but its ids, and open it."""
        files = PartRecord(number=number, num_rows=self.num_rows)
        order = self._order()
        places = np.empty(self.num_rows, np.uint32)
        places[order] = np.arange(self.num_rows, dtype=np.uint32)
        faiss_build.write(self._lists, folder / files.lists)
        with (folder / files.codes).open("wb") as file:
            for start in range(0, self.num_rows, _WRITTEN_ROWS):
                file.write(self._codes[order[start : start + _WRITTEN_ROWS]].data)
        (folder / files.places).write_bytes(places.data)
        with (folder / files.codes).open("rb") as file:
            codes = MappedCodes(file, self._codes.shape[1], on_disk=self._on_disk)
        return DiskPart(number, self.first_row, self._lists, codes, places)

    def _order(self) -> Rows:
        """Return the rows of the part, list by list."""
        invlists = self._lists.invlists
        sizes = [(number, invlists.list_size(number)) for number in range(self._lists.nlist)]
        ids = [faiss.rev_swig_ptr(invlists.get_ids(number), size) for number, size in sizes if size]
        return (np.concatenate(ids) - self.first_row).astype(np.int64)


def extend(before: DiskIndex, blocks: Iterable[Floats], num_added: int, folder: Path, number: int) -> DiskIndex:
    """Write one part of new rows merged with the last parts that are no larger, and open the resulting index.

    Each row is rewritten only when its part doubles, and there are few parts; all other parts keep their files.
    `blocks` are the new rows, (n, E) float32 of unit norm.
    """
    num_kept = num_parts_kept([part.num_rows for part in before.parts], num_added)
    kept, joined = before.parts[:num_kept], before.parts[num_kept:]
    first_row = sum(part.num_rows for part in kept)
    capacity = before.ntotal - first_row + num_added
    builder = PartBuilder(before.template, first_row, capacity, on_disk=before.on_disk)
    for part in joined:
        builder.add_part(before, part)
    for block in blocks:
        builder.add(np.ascontiguousarray(block))
    return DiskIndex(before.template, (*kept, builder.write(folder, number)))


def num_parts_kept(sizes: Sequence[int], num_added: int) -> int:
    """Count the parts that stay: the last ones join what is added while they are no larger than that."""
    num_kept, joined = len(sizes), num_added
    while num_kept and sizes[num_kept - 1] <= joined:
        num_kept -= 1
        joined += sizes[num_kept]
    return num_kept
