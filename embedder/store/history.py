"""History of a store: its publications from first to last, and those that can still be read."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from embedder.errors import StoreError
from embedder.store.delta_log import whole_versions
from embedder.store.files import StoreFiles
from embedder.store.layout import PUBLISHED_FILE, Current, Published, read_current, read_record
from embedder.store.runs import all_runs
from embedder.store.schema import TABLES
from embedder.store.tables import RecordTable

SAME_ROWS = ("compaction", "migration", "index", "purge")
"""Kinds of publication with the same rows as the one before; a purge removes its items from that, too."""


@dataclass(frozen=True)
class PastRun:
    """Run in the history; of runs older than the records, little is known.

    Attributes:
        run_id: id of the run.
        started_at: time of its start.
        record: its publication; None where it left no record.
        is_current: whether readers see it now.
        can_be_read: whether all files of its version exist.
    """

    run_id: str
    started_at: datetime | None
    record: Published | None
    is_current: bool
    can_be_read: bool


def publications(files: StoreFiles) -> list[Published]:
    """Records of all publications, oldest first; without runs killed before they replaced CURRENT.json."""
    current = read_current(files)
    if current is None:
        return []
    paths = [info.path for info in files.list("runs") if info.path.endswith(f"/{PUBLISHED_FILE}")]
    records = files.each(lambda path: read_record(files, path, Published), paths)
    return published_chain(current.run_id, [record for record in records if record is not None])


def published_chain(current_id: str, records: Iterable[Published]) -> list[Published]:
    """Follow the records back from the current one, each to the one that it replaced; pure.

    A run killed between its record and CURRENT.json left a record that no other one names.
    """
    by_id = {record.run_id: record for record in records}
    chain: list[Published] = []
    run_id: str | None = current_id
    while run_id is not None and (record := by_id.pop(run_id, None)) is not None:
        chain.append(record)
        run_id = record.previous
    return chain[::-1]


def find_publication(files: StoreFiles, run_id: str) -> Published:
    """Find one publication of the store.

    Raises:
        StoreError: the store never published a run of that name, or did so before it kept records.
    """
    for record in publications(files):
        if record.run_id == run_id:
            return record
    raise StoreError(
        f"store {files.address}: no run {run_id} among what it published; `embedder history --store {files.address}` "
        "lists the runs that can be read"
    )


def check_readable(files: StoreFiles, version: Current) -> None:
    """Refuse a publication that has lost a file.

    Raises:
        StoreError: some of its files were deleted.
    """
    if version.run_id not in readable(files, [version]):
        raise StoreError(
            f"store {files.address}: version {version.run_id} can't be read any more: vacuum or purge took files "
            f"of it; `embedder history --store {files.address}` lists the versions that can"
        )


def readable(files: StoreFiles, versions: Iterable[Current], without: Iterable[str] = ()) -> set[str]:
    """Run ids of those publications whose part files all exist.

    Args:
        files: the store.
        versions: publications to check.
        without: files, relative to the store, that count as deleted.
    """
    versions, gone = list(versions), set(without)
    whole = {name: _whole(files, name, {getattr(version, name) for version in versions}, gone) for name in TABLES}
    return {version.run_id for version in versions if all(getattr(version, name) in whole[name] for name in TABLES)}


def part_files(files: StoreFiles, name: str) -> dict[str, int]:
    """All part files in a table's folder, needed or not: path relative to the folder -> size in bytes."""
    return {
        info.path.removeprefix(f"{name}/"): info.size_bytes
        for info in files.list(name)
        if info.path.endswith(".parquet") and "/_delta_log/" not in info.path
    }


def _whole(files: StoreFiles, name: str, numbers: set[int], gone: set[str]) -> set[int]:
    """Versions of a table that can be read."""
    there = {path: size for path, size in part_files(files, name).items() if f"{name}/{path}" not in gone}
    never = {number for number in numbers if number < 0}  # nothing was ever committed to the table
    whole = whole_versions(files, name, numbers - never, there)
    if whole is None:
        whole = {number for number in numbers - never if _is_whole(files, name, number, there)}
    return whole | never


def _is_whole(files: StoreFiles, name: str, number: int, there: dict[str, int]) -> bool:
    try:
        return all(path in there for path in RecordTable(files, name, number).paths())
    except StoreError:  # its log entries are gone
        return False


def past_runs(files: StoreFiles) -> list[PastRun]:
    """All publications, oldest first, and runs older than the records.

    Raises:
        StoreError: a record is damaged, or of an unknown format.
    """
    records = publications(files)
    current = read_current(files)
    whole = readable(files, records)
    started = {info.run_id: info.started_at for info in all_runs(files)}
    known = [
        PastRun(
            run_id=record.run_id,
            started_at=started.get(record.run_id),
            record=record,
            is_current=current is not None and record.run_id == current.run_id,
            can_be_read=record.run_id in whole,
        )
        for record in records
    ]
    first = records[0].run_id if records else None
    return [*_without_record(files, current, started, first), *known]


def _without_record(
    files: StoreFiles, current: Current | None, started: dict[str, datetime], first: str | None
) -> list[PastRun]:
    """Runs up to the current publication that are older than the first record; some may have failed."""
    if current is None:
        return []
    older = [run_id for run_id in sorted(started) if run_id <= current.run_id and (first is None or run_id < first)]
    whole = readable(files, [current]) if first is None else set()
    return [
        PastRun(run_id, started[run_id], None, is_current=run_id == current.run_id, can_be_read=run_id in whole)
        for run_id in older
    ]


def one_before(history: list[Published]) -> Published | None:
    """Default target of a rollback: the last publication with other rows; pure.

    Compactions and the like change no row, so they are skipped. A rollback counts as its target: rolling back twice
    goes back by two.

    Args:
        history: publications, oldest first; the last is the current one.
    """
    place = {record.run_id: number for number, record in enumerate(history)}
    number = len(history) - 1
    while number >= 0 and (history[number].kind in SAME_ROWS or history[number].restores in place):
        restored = history[number].restores
        number = place[restored] if restored in place else number - 1
    return history[number - 1] if number > 0 else None


def same_rows(history: list[Published]) -> set[int]:
    """Versions of embeddings that hold the published rows, so that their indexes fit; pure.

    Args:
        history: publications, oldest first; the last is the current one.
    """
    place = {record.run_id: number for number, record in enumerate(history)}
    versions: set[int] = set()
    number = len(history) - 1
    while number >= 0:
        record = history[number]
        versions.add(record.embeddings)
        if record.restores in place:
            number = place[record.restores]
        elif record.kind in SAME_ROWS:
            number -= 1
        else:
            break
    return versions
