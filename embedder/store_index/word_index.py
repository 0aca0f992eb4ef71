"""Word index of captions: a folder of parts, with each caption's row in one version of the embeddings table.

The build streams the captions; it needs memory for one block, and for one list while it merges parts. An update
analyses only the captions of new rows. Captions in part files that both versions have keep their place; captions in
rewritten files are found again by a hash of id, segment and caption. Deleted captions stay in the lists without a row
until they make up a quarter. Queries don't count them, so an updated version ranks like a freshly built one.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedder.store.tables.tables import ROWS_PER_PIECE, RecordTable
from embedder.store.tables.words import read_texts
from embedder.store_index.analyser import RULES, Analyser
from embedder.store_index.word_parts import (
    Numbers,
    WordPart,
    map_numbers,
    merge_parts,
    open_part,
    part_names,
    part_of,
    write_numbers,
    write_part,
)
from index.atomic_folder import hash_files
from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME

ROWS_NAME = "rows.u32"
WHOLE = ("lengths-", "starts-", "terms-")
"""Beginnings of the names of files of parts whose hashes are compared when an index is opened."""
CURE = "`embedder index build` makes it again"
NO_ROW = 0xFFFFFFFF
"""Row of a deleted caption."""
BLOCK_ROWS, BLOCK_BYTES = 250_000, 8 << 20  # size of the captions that are analysed in memory
FAN = 16  # parts of about one size that are merged while an index is built
SMALL_ROWS = 25_000  # parts of fewer captions are merged with any that follows
MAX_GONE = 0.25  # share of captions without a row, above which all parts are merged


class WordsManifest(BaseModel):
    """Manifest of a word index; it is written last."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    format_version: Literal[1] = 1
    analyser: str
    rules: int = Field(description="version of the analyser's rules")
    embeddings_version: int
    parts: tuple[int, ...] = Field(description="numbers of the parts, in the order of their captions")
    num_captions: int = Field(ge=0, description="captions that a query may find")
    num_gone: int = Field(ge=0, description="captions in the lists that have no row any more")
    num_terms: int = Field(ge=0, description="sum of the lengths of the captions that have a row")
    sizes: dict[str, int] = Field(description="bytes of each file")
    sha256: dict[str, str] = Field(description="file name to hex digest")
    build_s: float = Field(ge=0)


@dataclass(frozen=True)
class WordIndex:
    """Open word index with memory-mapped files; `rows` (uint32) holds the table row of each caption, part by part."""

    manifest: WordsManifest
    parts: Sequence[WordPart]
    rows: Numbers
    folder: Path


def open_word_index(folder: Path) -> WordIndex:
    """Open a word index.

    Checks the sizes of all files, and the hashes of those that no checksum of a list covers: `rows`, `lengths`,
    `starts` and `terms`, where what is altered hides a list. Lists have checksums, which are verified on reading.
    Raises RetrievalError if a file is missing or altered, or the format is unknown.
    """
    manifest = read_words_manifest(folder)
    try:
        for name, size in manifest.sizes.items():
            if (found := (folder / name).stat().st_size) != size:
                raise RetrievalError(f"{folder / name}: it has {found:,} bytes, and its manifest says {size:,}; {CURE}")
        whole = [name for name in manifest.sizes if name == ROWS_NAME or name.startswith(WHOLE)]
        for name, digest in hash_files(folder / each for each in whole).items():
            if digest != manifest.sha256[name]:
                raise RetrievalError(f"{folder / name}: it was altered, by its sha256; {CURE}")
        parts = [open_part(folder, number) for number in manifest.parts]
        return WordIndex(manifest, parts, map_numbers(folder / ROWS_NAME), folder)
    except OSError as error:
        raise RetrievalError(f"{folder}: the word index can't be opened ({error.strerror}); {CURE}") from None


def read_words_manifest(folder: Path) -> WordsManifest:
    """Read the manifest, or raise RetrievalError if it is missing, damaged, or written by a newer release."""
    path = folder / MANIFEST_NAME
    try:
        return WordsManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; {CURE}") from None
    except ValidationError:
        raise RetrievalError(f"{path}: it is damaged, or of a newer release; {CURE}") from None


def build_words(table: RecordTable, folder: Path, analyser: Analyser, column: str = "caption") -> WordsManifest:
    """Build a word index of all texts of a column in an empty folder."""
    started = time.monotonic()
    writer = _Writer(folder, analyser)
    first = 0
    for paths in table.path_pieces():
        texts = read_texts(table, column, paths)[column]
        writer.add(texts, np.arange(first, first + len(texts), dtype="<u4"))
        first += len(texts)
    writer.merge(0)
    return writer.finish(table.version, started)


def update_words(
    before: WordIndex, old: RecordTable, new: RecordTable, folder: Path, column: str = "caption"
) -> WordsManifest:
    """Derive the word index of `new` from `before`, that of `old`, in an empty folder; unchanged files are linked.

    Raises StoreError if a part file of the old version is gone, so that its rows can't be compared.
    """
    started = time.monotonic()
    writer = _Writer(folder, Analyser(before.manifest.analyser))
    rows, added = _move_captions(before, old, new, column)
    writer.take_over(before, rows)
    for captions, places in added:
        writer.add(captions, places)
    writer.flush()
    writer.settle()
    return writer.finish(new.version, started)


