"""Parts of a word index: which captions hold a term, how often, and how long each caption is.

A part is six files of numbers, ordered by the terms' hashes: `terms`; `starts`, where each term's list starts in `docs`
and `counts`; `docs`, the captions of each list by their number in the part, rising; `counts`, how often each holds the
term; `sums`, checksums of the lists, verified at first reading; and `lengths`, the captions' lengths in terms. Parts
never change. They are made in memory from captions (`part_of`) and merged list by list (`merge_parts`).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from embedder.store_index.analyser import Analyser, Terms, split
from index.index_errors import RetrievalError

DTYPES = {"terms": "u64", "starts": "u64", "docs": "u32", "counts": "u8", "sums": "u32", "lengths": "u16"}
NUMPY: dict[str, np.dtype[Any]] = {
    "u64": np.dtype("<u8"),
    "u32": np.dtype("<u4"),
    "u16": np.dtype("<u2"),
    "u8": np.dtype("u1"),
}
MERGED_AT_ONCE = 1 << 21
"""Postings that a merge holds in memory, about 30 bytes each; one longer list may exceed this, as it isn't sorted."""

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class WordPart:
    """Lists of some captions: T terms, P postings, D captions.

    Attributes:
        terms: uint64 (T,), hashes of the terms, rising.
        starts: uint64 (T + 1,), where each list starts.
        docs: uint32 (P,).
        counts: uint8 (P,), at most 255.
        sums: uint32 (T,).
        lengths: uint16 (D,), at most 65,535.
    """

    terms: Terms
    starts: Numbers
    docs: Numbers
    counts: Numbers
    sums: Numbers
    lengths: Numbers

    @property
    def num_docs(self) -> int:
        """Number of captions."""
        return len(self.lengths)

    def span(self, term: int) -> tuple[int, int]:
        """Return where a term's list starts and ends; it is empty if no caption holds the term."""
        place = int(np.searchsorted(self.terms, np.uint64(term)))
        if place == len(self.terms) or int(self.terms[place]) != term:
            return 0, 0
        return int(self.starts[place]), int(self.starts[place + 1])

    def check(self, term: int) -> None:
        """Compare a list with its checksum; raise RetrievalError if it was altered."""
        place = int(np.searchsorted(self.terms, np.uint64(term)))
        start, stop = int(self.starts[place]), int(self.starts[place + 1])
        if _sum(term, self.docs[start:stop], self.counts[start:stop]) != int(self.sums[place]):
            raise RetrievalError("a list differs from its sum")


def part_names(number: int) -> list[str]:
    """Return the names of a part's files."""
    return [f"{name}-{number:06d}.{kind}" for name, kind in DTYPES.items()]


def open_part(folder: Path, number: int) -> WordPart:
    """Map the files of a part."""
    return WordPart(*(map_numbers(folder / name) for name in part_names(number)))


def map_numbers(path: Path) -> Numbers:
    """Map a file of numbers, whose suffix gives the type."""
    dtype = NUMPY[path.suffix[1:]]
    if path.stat().st_size < dtype.itemsize:  # an empty file can't be mapped
        return np.empty(0, dtype)
    numbers: Numbers = np.memmap(path, dtype, "r").view(np.ndarray)
    return numbers


def part_of(captions: pa.Array, analyser: Analyser) -> WordPart:
    """Make a part in memory from D captions, none of them null."""
    tokens = split(captions)
    encoded = tokens.flatten().dictionary_encode()
    numbers, hashes = analyser.index_terms(encoded.dictionary.to_pylist())
    terms, term_numbers = np.unique(hashes, return_inverse=True)
    first = np.concatenate([[0], np.cumsum(numbers)])
    codes = encoded.indices.to_numpy()
    docs = np.repeat(np.arange(len(captions)), np.diff(tokens.offsets.to_numpy()))
    repeats = numbers[codes]
    # The terms of a token are adjacent in the hashes: its first, and those that follow.
    steps = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    found = term_numbers[np.repeat(first[codes], repeats) + steps]
    docs = np.repeat(docs, repeats)
    lengths = np.bincount(docs, minlength=len(captions))
    keys, counts = np.unique(found.astype(np.uint64) << np.uint64(32) | docs.astype(np.uint64), return_counts=True)
    starts = np.searchsorted(keys >> np.uint64(32), np.arange(len(terms) + 1))
    lists = (keys & np.uint64(0xFFFFFFFF)).astype("<u4"), np.minimum(counts, 255).astype("u1")
    return WordPart(
        terms, starts.astype("<u8"), *lists, sums_of(terms, starts, *lists), np.minimum(lengths, 65535).astype("<u2")
    )


def write_part(folder: Path, number: int, part: WordPart) -> None:
    """Write a part that is in memory."""
    for name, path in zip(DTYPES, part_names(number), strict=True):
        write_numbers(folder / path, getattr(part, name).astype(NUMPY[DTYPES[name]], copy=False))


def write_numbers(path: Path, values: Numbers) -> None:
    """Write a file of numbers; NumPy's `tofile` doesn't report that a full disk lost the last of them."""
    with path.open("wb") as file:
        _write(file, values)


