"""Journal of a run: an entry for each finished write task.

Each is a small JSON file at first; they are joined while the run continues (`embedder.store.journal.journal_segments`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pydantic import Field

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import find_entry, names_in_journal, read_lines
from embedder.store.layout import Record, journal_folder, parse_record, read_record
from embedder.store.part_file import PartFile
from embedder.store.schema import TABLES, with_nulls

WITHOUT_FIGURES: dict[str, Any] = {"trace": [], "metrics": {}}  # earlier releases kept states of [[metric]]
TASK_DIGITS = 6  # of a write task's number, in file names


class JournalEntry(Record):
    """Record of one finished write task."""

    name: str
    parts: tuple[PartFile, ...]
    num_items: int
    num_rejects: int
    num_moves: int = Field(0, description="items that keep their rows, with a file of moves next to this one")
    trace: list[dict[str, Any]]
    taken_from: str | None = Field(None, description="run whose publication the rows were copied from")


def entry_name(session: str, task: int) -> str:
    """Return the name of the entry of a session's write task."""
    return f"{session}-{task:0{TASK_DIGITS}d}"


def entry_path(run_id: str, name: str) -> str:
    """Return the path of one entry, which is written when its part files are complete."""
    return f"{journal_folder(run_id)}/{name}.json"


def read_entries(files: StoreFiles, run_id: str, but: Collection[str] = ()) -> list[JournalEntry]:
    """Read the entries of a run except `but`, by name, without `trace`, which is most of an entry."""
    entries = [entry.model_copy(update=WITHOUT_FIGURES) for entry in stream_entries(files, run_id, but)]
    return sorted(entries, key=lambda entry: entry.name)


def stream_entries(files: StoreFiles, run_id: str, but: Collection[str] = ()) -> Iterator[JournalEntry]:
    """Read the entries of a run except `but`, in no order; few are in memory at once."""
    return (parse_record(files, path, data, JournalEntry) for _, path, data in read_lines(files, run_id, but))


def entry_names(files: StoreFiles, run_id: str, session: str) -> set[str]:
    """Return the names of the entries that a session of a run has written."""
    return {name for name in names_in_journal(files, run_id) if name.startswith(f"{session}-")}


def read_entry(files: StoreFiles, path: str) -> JournalEntry:
    """Read one entry; FileNotFoundError if there is none."""
    entry = read_record(files, path, JournalEntry)
    if entry is None:
        raise FileNotFoundError(files.uri(path))
    return entry


def key_schema(table: str, columns: Iterable[str]) -> pa.Schema:
    """Return the columns of `stream_keys`: those of the table, and `session`, `file` and `kept` of the part file."""
    own = [TABLES[table].field(name) for name in columns]
    return pa.schema([*own, ("session", pa.string()), ("file", pa.int32()), ("kept", pa.bool_())])


def stream_keys(files: StoreFiles, parts: Sequence[PartFile], table: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield columns of each of a table's part files (`key_schema`); `file` is the file's position in `parts`."""
    schema = key_schema(table, columns)

    def read(numbered: tuple[int, PartFile]) -> pa.Table:
        number, part = numbered
        content = _read_part(files, part, list(columns))
        for name, value in (("session", part.session), ("file", number), ("kept", part.kept)):
            field = schema.field(name)
            content = content.append_column(field, pa.repeat(pa.scalar(value, field.type), content.num_rows))
        return with_nulls(content, schema).select(schema.names).cast(schema)

    return files.stream(read, [(number, part) for number, part in enumerate(parts) if part.table == table])


def _read_part(files: StoreFiles, part: PartFile, columns: list[str]) -> pa.Table:
    path = f"{part.table}/{part.path}"
    try:
        return files.read_table(path, columns)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"{files.uri(path)}: a part file that a run had finished is missing or damaged ({error}); delete "
            f"{files.uri(_entry_of(files, part))}, and the same command embeds its items again"
        ) from None


def _entry_of(files: StoreFiles, part: PartFile) -> str:
    run_part, _, task = part.path.partition(f"-{part.session}-")
    run_id, name = run_part.removeprefix("part-"), f"{part.session}-{task.partition('.')[0][:TASK_DIGITS]}"
    return find_entry(files, run_id, name) or entry_path(run_id, name)