def _move_captions(
    before: WordIndex, old: RecordTable, new: RecordTable, column: str
) -> tuple[Numbers, Iterator[tuple[pa.ChunkedArray, Numbers]]]:
    """Return each caption's row in the new version, and the captions to add with their rows.

    Read the second to its end before using the first: it finds the rows of rewritten files on the way.
    """
    old_starts, new_starts = _starts(old), _starts(new)
    same = {path for path, _ in {part.key for part in old.parts()} & {part.key for part in new.parts()}}
    shifts = np.array([new_starts.get(path, -1) - start for path, start in old_starts.items()], np.int64)
    is_gone = np.array([path not in same for path in old_starts], np.bool_)
    firsts = np.array(list(old_starts.values()), np.int64)
    rows = np.array(before.rows)  # a copy
    lost = _move(rows, firsts, shifts, is_gone)
    gone = [path for path in old_starts if path not in same]
    fresh = [path for path in new_starts if path not in same]
    # Keyed by row hash: the caption's number in the whole index.
    by_row = np.full(old.num_rows() if gone else 0, NO_ROW, "<u4")
    by_row[before.rows[lost]] = lost
    hashes, docs = [np.empty(0, np.uint64)], [np.empty(0, "<u4")]
    for keys, _, places in _hash_captions(old, gone, column):
        own = by_row[places]
        hashes.append(keys[own != NO_ROW])
        docs.append(own[own != NO_ROW])
    del by_row
    known, known_docs = np.concatenate(hashes), np.concatenate(docs)
    order = np.argsort(known)
    known, known_docs = known[order], known_docs[order]

    def list_added() -> Iterator[tuple[pa.ChunkedArray, Numbers]]:
        for keys, captions, places in _hash_captions(new, fresh, column):
            found = np.minimum(np.searchsorted(known, keys), max(0, len(known) - 1))
            is_known = known[found] == keys if len(known) else np.zeros(len(keys), np.bool_)
            rows[known_docs[found[is_known]]] = places[is_known]
            yield captions.filter(pa.array(~is_known)), places[~is_known].astype("<u4")

    return rows, list_added()


def _starts(table: RecordTable) -> dict[str, int]:
    starts, first = dict[str, int](), 0
    for part in table.parts():
        starts[part.path] = first
        first += part.num_rows
    return starts


def _move(rows: Numbers, firsts: Numbers, shifts: Numbers, is_gone: Numbers) -> Numbers:
    """Renumber the rows of kept files in place; return the captions whose file was not kept."""
    lost = [np.empty(0, np.int64)]
    for start in range(0, len(rows), 1 << 20):
        here = rows[start : start + (1 << 20)]
        live = np.flatnonzero(here != NO_ROW)
        files = np.searchsorted(firsts, here[live], "right") - 1
        stays = ~is_gone[files]
        here[live[stays]] = here[live[stays]] + shifts[files[stays]]
        here[live[~stays]] = NO_ROW
        lost.append(live[~stays] + start)
    return np.concatenate(lost)


def _hash_captions(
    table: RecordTable, paths: Sequence[str], column: str
) -> Iterator[tuple[Numbers, pa.ChunkedArray, Numbers]]:
    """Yield, piece by piece, row hashes (of id, segment and caption), captions and row numbers of some files."""
    import duckdb

    starts, sizes = _starts(table), {part.path: part.num_rows for part in table.parts()}
    with duckdb.connect() as connection:
        connection.execute("SET threads = 1")  # which keeps the order
        waiting, num_rows = list[str](), 0
        for path in [*paths, None]:
            if waiting and (path is None or num_rows >= ROWS_PER_PIECE):
                keys = read_texts(table, column, waiting, ["item_id", "segment"])
                connection.register("keys", keys)
                found = connection.execute(f'SELECT hash(item_id, segment, "{column}") AS key FROM keys').fetchnumpy()
                places = [np.arange(sizes[each], dtype=np.int64) + starts[each] for each in waiting]
                yield np.asarray(found["key"]), keys[column], np.concatenate(places)
                connection.unregister("keys")
                waiting, num_rows = [], 0
            if path is not None:
                waiting.append(path)
                num_rows += sizes[path]


