"""The journal of a run: one small JSON file for each finished write task, and what they add up to."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from embedder.store.files import StoreFiles
from embedder.store.layout import Record, journal_folder, read_record, write_record
from embedder.store.schema import TABLES


class Part(BaseModel):
    """One Parquet file in a table's folder, not yet in its log."""

    model_config = ConfigDict(frozen=True)

    table: str
    path: str
    num_rows: int
    size_bytes: int
    stats: str
    session: str


class JournalEntry(Record):
    """What one write task left behind."""

    name: str
    parts: tuple[Part, ...]
    num_items: int
    num_rejects: int
    trace: list[dict[str, Any]]


def write_entry(files: StoreFiles, run_id: str, entry: JournalEntry) -> None:
    """Record that the entry's part files are whole."""
    write_record(files, f"{journal_folder(run_id)}/{entry.name}.json", entry)


def read_entries(files: StoreFiles, run_id: str) -> list[JournalEntry]:
    """All entries of a run, in the order of their names."""
    paths = sorted(info.path for info in files.list(journal_folder(run_id)))
    return [read_entry(files, path) for path in paths if path.endswith(".json")]


def read_entry(files: StoreFiles, path: str) -> JournalEntry:
    """One entry.

    Raises:
        FileNotFoundError: there is no such entry.
    """
    entry = read_record(files, path, JournalEntry)
    if entry is None:
        raise FileNotFoundError(files.uri(path))
    return entry


def parts_of(entries: Iterable[JournalEntry], table: str) -> Iterator[Part]:
    """The part files of one table."""
    return (part for entry in entries for part in entry.parts if part.table == table)


def read_keys(files: StoreFiles, entries: Iterable[JournalEntry], table: str, columns: list[str]) -> pa.Table:
    """A few columns of a table's part files, with `session` and `path` naming where each row stands."""
    own = TABLES[table]
    empty = pa.schema([*(own.field(name) for name in columns), ("session", pa.string()), ("path", pa.string())])
    tables = [empty.empty_table()]
    for part in parts_of(entries, table):
        content = pq.ParquetFile(files.uri(f"{table}/{part.path}"), memory_map=True).read(columns)
        for name, value in {"session": part.session, "path": part.path}.items():
            content = content.append_column(name, pa.repeat(value, content.num_rows))
        tables.append(content.cast(empty))
    return pa.concat_tables(tables)


def whole_items(records: pa.Table, vectors: pa.Table) -> pa.Table:
    """The items that are all there, each with the last session that finished it.

    A video's rows may stand in several part files, of which a kill can leave some; such an item is not whole and is
    done again. An item that changed between two sessions is whole in both, and the later one counts.

    Args:
        records: item records: `item_id`, `session`, `num_vectors`.
        vectors: rows of embeddings: `item_id`, `session`, `segment`.

    Returns:
        `item_id`, `session`, `num_vectors`; each item once.
    """
    place = ["item_id", "session"]
    expected = records.select([*place, "num_vectors"]).group_by(place).aggregate([("num_vectors", "max")])
    found = vectors.group_by(place).aggregate([("segment", "count_distinct")])
    both = expected.join(found, place, join_type="left outer")
    is_whole = pc.equal(pc.fill_null(both["segment_count_distinct"], 0), both["num_vectors_max"])
    whole = both.filter(is_whole).select([*place, "num_vectors_max"]).rename_columns([*place, "num_vectors"])
    last = whole.group_by("item_id").aggregate([("session", "max")]).rename_columns(place)
    return whole.join(last, place, join_type="left semi")
