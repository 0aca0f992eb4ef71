"""Journal of a run: an entry for each finished write task, and their sum.

Each is a small JSON file at first; while the run goes on they are joined (`embedder.store.journal_segments`).
"""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal_segments import find_entry, names_in_journal, read_lines
from embedder.store.layout import Record, journal_folder, parse_record, read_record
from embedder.store.schema import TABLES, with_nulls

WITHOUT_FIGURES: dict[str, Any] = {"trace": [], "metrics": {}}
TASK_DIGITS = 6  # of a write task's number, in file names


class PartFile(BaseModel):
    """Parquet file in a table's folder, not yet in its log."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    table: str
    path: str
    num_rows: int
    size_bytes: int
    stats: str
    session: str
    kept: bool = False  # item records whose published rows of embeddings stay as they are

    @property
    def id_range(self) -> tuple[str, str] | None:
        """Least and greatest id of its rows, by its statistics; None where they don't tell."""
        return self._bounds("item_id")

    @property
    def state(self) -> str | None:
        """State that all items of a file of records are in, by its statistics; None where they don't tell."""
        bounds = self._bounds("state")
        return None if bounds is None or bounds[0] != bounds[1] else bounds[0]

    def _bounds(self, column: str) -> tuple[str, str] | None:
        """Least and greatest value of a column that is never null."""
        stats = json.loads(self.stats)
        least, greatest = ((stats.get(name) or {}).get(column) for name in ("minValues", "maxValues"))
        return None if least is None or greatest is None else (least, greatest)


class JournalEntry(Record):
    """Record of one finished write task."""

    name: str
    parts: tuple[PartFile, ...]
    num_items: int
    num_rejects: int
    num_moves: int = Field(0, description="items that keep their rows, with a file of moves beside this one")
    trace: list[dict[str, Any]]
    metrics: dict[str, Any] = Field({}, description="states of the part's rows, by the digest of each [[metric]]")
    taken_from: str | None = Field(None, description="run whose publication the rows were copied from")


def entry_name(session: str, task: int) -> str:
    """Name of the entry of a session's write task."""
    return f"{session}-{task:0{TASK_DIGITS}d}"


def entry_path(run_id: str, name: str) -> str:
    """Path of one entry, which is written when its part files are whole."""
    return f"{journal_folder(run_id)}/{name}.json"


def read_entries(
    files: StoreFiles, run_id: str, but: Collection[str] = (), *, is_light: bool = False
) -> list[JournalEntry]:
    """Read all entries of a run, in the order of their names.

    Args:
        files: the store.
        run_id: id of the run.
        but: names of entries that are left out.
        is_light: without `trace` and `metrics`, which are most of an entry.
    """
    found = stream_entries(files, run_id, but)
    entries = [entry.model_copy(update=WITHOUT_FIGURES) for entry in found] if is_light else [*found]
    return sorted(entries, key=lambda entry: entry.name)


def stream_entries(files: StoreFiles, run_id: str, but: Collection[str] = ()) -> Iterator[JournalEntry]:
    """Read all entries of a run, in no order; few are in memory at once.

    Args:
        files: the store.
        run_id: id of the run.
        but: names of entries that are left out.
    """
    return (parse_record(files, path, data, JournalEntry) for _, path, data in read_lines(files, run_id, but))


def entry_names(files: StoreFiles, run_id: str, session: str) -> set[str]:
    """Return the names of the entries that a session of a run has written.

    Args:
        files: the store.
        run_id: of the run.
        session: that wrote them, as their names begin.
    """
    return {name for name in names_in_journal(files, run_id) if name.startswith(f"{session}-")}


def read_entry(files: StoreFiles, path: str) -> JournalEntry:
    """Read one entry.

    Raises:
        FileNotFoundError: there is no such entry.
    """
    entry = read_record(files, path, JournalEntry)
    if entry is None:
        raise FileNotFoundError(files.uri(path))
    return entry


def parts_of(entries: Iterable[JournalEntry], table: str) -> Iterator[PartFile]:
    """Part files of one table."""
    return (part for entry in entries for part in entry.parts if part.table == table)


