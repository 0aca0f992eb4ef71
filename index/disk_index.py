"""Index in parts that are searched in parallel; it may exceed memory, because vectors may stay on disk.

template   one file: direction weights, list centroids, product codes and the code of the vectors, all trained
part       a range of rows: inverted lists of product codes, in memory; the vectors, list by list, in a mapped
           file; and the position of each row among them

A query finds candidates by product codes in all parts, and then reads the vectors of the best. On disk, all their pages
are requested before the first is touched: 200 reads took 2 ms, against 15 ms one by one.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from index.manifest import PartRecord
from index.query_weights import inverse_weights
from index.selector import Selector
from index.vectors import Floats, Rows, distinct, keep_best

Codes = NDArray[np.uint8]
Places = NDArray[np.uint32]

_BLOCK_ROWS = 16_384  # rows that an exact search decodes together: 16 MiB at 256 dimensions
_DENSE = 8  # rows are read together with the gaps between them if they are at least one in this many
_PAGE = mmap.PAGESIZE


class MappedCodes:
    """Codes of vectors in a file that stays open, (n, code size); thread-safe."""

    def __init__(self, file: BinaryIO, code_size: int, *, on_disk: bool) -> None:
        """Map an open file whose hash the caller has checked; unless `on_disk`, all of it is requested now."""
        self._map, self.on_disk = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), on_disk
        # Otherwise the kernel reads ahead around each page, and evicts pages in use for it.
        self._map.madvise(mmap.MADV_RANDOM if on_disk else mmap.MADV_WILLNEED)
        self._codes: Codes = np.frombuffer(self._map, np.uint8).reshape(-1, code_size)

    def __len__(self) -> int:
        return len(self._codes)

    def take(self, places: Rows) -> Codes:
        """Copy the codes at some positions, (n, code size)."""
        if self.on_disk:
            self._fetch(places)
        return self._codes.take(places, axis=0)

    def slice(self, start: int, stop: int) -> Codes:
        """Copy adjacent codes, (stop - start, code size)."""
        if stop > start and self.on_disk:
            size = self._codes.shape[1]
            self._want(np.array([start * size // _PAGE]), np.array([(stop * size - 1) // _PAGE]))
        return self._codes[start:stop].copy()

    def _fetch(self, places: Rows) -> None:
        """Request the pages of some positions, adjacent ones together."""
        if not len(places):
            return
        size = self._codes.shape[1]
        pages = distinct(np.concatenate([places * size // _PAGE, (places * size + size - 1) // _PAGE]))
        breaks = np.flatnonzero(np.diff(pages) > 1) + 1
        self._want(pages[np.concatenate([[0], breaks])], pages[np.concatenate([breaks - 1, [len(pages) - 1]])])

    def _want(self, first_pages: Rows, last_pages: Rows) -> None:
        """Request runs of pages; each search makes hundreds, so the loop only makes the call."""
        starts = first_pages * _PAGE
        lengths = np.minimum((last_pages + 1) * _PAGE, len(self._map)) - starts
        advise, wanted = self._map.madvise, mmap.MADV_WILLNEED
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            advise(wanted, start, length)


@dataclass(frozen=True)
class DiskPart:
    """Part `number`: rows from `first_row` of the whole index, whose row numbers are the ids of its `lists`.

    `codes` are vectors, list by list; `places`, uint32 (rows,), has the position of each row among them.
    """

    number: int
    first_row: int
    lists: faiss.IndexIVF
    codes: MappedCodes
    places: Places

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.places)

    @property
    def record(self) -> PartRecord:
        """Record for the manifest."""
        return PartRecord(number=self.number, num_rows=self.num_rows)

    def blocks(self, rows: Rows | None = None) -> Iterator[tuple[Rows, Codes]]:
        """Yield rows with their codes in disk order; `rows` count in the whole index, None for the whole part."""
        if rows is None:
            rows = np.arange(self.first_row, self.first_row + self.num_rows)
        places = self.places[rows - self.first_row].astype(np.int64)
        order = np.argsort(places, kind="stable")
        for start in range(0, len(order), _BLOCK_ROWS):
            block = order[start : start + _BLOCK_ROWS]
            wanted = places[block]
            first, stop = int(wanted[0]), int(wanted[-1]) + 1
            if stop - first <= _DENSE * len(block):
                yield rows[block], self.codes.slice(first, stop)[wanted - first]
            else:
                yield rows[block], self.codes.take(wanted)


class DiskIndex:
    """Index in parts whose rows follow each other from row 0; thread-safe.

    `template` is trained and empty; the parts hold what it was trained for.
    """

    def __init__(self, template: faiss.IndexRefine, parts: Sequence[DiskPart]) -> None:
        self.template, self.parts = template, tuple(parts)
        self._first_rows = np.array([part.first_row for part in self.parts], np.int64)

    @property
    def ntotal(self) -> int:
        """Number of rows."""
        return sum(part.num_rows for part in self.parts)

    @property
    def on_disk(self) -> bool:
        """Whether vectors stay on disk."""
        return self.parts[0].codes.on_disk

    @property
    def d(self) -> int:
        """Width of a vector."""
        width: int = self.template.d
        return width

    @cached_property
    def coder(self) -> faiss.IndexFlatCodes:
        """Code of the vectors."""
        return faiss.downcast_index(self.template.refine_index)

    @cached_property
    def _lists(self) -> faiss.IndexIVF:
        return template_lists(self.template)

    @cached_property
    def _query_weights(self) -> Floats:
        return inverse_weights(template_weights(self.template))

    def num_bytes(self) -> int:
        """Count the bytes that searches keep in memory: all but vectors on disk."""
        per_row: int = self._lists.code_size + np.dtype(np.int64).itemsize + np.dtype(np.uint32).itemsize
        per_row += 0 if self.on_disk else self.coder.sa_code_size()
        return len(faiss.serialize_index(self.template)) + self.ntotal * per_row

    def disk_bytes(self) -> int:
        """Count the bytes of the vectors on disk."""
        return self.ntotal * int(self.coder.sa_code_size()) if self.on_disk else 0

    def imbalance(self) -> float:
        """Compute the imbalance of the lists over all parts: the factor by which it slows a search."""
        sizes = np.zeros(self._lists.nlist)
        for part in self.parts:
            sizes += [part.lists.invlists.list_size(number) for number in range(len(sizes))]
        return float(len(sizes) * np.square(sizes).sum() / max(1.0, sizes.sum()) ** 2)

    def search(
        self, queries: Floats, k: int, parameters: Mapping[str, int], selector: "Selector | None" = None
    ) -> tuple[Floats, Rows]:
        """Find the k nearest rows: scores and row numbers, (Q, k), best first; row -1 where the index found none.

        `queries` is (Q, E) float32, C-contiguous; `parameters` are `nprobe`, and `k_factor` for re-ranking; `selector`
        is None for all rows.
        """
        _, candidates = self._candidates(queries, min(k * parameters["k_factor"], self.ntotal), parameters, selector)
        best_scores = np.full((len(queries), k), -np.inf, np.float32)
        best_rows = np.full((len(queries), k), -1, np.int64)
        for number, found in enumerate(candidates):
            rows = found[found >= 0]
            scores = self.vectors(rows) @ queries[number]
            best = np.argsort(-scores, kind="stable")[:k]
            best_scores[number, : len(best)], best_rows[number, : len(best)] = scores[best], rows[best]
        return best_scores, best_rows

    def _candidates(
        self, queries: Floats, k: int, parameters: Mapping[str, int], selector: "Selector | None"
    ) -> tuple[Floats, Rows]:
        weighted = np.ascontiguousarray(queries @ self._query_weights.T)
        nprobe = min(parameters["nprobe"], self._lists.nlist)
        among = {} if selector is None else {"sel": selector.faiss}
        wanted = faiss.SearchParametersIVF(nprobe=nprobe, **among)
        found = [part.lists.search(weighted, k, params=wanted) for part in self.parts]
        if len(found) == 1:
            scores, rows = found[0]
            return scores, rows
        return keep_best(np.hstack([scores for scores, _ in found]), np.hstack([rows for _, rows in found]), k)

    def search_exactly(self, queries: Floats, k: int, selector: "Selector | None" = None) -> tuple[Floats, Rows]:
        """Find the k nearest of all selected rows by brute force: scores and rows, (Q, k), best first.

        `queries` is (Q, E) float32, C-contiguous; k is at most the number of selected rows.
        """
        best_scores, best_rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for part in self.parts:
            wanted = None
            if selector is not None:
                ends = np.searchsorted(selector.rows, [part.first_row, part.first_row + part.num_rows])
                wanted = selector.rows[ends[0] : ends[1]]
            for rows, codes in part.blocks(wanted):
                num_found = min(k, len(rows))
                found = faiss.knn(queries, self._decode(codes), num_found, metric=faiss.METRIC_INNER_PRODUCT)
                scores, places = np.hstack([best_scores, found[0]]), np.hstack([best_rows, rows[found[1]]])
                best_scores, best_rows = keep_best(scores, places, k)
        return best_scores, best_rows

    def vectors(self, rows: Rows) -> Floats:
        """Fetch the vectors of some rows, (n, E), with the precision of their codes."""
        if len(self.parts) == 1:
            return self._decode(self.parts[0].codes.take(self.parts[0].places[rows].astype(np.int64)))
        rows = np.asarray(rows, np.int64)
        codes = np.empty((len(rows), self.coder.sa_code_size()), np.uint8)
        part_numbers = np.searchsorted(self._first_rows, rows, side="right") - 1
        for number in distinct(part_numbers).tolist():
            part, here = self.parts[number], part_numbers == number
            codes[here] = part.codes.take(part.places[rows[here] - part.first_row].astype(np.int64))
        return self._decode(codes)

    def _decode(self, codes: Codes) -> Floats:
        decoded: Floats = self.coder.sa_decode(codes)
        return decoded


def template_lists(template: faiss.IndexRefine) -> faiss.IndexIVF:
    """Return the empty inverted lists of a template."""
    return faiss.downcast_index(faiss.downcast_index(template.base_index).index)


def template_weights(template: faiss.IndexRefine) -> Floats:
    """Return the direction weights of a template, (E, E)."""
    linear = faiss.downcast_VectorTransform(faiss.downcast_index(template.base_index).chain.at(0))
    weights: Floats = faiss.vector_to_array(linear.A).reshape(linear.d_out, linear.d_in)
    return weights