def merge_parts(parts: Sequence[WordPart], kept: Sequence[Numbers | None], folder: Path, number: int) -> None:
    """Write a part with the captions of others, in order; `kept` has a bool (D,) mask for each, or None for all."""
    numbers = _new_numbers(parts, kept)
    opened = {name: (folder / path).open("wb") for name, path in zip(DTYPES, part_names(number), strict=True)}
    try:
        _write(opened["starts"], np.zeros(1, "<u8"))
        num_postings = 0
        for terms, spans in _cuts(parts):
            found, docs, counts = _take_postings(parts, numbers, terms, spans)
            sizes = np.bincount(found, minlength=len(terms)) if len(terms) > 1 else np.array([len(docs)])
            is_left = sizes > 0
            starts = np.concatenate([[0], np.cumsum(sizes[is_left])])
            lists = docs.astype("<u4", copy=False), counts
            for name, values in {
                "terms": terms[is_left],
                "starts": (starts[1:] + num_postings).astype("<u8"),
                "docs": lists[0],
                "counts": lists[1],
                "sums": sums_of(terms[is_left], starts, *lists),
            }.items():
                _write(opened[name], values)
            num_postings += len(docs)
        for part, taken in zip(parts, kept, strict=True):
            _write(opened["lengths"], part.lengths if taken is None else part.lengths[taken])
    finally:
        for file in opened.values():
            file.close()


def _new_numbers(parts: Sequence[WordPart], kept: Sequence[Numbers | None]) -> list[tuple[int, Numbers | None]]:
    """Return for each part the offset of its captions' numbers, and the new numbers, -1 for captions left out."""
    found: list[tuple[int, Numbers | None]] = []
    first = 0
    for part, taken in zip(parts, kept, strict=True):
        if taken is None:
            found.append((first, None))
            first += part.num_docs
        else:
            numbers = np.where(taken, np.cumsum(taken, dtype=np.int32) - 1 + first, -1).astype(np.int32)
            found.append((first, numbers))
            first += int(np.count_nonzero(taken))
    return found


def _cuts(parts: Sequence[WordPart]) -> Iterator[tuple[Terms, list[tuple[int, int]]]]:
    """Yield runs of terms with about as many postings as a merge may hold, and their lists' places in each part."""
    terms = np.empty(0, np.uint64)
    for part in parts:
        terms = np.union1d(terms, part.terms)
    sizes = np.zeros(len(terms), np.int64)
    for part in parts:
        sizes[np.searchsorted(terms, part.terms)] += np.diff(part.starts).astype(np.int64)
    before = np.cumsum(sizes) - sizes
    start = 0
    while start < len(terms):
        stop = max(start + 1, int(np.searchsorted(before, before[start] + MERGED_AT_ONCE)))
        if stop > start + 1 and before[stop - 1] + sizes[stop - 1] - before[start] > 2 * MERGED_AT_ONCE:
            stop -= 1  # a long list is on its own
        here = terms[start:stop]
        spans = [tuple(np.searchsorted(part.terms, [here[0], here[-1]]).tolist()) for part in parts]
        ends = [int(np.searchsorted(part.terms, here[-1], "right")) for part in parts]
        yield here, [(span[0], end) for span, end in zip(spans, ends, strict=True)]
        start = stop


def _take_postings(
    parts: Sequence[WordPart], numbers: Sequence[tuple[int, Numbers | None]], terms: Terms, spans: list[tuple[int, int]]
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the postings of some terms in all parts, list after list: index of the term, caption, count."""
    found, docs, counts = [], [], []
    for part, (first, new), (start, stop) in zip(parts, numbers, spans, strict=True):
        starts = part.starts[start : stop + 1].astype(np.int64)
        if stop == start:
            continue
        here = part.docs[starts[0] : starts[-1]]
        times = part.counts[starts[0] : starts[-1]]
        places = np.repeat(np.searchsorted(terms, part.terms[start:stop]).astype(np.int32), np.diff(starts))
        if new is None:
            here = here + np.uint32(first)
        else:
            moved = new[here]
            here, times, places = moved[moved >= 0], times[moved >= 0], places[moved >= 0]
        found.append(places)
        docs.append(here.astype(np.uint32, copy=False))
        counts.append(times)
    if not found:
        return np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint8)
    joined = np.concatenate(found), np.concatenate(docs), np.concatenate(counts)
    if len(terms) == 1 or len(found) == 1:
        return joined
    order = np.argsort(joined[0], kind="stable")
    return joined[0][order], joined[1][order], joined[2][order]


def sums_of(terms: Terms, starts: Numbers, docs: Numbers, counts: Numbers) -> Numbers:
    """Return the checksums of consecutive lists."""
    bounds = starts.tolist()
    spans = zip(terms.tolist(), bounds, bounds[1:], strict=False)
    return np.array([_sum(term, docs[start:stop], counts[start:stop]) for term, start, stop in spans], "<u4")


def _sum(term: int, docs: Numbers, counts: Numbers) -> int:
    first = zlib.crc32(np.ascontiguousarray(docs).data, term & 0xFFFFFFFF)
    return zlib.crc32(np.ascontiguousarray(counts).data, first)


def _write(file: BinaryIO, values: Numbers) -> None:
    file.write(np.ascontiguousarray(values).data)
