"""Finished work of a run, from its journal: which of its items are complete.

Items are processed in parts by the hash of their ids, one part in memory at a time: few items are one part, more are on
disk (`embedder.storage.hashed_rows`). So publishing a hundred million items takes the memory of some thousand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry, key_schema, stream_keys
from embedder.store.part_file import PartFile
from embedder.store.schema import ITEMS
from embedder.store.tables.arrow_lookup import without_items

MEMORY_BYTES = 32 << 20
"""Bytes of rows of one kind that stay in memory: about half a million rows."""
PLACE = ["item_id", "session"]
WHOLE = pa.schema([*((name, pa.string()) for name in PLACE), ITEMS.field("num_vectors"), ("kept", pa.bool_())])
KEYS = pa.schema([("item_id", pa.string()), ("file", pa.int32())])
NO_PLACES = pa.Table.from_batches([], pa.schema([(name, pa.string()) for name in PLACE]))

Selection = Callable[[pa.Table], pa.Table]
"""Filters complete items to those that count."""


@dataclass(frozen=True)
class Finished:
    """Finished work of a run.

    Attributes:
        files: its part files; the column `file` below has their numbers.
        records: item records of all sessions: `item_id`, `num_vectors`, further columns, `session`, `file`, `kept`.
        vectors: rows of embeddings: `item_id`, `segment`, `session`, `file`, `kept`.
        whole: complete items, each once: `WHOLE` (`whole_items`).
    """

    files: tuple[PartFile, ...]
    records: HashedRows
    vectors: HashedRows
    whole: HashedRows


def hash_rows(tables: Iterable[pa.Table], schema: pa.Schema) -> HashedRows:
    """Collect rows, few of which stay in memory; columns that the schema lacks are dropped."""
    return HashedRows((table.select(schema.names).cast(schema) for table in tables), schema, memory_bytes=MEMORY_BYTES)


def read_finished(files: StoreFiles, entries: Iterable[JournalEntry], columns: Iterable[str] = ()) -> Finished:
    """Read the items that a run has finished."""
    parts = tuple(part for entry in entries for part in entry.parts)
    records, vectors = (
        hash_rows(stream_keys(files, parts, table, names), key_schema(table, names))
        for table, names in (("items", ["item_id", "num_vectors", *columns]), ("embeddings", ["item_id", "segment"]))
    )
    found = (whole_items(*together) for together in read_parts(records, vectors))
    return Finished(parts, records, vectors, hash_rows(found, WHOLE))


def whole_items(records: pa.Table, vectors: pa.Table) -> pa.Table:
    """Return the complete items once each (`WHOLE`), with the last session that finished them.

    A video's rows may be spread over several part files, some of which a kill can leave; such an item is not complete
    and is redone. An item that changed between two sessions is complete in both, and the later one counts. An item
    whose published rows are kept needs no new ones, and any that it has are ignored.

    `records` has `item_id`, `session`, `kept`, `num_vectors`; `vectors` has `item_id`, `session`, `segment`.
    """
    facts = records.select([*PLACE, "num_vectors", "kept"]).group_by(PLACE)
    expected = facts.aggregate([("num_vectors", "max"), ("kept", "max")])
    found = vectors.select([*PLACE, "segment"]).group_by(PLACE).aggregate([("segment", "count_distinct")])
    both = expected.join(found, PLACE, join_type="left outer")
    has_all = pc.equal(pc.fill_null(both["segment_count_distinct"], 0), both["num_vectors_max"])
    whole = both.filter(pc.or_(has_all, both["kept_max"])).select([*PLACE, "num_vectors_max", "kept_max"])
    whole = whole.rename_columns(WHOLE.names)
    last = whole.group_by("item_id").aggregate([("session", "max")]).rename_columns(PLACE)
    return whole.join(last, PLACE, join_type="left semi")


def of_whole(rows: HashedRows, whole: HashedRows, counting: Selection = lambda items: items) -> Iterator[pa.Table]:
    """Yield the rows of complete items, from the session that counts, part by part.

    `rows` has `item_id` and `session`; `whole` are items of `WHOLE`, of which `counting` selects.
    """
    for own, items in read_parts(rows, whole):
        yield own.join(counting(items).select(PLACE), PLACE, join_type="left semi")


def whole_without(whole: HashedRows, ids: pa.ChunkedArray) -> HashedRows:
    """Return the items of `whole` (`WHOLE`) except those with the given ids."""
    if not len(ids):
        return whole
    leaving = hash_rows([pa.table({"item_id": ids})], NO_PLACES.schema.remove(1))
    found = (without_items(items, gone["item_id"]) for items, gone in read_parts(whole, leaving))
    return hash_rows(found, WHOLE)


def whole_among(whole: HashedRows, ids: pa.ChunkedArray) -> pa.Table:
    """Return the items of `whole` (`WHOLE`) with the given ids, in memory."""
    wanted = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    found = (each.filter(pc.is_in(each["item_id"], value_set=wanted)).select(WHOLE.names) for each in whole.tables())
    return pa.concat_tables([WHOLE.empty_table(), *found])


def count_rows(
    files: Sequence[PartFile], rows: HashedRows, whole: HashedRows, counting: Selection = lambda items: items
) -> tuple["np.ndarray[Any, np.dtype[np.int64]]", pa.Table]:
    """Count the rows of complete items in each part file.

    `rows` has `item_id`, `session` and `file`; `whole` are items of `WHOLE`, of which `counting` selects. Returns the
    counts, int64 (files,), and the rows (`KEYS`) of files where only some rows count.
    """
    numbers = np.zeros(len(files), np.int64)
    for each in of_whole(rows, whole, counting):
        numbers += np.bincount(each["file"].to_numpy(), minlength=len(files))
    is_partial = [0 < number < part.num_rows for number, part in zip(numbers, files, strict=True)]
    partial = pa.array(np.flatnonzero(is_partial), pa.int32())
    found = of_whole(rows, whole, counting) if len(partial) else ()
    keys = (each.select(KEYS.names).filter(pc.is_in(each["file"], value_set=partial)) for each in found)
    return numbers, pa.concat_tables([KEYS.empty_table(), *keys])


def ids_in(keys: pa.Table, number: int) -> pa.Array:
    """Return the ids of `keys` (`KEYS`) in the part file of that number."""
    return keys.filter(pc.equal(keys["file"], number))["item_id"].combine_chunks()