def read_keys(files: StoreFiles, entries: Iterable[JournalEntry], table: str, columns: list[str]) -> pa.Table:
    """Read a few columns of a table's part files, with `session`, `path` and `kept` of each row's file.

    Args:
        files: the store.
        entries: entries of the journal.
        table: name of the table.
        columns: columns of the table.
    """
    own = TABLES[table]
    place = {"session": pa.string(), "path": pa.string(), "kept": pa.bool_()}
    empty = pa.schema([*(own.field(name) for name in columns), *map(pa.field, place, place.values())])

    def read(part: PartFile) -> pa.Table:
        content = _read_part(files, part, columns)
        for name in place:
            content = content.append_column(name, pa.repeat(getattr(part, name), content.num_rows))
        return with_nulls(content, empty).select(empty.names).cast(empty)

    return pa.concat_tables([empty.empty_table(), *files.each(read, parts_of(entries, table))])


def _read_part(files: StoreFiles, part: PartFile, columns: list[str]) -> pa.Table:
    """Read some columns of a finished part file.

    Raises:
        StoreError: it is missing or damaged.
    """
    path = f"{part.table}/{part.path}"
    try:
        return files.read_table(path, columns)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"{files.uri(path)}: a part file that a run had finished is missing or damaged ({error}); delete "
            f"{files.uri(_entry_of(files, part))}, and the same command embeds its items again"
        ) from None


def _entry_of(files: StoreFiles, part: PartFile) -> str:
    """Path of the file that holds the journal entry of a part file, by the part file's name."""
    run_part, _, task = part.path.partition(f"-{part.session}-")
    run_id, name = run_part.removeprefix("part-"), f"{part.session}-{task.partition('.')[0][:TASK_DIGITS]}"
    return find_entry(files, run_id, name) or entry_path(run_id, name)


@dataclass(frozen=True)
class Finished:
    """Finished work of a run, by its journal.

    Attributes:
        records: item records, of all sessions: `item_id`, `num_vectors`, further columns, and their session and file.
        vectors: rows of embeddings: `item_id`, `segment`, and their session and file.
        whole: result of `whole_items`.
    """

    records: pa.Table
    vectors: pa.Table
    whole: pa.Table


def read_finished(files: StoreFiles, entries: Iterable[JournalEntry], columns: Iterable[str] = ()) -> Finished:
    """Read the items that a run has finished.

    Args:
        files: the store.
        entries: the run's journal.
        columns: further columns of the item records.
    """
    entries = list(entries)
    records = read_keys(files, entries, "items", ["item_id", "num_vectors", *columns])
    vectors = read_keys(files, entries, "embeddings", ["item_id", "segment"])
    return Finished(records, vectors, whole_items(records, vectors))


def whole_items(records: pa.Table, vectors: pa.Table) -> pa.Table:
    """Items that are complete, each with the last session that finished it.

    A video's rows may be spread over several part files, of which a kill can leave some; such an item is not whole and
    is done again. An item that changed between two sessions is whole in both, and the later one counts.

    An item whose published rows are kept needs no new ones, and any that it has are ignored.

    Args:
        records: item records: `item_id`, `session`, `kept`, `num_vectors`.
        vectors: rows of embeddings: `item_id`, `session`, `segment`.

    Returns:
        `item_id`, `session`, `num_vectors`, `kept`; each item once.
    """
    place = ["item_id", "session"]
    facts = records.select([*place, "num_vectors", "kept"]).group_by(place)
    expected = facts.aggregate([("num_vectors", "max"), ("kept", "max")])
    found = vectors.group_by(place).aggregate([("segment", "count_distinct")])
    both = expected.join(found, place, join_type="left outer")
    has_all = pc.equal(pc.fill_null(both["segment_count_distinct"], 0), both["num_vectors_max"])
    whole = both.filter(pc.or_(has_all, both["kept_max"])).select([*place, "num_vectors_max", "kept_max"])
    whole = whole.rename_columns([*place, "num_vectors", "kept"])
    last = whole.group_by("item_id").aggregate([("session", "max")]).rename_columns(place)
    return whole.join(last, place, join_type="left semi")
