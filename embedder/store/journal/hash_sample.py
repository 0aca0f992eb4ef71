"""Sample that is the same in every run, from tables too large for memory: the keys with the lowest hashes.

Keys are read piece by piece (one part file each) and only the lowest are kept; then vectors are read from the pieces
that hold them. An item of the last sample is in the next one, unless it was removed or lower hashes were added.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry, key_schema, stream_keys
from embedder.store.part_file import PartFile
from embedder.store.tables.tables import RecordTable

PENDING = 4096  # keys that are collected before the lowest are selected again


@dataclass(frozen=True)
class SampledPart:
    """Part file of the embeddings table: published, or still in a run's journal."""

    read: Callable[[list[str]], pa.Table]
    """Reads some columns; for a part file in the journal, also `session`."""


def published_pieces(files: StoreFiles, version: int) -> Iterator[SampledPart]:
    """Yield the part files of a version of the embeddings table."""
    table = RecordTable(files, "embeddings", version)
    return (SampledPart(partial(table.read, paths=[path])) for path in table.paths())


def journal_pieces(files: StoreFiles, entries: Iterable[JournalEntry]) -> Iterator[SampledPart]:
    """Yield the part files with vectors that a run has finished."""
    return (
        SampledPart(partial(_read_finished, files, part))
        for entry in entries
        for part in entry.parts
        if part.table == "embeddings"
    )


def _read_finished(files: StoreFiles, part: PartFile, columns: list[str]) -> pa.Table:
    found = stream_keys(files, [part], "embeddings", columns)
    return pa.concat_tables([key_schema("embeddings", columns).empty_table(), *found])


def lowest_keys(
    keys_by_piece: Iterable[Iterable[str]], num_keys: int, bound: bytes | None = None
) -> dict[str, set[int]]:
    """Return at most `num_keys` keys with the lowest hashes up to `bound`, in order, with their pieces' numbers."""
    found: dict[str, set[int]] = {}
    bound = b"\xff" * 9 if bound is None else bound  # above every hash
    for number, keys in enumerate(keys_by_piece):
        for key in keys:
            if key in found:
                found[key].add(number)
            elif hash_of(key) <= bound:
                found[key] = {number}
        if len(found) > num_keys + PENDING:
            found = _lowest(found, num_keys)
            bound = hash_of(next(reversed(found)))
    return _lowest(found, num_keys)


def hash_of(key: str) -> bytes:
    """Return the uniformly distributed hash by which keys are ordered."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _lowest(found: dict[str, set[int]], num_keys: int) -> dict[str, set[int]]:
    return {key: found[key] for key in sorted(found, key=hash_of)[:num_keys]}
