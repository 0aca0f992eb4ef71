"""Rejected items of a publication or of one run, and the counts of their reasons."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.quantities import plural
from embedder.storage.printable import printable
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import hash_rows, of_whole, read_finished
from embedder.store.journal.journal import JournalEntry, read_entries, stream_keys
from embedder.store.journal.runs import RUN_FILE, is_published, unfinished_runs
from embedder.store.layout import MAIN, Current, RunInfo, read_current, read_record, run_file
from embedder.store.publish.history import check_readable, publications
from embedder.store.publish.interim import interim_state
from embedder.store.schema import ITEMS, with_nulls
from embedder.store.store_info import read_published, read_store_info
from embedder.store.tables.models import find_model, model_files, model_folders
from embedder.store.tables.tables import RecordTable

MAX_REASONS = 3  # in one line
MAX_ID_CHARACTERS = 80
MAX_ERROR_CHARACTERS = 120


@dataclass(frozen=True)
class Pending:
    """Unpublished run that is newer than the publication; it may still be at work."""

    run_id: str
    num_rejects: int


@dataclass(frozen=True)
class Rejects:
    """Rejected items (rows of `items`), and their run.

    `run_id` is the run that published them or whose journal has them; `is_published` is whether readers see it or a
    later one. `pending` is, for rejects of the publication, a newer run with its own rejects.
    """

    items: pa.Table
    run_id: str
    is_published: bool
    pending: Pending | None = None


def rejecting_model(files: StoreFiles, model: str) -> StoreFiles:
    """Return the view of a model whose rejects are wanted: a published one, or one that a run has begun with.

    An empty name or `main` means the main model. Raises StoreError if there is no store, or no such model.
    """
    read_store_info(files)
    if model in model_folders(files):
        return model_files(files, model)
    current = read_current(files)
    return files if current is None and model in ("", MAIN) else find_model(files, read_published(files), model)[0]


def find_rejects(
    files: StoreFiles, run_id: str | None = None, wanted: Mapping[str, str | bool] | None = None
) -> Rejects:
    """Find the items that could not be embedded, rejected or left out.

    None as `run_id` means the publication, or the newest run before the first publication. `wanted` has values that
    columns of `items` must have. Raises StoreError if there is no such store or run, or no run at all.
    """
    read_store_info(files)
    found = _of_published(files) if run_id is None else _of_run(files, run_id)
    items = found.items
    for column, value in (wanted or {}).items():
        items = items.filter(pc.equal(pc.fill_null(items[column], "" if isinstance(value, str) else False), value))
    return replace(found, items=items)


def _of_published(files: StoreFiles) -> Rejects:
    pending = next(reversed(unfinished_runs(files)), None)
    if read_current(files) is None and pending is not None:
        return _of_run(files, pending.run_id)
    current = read_published(files)
    num_pending = 0
    if pending:
        published = interim_state(files, pending.run_id).names
        entries = read_entries(files, pending.run_id)
        num_pending = rejects_in(files, (entry for entry in entries if entry.name not in published)).num_rows
    return Rejects(
        items=_in_table(files, current),
        run_id=current.run_id,
        is_published=True,
        pending=Pending(pending.run_id, num_pending) if pending and num_pending else None,
    )


def _in_table(files: StoreFiles, version: Current) -> pa.Table:
    table = RecordTable(files, "items", version.items)
    parts = [part for part in table.parts() if part.state != "embedded"]
    tables = [_not_embedded(table.read(paths=[part.path])) for part in parts]
    return pa.concat_tables(tables) if tables else ITEMS.empty_table()


def _of_run(files: StoreFiles, run_id: str) -> Rejects:
    for record in publications(files):
        if record.run_id == run_id:  # its part files may have been rewritten since it was journaled
            check_readable(files, record)
            items = _in_table(files, record)
            is_own = pc.equal(items["run_id"], record.interim_of or run_id)
            return Rejects(items.filter(is_own), run_id, is_published=True)
    info = read_record(files, run_file(run_id, RUN_FILE), RunInfo)
    if info is None:
        raise StoreError(
            f"store {files.address}: no run {run_id}; the folders in {files.uri('runs')} name those that there are"
        )
    return Rejects(_in_journal(files, read_entries(files, run_id)), run_id, is_published(files, info))


def rejects_in(files: StoreFiles, entries: Iterable[JournalEntry]) -> pa.Table:
    """Return a run's rejects from its journal, without items that a later session embedded."""
    entries = list(entries)
    if not any(entry.num_rejects for entry in entries):
        return ITEMS.empty_table()
    items = _in_journal(files, entries)
    return items.filter(pc.equal(items["state"], "rejected"))


def _in_journal(files: StoreFiles, entries: Iterable[JournalEntry]) -> pa.Table:
    finished = read_finished(files, entries)
    found = (_not_embedded(each, "session") for each in stream_keys(files, finished.files, "items", ITEMS.names))
    records = hash_rows(found, pa.schema([*ITEMS, ("session", pa.string())]))
    whole = of_whole(records, finished.whole)
    return pa.concat_tables([each.select(ITEMS.names) for each in whole]).sort_by("item_id")


def _not_embedded(items: pa.Table, *further: str) -> pa.Table:
    """Return rejected and left-out items with all columns and `further` ones; older formats give nulls."""
    items = with_nulls(items, ITEMS)
    return items.filter(pc.not_equal(items["state"], "embedded")).select([*ITEMS.names, *further])


def describe_reasons(rejects: pa.Table) -> str:
    """Describe the most frequent reasons in one bounded line, each with its first item by id, and the rest's number."""
    names = ("step", "error_type", "item_id", "error")
    facts = pa.table({name: pc.fill_null(rejects[name], "") for name in names}).sort_by("item_id")
    # One thread: otherwise "first" is not the first row.
    groups = facts.group_by(["step", "error_type"], use_threads=False).aggregate(
        [("item_id", "count"), ("item_id", "first"), ("error", "first")]
    )
    order = [("item_id_count", "descending"), ("step", "ascending"), ("error_type", "ascending")]
    reasons = groups.sort_by(order).to_pylist()
    parts = []
    for reason in reasons[:MAX_REASONS]:
        item_id = printable(reason["item_id_first"], MAX_ID_CHARACTERS)
        error = printable(reason["error_first"], MAX_ERROR_CHARACTERS)
        parts.append(f"{reason['item_id_count']:,} x {reason['step']} {reason['error_type']} (as {item_id}: {error})")
    if others := reasons[MAX_REASONS:]:
        parts.append(f"{sum(reason['item_id_count'] for reason in others):,} for {plural(len(others), 'other reason')}")
    return ", ".join(parts)
