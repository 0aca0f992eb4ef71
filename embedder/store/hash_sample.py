"""A sample that is the same every night, from tables too large to hold: the keys with the lowest hashes.

Keys are read piece by piece (one part file each) and only the lowest are kept; then vectors are read of the pieces
that hold them. An item that was in yesterday's sample is in today's, unless it left or lower hashes came.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry, read_keys
from embedder.store.tables import RecordTable

PENDING = 4096  # keys that may wait until the lowest are picked anew


@dataclass(frozen=True)
class SampledPart:
    """One part file of the embeddings table: published, or still in a run's journal."""

    files: StoreFiles
    path: str
    entry: JournalEntry | None = None
    table: RecordTable | None = None

    def read(self, columns: list[str]) -> pa.Table:
        """Some columns of it; of a part file in the journal, `session` and `path` too."""
        if self.table is not None:
            return self.table.read(columns, [self.path])
        return read_keys(self.files, [self.entry] if self.entry else [], "embeddings", columns)


def published_pieces(files: StoreFiles, version: int) -> Iterator[SampledPart]:
    """The part files of a version of the embeddings table."""
    table = RecordTable(files, "embeddings", version)
    return (SampledPart(files, path, table=table) for path in table.paths())


def journal_pieces(files: StoreFiles, entries: Iterable[JournalEntry]) -> Iterator[SampledPart]:
    """The part files with vectors that a run has finished."""
    return (
        SampledPart(files, part.path, entry=entry)
        for entry in entries
        for part in entry.parts
        if part.table == "embeddings"
    )


def lowest_keys(keys_by_piece: Iterable[Iterable[str]], num_keys: int) -> dict[str, set[int]]:
    """The keys with the lowest hashes, in that order, each with the numbers of the pieces in which it stands."""
    found: dict[str, set[int]] = {}
    bound = b"\xff" * 9  # above every hash
    for number, keys in enumerate(keys_by_piece):
        for key in keys:
            if key in found:
                found[key].add(number)
            elif hash_of(key) < bound:
                found[key] = {number}
        if len(found) > num_keys + PENDING:
            found = _lowest(found, num_keys)
            bound = hash_of(next(reversed(found)))
    return _lowest(found, num_keys)


def hash_of(key: str) -> bytes:
    """Where the key stands among all others; equally likely anywhere."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _lowest(found: dict[str, set[int]], num_keys: int) -> dict[str, set[int]]:
    return {key: found[key] for key in sorted(found, key=hash_of)[:num_keys]}
