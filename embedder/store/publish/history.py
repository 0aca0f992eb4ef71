"""History of a store: its publications from first to last, and which can be read."""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from embedder.errors import StoreError
from embedder.store.files import NUM_RECORD_READERS, StoreFiles
from embedder.store.journal.runs import all_runs, run_time
from embedder.store.layout import PUBLISHED_FILE, RUNS_FOLDER, Current, Published, read_current, read_record, run_file
from embedder.store.publish.current import model_folder, record_of, versions_of
from embedder.store.publish.deletions import listed_files
from embedder.store.schema import TABLES
from embedder.store.tables.delta_log import replay
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)

_PART = re.compile(r"part-(?P<run_id>\d{8}T\d{6}Z-[0-9a-f]+)-.*\.(?:parquet|bin)")
SAME_ROWS = ("compaction", "migration", "index", "purge")
"""Kinds of publication with the same rows as the one before; a purge also removes its items from that one."""


@dataclass(frozen=True)
class PastRun:
    """Run in the history; little is known of runs older than the records.

    `record` is its publication, None if it left no record. `is_current` is whether readers see it now, `can_be_read`
    whether all files of its version exist.
    """

    run_id: str
    started_at: datetime | None
    record: Published | None
    is_current: bool
    can_be_read: bool


def publications(files: StoreFiles) -> list[Published]:
    """Return the records of all publications, oldest first, without runs killed before they replaced CURRENT.json.

    For a model's view, returns its part of the records that have one.
    """
    current = read_current(files.main)
    if current is None:
        return []
    main, run_ids = files.main, files.main.folders(RUNS_FOLDER)
    records = main.each(lambda run_id: _record(main, run_id), run_ids, NUM_RECORD_READERS)
    chain = published_chain(current.run_id, [record for record in records if record is not None])
    return [own for record in chain if (own := record_of(record, files.model)) is not None]


def latest_publications(files: StoreFiles) -> Iterator[Published]:
    """Yield the records of all publications, newest first, each read on demand: for callers that need the last few."""
    current = read_current(files.main)
    run_id, seen = None if current is None else current.run_id, set[str]()
    while run_id is not None and run_id not in seen and (record := _record(files.main, run_id)) is not None:
        seen.add(run_id)
        if (own := record_of(record, files.model)) is not None:
            yield own
        run_id = record.previous


def _record(files: StoreFiles, run_id: str) -> Published | None:
    return read_record(files, run_file(run_id, PUBLISHED_FILE), Published)


def published_chain(current_id: str, records: Iterable[Published]) -> list[Published]:
    """Follow the records back from the current one, each to the one that it replaced.

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
    """Return one publication; StoreError if the store never published that run, or kept no record of it."""
    for record in publications(files):
        if record.run_id == run_id:
            return record
    raise StoreError(
        f"store {files.address}: no run {run_id} among what it published; `embedder history --store {files.address}` "
        "lists the runs that can be read"
    )


def check_readable(files: StoreFiles, version: Current) -> None:
    """Raise StoreError if some of the publication's files were deleted."""
    if version.run_id not in readable(files, [version]):
        raise StoreError(
            f"store {files.address}: version {version.run_id} can't be read any more: vacuum or purge took files "
            f"of it; `embedder history --store {files.address}` lists the versions that can"
        )


def readable(files: StoreFiles, versions: Iterable[Current], without: Iterable[str] = ()) -> set[str]:
    """Return the run ids of publications whose part files, of all models, exist."""
    asked = {version.run_id: versions_of(files, version) for version in versions}
    wanted: dict[tuple[str, str], set[int]] = {}
    views: dict[str, StoreFiles] = {}
    for models in asked.values():
        for model, (view, own) in models.items():
            views[model] = view
            for name in TABLES:
                wanted.setdefault((model, name), set()).add(getattr(own, name))
    gone = {*without, *listed_files(files.main, read_current(files.main))}
    whole = {
        (model, name): _list_readable(views[model], name, numbers, gone, model_folder(model))
        for (model, name), numbers in wanted.items()
    }
    return {
        run_id
        for run_id, models in asked.items()
        if all(getattr(own, name) in whole[model, name] for model, (_, own) in models.items() for name in TABLES)
    }


def part_files(files: StoreFiles, name: str) -> dict[str, int]:
    """Return all part files and files of deletion vectors of a table, needed or not: path below its folder -> bytes."""
    return {
        info.path.removeprefix(f"{name}/"): info.size_bytes
        for info in files.list(name)
        if info.path.endswith((".parquet", ".bin")) and "/_delta_log/" not in info.path
    }


def run_of(name: str) -> str:
    """Return the run id in the name of a part file or of one of deletion vectors; empty if there is none."""
    found = _PART.fullmatch(name)
    return found["run_id"] if found is not None else ""


def _list_readable(files: StoreFiles, name: str, numbers: set[int], gone: set[str], folder: str) -> set[int]:
    """Return the readable versions of a table; `folder` is its place in the store whose `gone` files are missing."""
    there = {path for path in part_files(files, name) if f"{folder}{name}/{path}" not in gone}
    never = {number for number in numbers if number < 0}  # nothing was ever committed to the table
    versions = replay(files, name, numbers - never, without=there)
    if versions is None:
        return never | {number for number in numbers - never if _is_whole(files, name, number, there)}
    return never | {number for number, lacking in versions if not lacking}


def _is_whole(files: StoreFiles, name: str, number: int, there: set[str]) -> bool:
    try:
        return there.issuperset(RecordTable(files, name, number).needed_files())
    except StoreError:  # its log entries are gone
        return False


def past_runs(files: StoreFiles) -> list[PastRun]:
    """Return all publications, oldest first, and runs older than the records; StoreError on a bad record."""
    current = read_current(files)
    if current is None:
        return []
    records = {record.run_id: record for record in publications(files)}
    started = {info.run_id: info.started_at for info in all_runs(files)}
    first = next(iter(records), None)  # older ones have no record, and some of them may have failed
    older = [run_id for run_id in sorted(started) if (run_id <= current.run_id if first is None else run_id < first)]
    whole = readable(files, records.values() or [current])
    return [
        PastRun(
            run_id=run_id,
            started_at=started.get(run_id) or run_time(run_id),
            record=records.get(run_id),
            is_current=run_id == current.run_id,
            can_be_read=run_id in whole,
        )
        for run_id in [*older, *records]
    ]


def one_before(history: list[Published]) -> Published | None:
    """Return the default target of a rollback: the last publication with other rows.

    Compactions and the like change no row and are skipped, as are interim publications of the run that is left. A
    rollback counts as its target: rolling back twice goes back by two.
    """
    place = {record.run_id: number for number, record in enumerate(history)}
    number = len(history) - 1
    while number >= 0 and (history[number].kind in SAME_ROWS or history[number].restores in place):
        restored = history[number].restores
        number = place[restored] if restored in place else number - 1
    left = history[number].interim_of or history[number].run_id
    while number > 0 and history[number - 1].interim_of == left:
        number -= 1
    return history[number - 1] if number > 0 else None


def same_rows(latest: Iterable[Published]) -> set[int]:
    """Return the versions of embeddings with the published rows; `latest` is newest first and read lazily."""
    versions: set[int] = set()
    restored = None
    for record in latest:
        if restored is not None and record.run_id != restored:
            continue
        versions.add(record.embeddings)
        restored = record.restores
        if restored is None and record.kind not in SAME_ROWS:
            break
    return versions