class _Writer:
    """Writer of one word index: parts taken over, parts made again, and each caption's row."""

    def __init__(self, folder: Path, analyser: Analyser) -> None:
        self._folder, self._analyser = folder, analyser
        self._numbers: list[int] = []
        self._rows: list[Numbers] = []  # of each part
        self._levels: list[int] = []  # how often the captions of a part have been merged
        self._known: dict[str, str] = {}  # hashes of files that were taken over
        self._waiting: list[tuple[pa.Array, Numbers]] = []
        self._next = 1

    def take_over(self, before: WordIndex, rows: Numbers) -> None:
        """Link the parts of another index; `rows` holds the row of each caption and may still change."""
        first = 0
        for number, part in zip(before.manifest.parts, before.parts, strict=True):
            for name in part_names(number):
                _link(before.folder / name, self._folder / name)
                self._known[name] = before.manifest.sha256[name]
            self._append(number, rows[first : first + part.num_docs], -1)  # not merged before their rows are known
            first += part.num_docs

    def add(self, captions: pa.ChunkedArray, rows: Numbers) -> None:
        """Analyse the captions that are not null; `rows` holds their rows."""
        is_there = pc.is_valid(captions)
        rows, captions = rows[is_there.to_numpy()], captions.drop_null()
        start = 0
        for block in _blocks(captions):
            self._waiting.append((block, rows[start : start + len(block)]))
            start += len(block)
            if _size(each for each, _ in self._waiting) >= 1:
                self.flush()

    def flush(self) -> None:
        """Write the waiting captions as a part."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        part = part_of(pa.concat_arrays([block for block, _ in waiting]), self._analyser)
        write_part(self._folder, self._next, part)
        self._append(self._next, np.concatenate([rows for _, rows in waiting]), 0)
        while self._levels[-FAN:].count(self._levels[-1]) == FAN:
            self._merge_last(FAN, self._levels[-1] + 1)

    def merge(self, first: int) -> None:
        """Merge all parts from `first` on."""
        self.flush()
        if len(self._numbers) - first > 1:
            self._merge_last(len(self._numbers) - first, 0)

    def settle(self) -> None:
        """Merge new parts with neighbours less than twice as large, or all parts if many captions are deleted."""
        num_gone = sum(int(np.count_nonzero(rows == NO_ROW)) for rows in self._rows)
        total = sum(map(len, self._rows))
        if num_gone > MAX_GONE * total:
            self._merge_last(len(self._numbers), 0)
            return
        if -1 in self._levels[-1:]:
            return
        first, held = len(self._rows) - 1, len(self._rows[-1])
        while first and len(self._rows[first - 1]) <= max(2 * held, SMALL_ROWS):
            first -= 1
            held += len(self._rows[first])
        if len(self._rows) - first > 1:
            self._merge_last(len(self._rows) - first, 0)

    def finish(self, version: int, started: float) -> WordsManifest:
        """Write the rows and the manifest."""
        rows = np.concatenate([np.empty(0, "<u4"), *self._rows])
        write_numbers(self._folder / ROWS_NAME, rows)
        parts = [open_part(self._folder, number) for number in self._numbers]
        live = [part.lengths[own != NO_ROW] for part, own in zip(parts, self._rows, strict=True)]
        names = [name for number in self._numbers for name in part_names(number)] + [ROWS_NAME]
        num_captions = sum(map(len, live))
        known = {name: self._known[name] for name in names if name in self._known}
        manifest = WordsManifest(
            analyser=self._analyser.name,
            rules=RULES,
            embeddings_version=version,
            parts=tuple(self._numbers),
            num_captions=num_captions,
            num_gone=len(rows) - num_captions,
            num_terms=sum(int(lengths.sum(dtype=np.int64)) for lengths in live),
            sizes={name: (self._folder / name).stat().st_size for name in names},
            sha256=known | hash_files(self._folder / name for name in names if name not in known),
            build_s=time.monotonic() - started,
        )
        (self._folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    def _append(self, number: int, rows: Numbers, level: int) -> None:
        self._numbers.append(number)
        self._rows.append(rows)
        self._levels.append(level)
        self._next = max(self._next, number) + 1

    def _merge_last(self, count: int, level: int) -> None:
        numbers, rows = self._numbers[-count:], self._rows[-count:]
        names = [name for number in numbers for name in part_names(number)]
        known = {name: self._known[name] for name in names if name in self._known}
        if hash_files(self._folder / name for name in known) != known:  # new checksums would cover the damage up
            raise RetrievalError("one of their files was altered, by its sha256")
        parts = [open_part(self._folder, number) for number in numbers]
        kept = [None if (own != NO_ROW).all() else own != NO_ROW for own in rows]
        merge_parts(parts, kept, self._folder, self._next)
        del parts
        del self._numbers[-count:], self._rows[-count:], self._levels[-count:]
        taken = [own if mask is None else own[mask] for own, mask in zip(rows, kept, strict=True)]
        self._append(self._next, np.concatenate(taken), level)
        for name in names:
            (self._folder / name).unlink()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _blocks(captions: pa.ChunkedArray) -> Iterator[pa.Array]:
    for chunk in captions.cast(pa.large_string()).chunks:
        ends = np.cumsum(pc.binary_length(chunk).to_numpy())
        start = 0
        while start < len(chunk):
            before = ends[start - 1] if start else 0
            stop = min(start + BLOCK_ROWS, max(start + 1, int(np.searchsorted(ends, before + BLOCK_BYTES, "right"))))
            yield chunk.slice(start, stop - start).cast(pa.string())
            start = min(stop, len(chunk))


def _size(blocks: Iterable[pa.Array]) -> float:
    sizes = ((len(block), int(pc.sum(pc.binary_length(block)).as_py())) for block in blocks)
    return sum(max(rows / BLOCK_ROWS, size / BLOCK_BYTES) for rows, size in sizes)
