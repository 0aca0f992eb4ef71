"""Runs of a store: their start, resumption after a crash, and which are published."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from embedder.storage.hashed_rows import HashedRows
from embedder.store.backends import WriteConflictError
from embedder.store.files import NUM_RECORD_READERS, StoreFiles
from embedder.store.journal.finished import hash_rows, of_whole, read_finished
from embedder.store.journal.journal import JournalEntry, read_entries
from embedder.store.journal.journal_segments import names_in_journal
from embedder.store.layout import (
    RUNS_FOLDER,
    Kind,
    RunInfo,
    StoreInfo,
    create_record,
    parse_record,
    read_current,
    read_record,
    record_bytes,
    run_file,
    swap_record,
)
from embedder.store.schema import ITEMS

STOP_FILE = "STOP"
STOP_SEEN_AFTER_S = 2.0  # checked before each item, which in a bucket would be a request per item
REPORT_FILE = "report.json"
RUN_FILE = "run.json"
OPERATIONS: tuple[Kind, ...] = ("rollback", "compaction", "purge", "migration", "index")
"""Kinds of runs that embed nothing."""

_TIME_FORMAT = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True)
class Run:
    """Run, and the session (process) that now works on it."""

    files: StoreFiles
    info: RunInfo
    session: str

    @property
    def run_id(self) -> str:
        """Id of the run, used in its folder's and part files' names; sorts by time."""
        return self.info.run_id

    def entries(self) -> list[JournalEntry]:
        """Read the work finished so far, by this session and earlier ones, without its figures."""
        return read_entries(self.files, self.run_id)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over the store; known only in the process that holds the lock."""
        lease = self.files.main.lease
        return lease is not None and lease.lost

    def request_stop(self) -> None:
        """Ask this session's tasks, on all machines, to start no further items."""
        self.files.write(run_file(self.run_id, f"{STOP_FILE}-{self.session}"), b"")

    def stop_requested(self) -> bool:
        """Return whether a stop was requested; in a bucket it takes a moment to be seen."""
        path = run_file(self.run_id, f"{STOP_FILE}-{self.session}")
        return self.is_lost or self.files.exists(path, max_age_s=STOP_SEEN_AFTER_S)


def start_run(
    files: StoreFiles, info: StoreInfo, carryover: pa.Schema, models: Sequence[tuple[StoreFiles, StoreInfo]] = ()
) -> Run:
    """Resume the unfinished run with the same models, preprocessing and carried columns, or start one.

    The caller holds the write lock. Each of `models`, views of models besides the main one, gets a record of the same
    run.
    """
    found = resumable_run(files, info, carryover, models)
    run_info = found if found is not None else new_run(files, info, carryover)
    views = [Run(view, begin_model_run(view, run_info, own), session="") for view, own in models]
    everywhere = (files, *(own.files for own in views))
    names = set[str]().union(*(names_in_journal(each, run_info.run_id) for each in everywhere))
    return _begin_session(Run(files, run_info, session=""), names)


def _begin_session(run: Run, names: Iterable[str]) -> Run:
    """Begin the next session of a run and record this: if several sessions embedded an item, the last one counts."""
    number = max((int(name.partition("-")[0]) for name in names), default=0)
    token = run.files.environment.token(4)

    def adopt(found: RunInfo | None) -> RunInfo:
        info = found or run.info
        last = max(number, int(info.session.partition("-")[0] or 0))
        return info.model_copy(update={"session": f"{last + 1:04d}-{token}", "is_withdrawn": False})

    info = swap_record(run.files, run_file(run.run_id, RUN_FILE), RunInfo, adopt)
    return Run(run.files, info, info.session) if info is not None else run


def withdraw_run(files: StoreFiles, run_id: str) -> bool:
    """Keep later commands from resuming a run, so that its files may be deleted.

    Returns whether no other command has resumed it. Raises LeaseLostError if another run has taken over the store.
    """
    path = run_file(run_id, RUN_FILE)
    found, tag = files.read_tagged(path)
    files.confirm_lease()  # after reading: whoever resumes the run from now on changes its record
    info = parse_record(files, path, found, RunInfo)
    try:
        files.replace(path, record_bytes(info.model_copy(update={"is_withdrawn": True})), tag)
    except WriteConflictError:
        return False
    return True


def begin_model_run(view: StoreFiles, main: RunInfo, info: StoreInfo) -> RunInfo:
    """Write the record of a run in a model's folder, unless it exists."""
    own = main.model_copy(update=_row_settings(info, pa.schema([])))
    create_record(view, run_file(main.run_id, RUN_FILE), own)
    return own


def next_session(run: Run) -> Run:
    """Begin the next session of the same run; its work so far counts as finished before."""
    return _begin_session(run, names_in_journal(run.files, run.run_id))


def resumable_run(
    files: StoreFiles, info: StoreInfo, carryover: pa.Schema, models: Sequence[tuple[StoreFiles, StoreInfo]] = ()
) -> RunInfo | None:
    """Return the last run if it is unfinished and has the same settings.

    Models that the run doesn't know yet may join it; `models` are views of models besides the main one.
    """
    last = last_run(files)
    if last is None or last.kind in OPERATIONS or last.is_withdrawn or is_published(files, last):
        return None
    if not _has_settings(last, info, carryover):
        return None
    for view, own in models:
        begun = read_record(view, run_file(last.run_id, RUN_FILE), RunInfo)
        if begun is not None and not _has_settings(begun, own, pa.schema([])):
            return None
    return last


def _has_settings(run: RunInfo, info: StoreInfo, carryover: pa.Schema) -> bool:
    settings = _row_settings(info, carryover)
    return run.model_dump(include=set(settings)) == settings and list(run.steps) == list(info.steps)


def _row_settings(info: StoreInfo, carryover: pa.Schema) -> dict[str, Any]:
    """Return the settings that, besides the items, determine a run's rows."""
    return {
        "model_fingerprint": info.model_fingerprint,
        "preprocess_fingerprint": info.preprocess_fingerprint,
        "carryover": {column.name: str(column.type) for column in carryover},
        "steps": info.steps,
        "step_columns": info.step_columns,
    }


def new_run(files: StoreFiles, info: StoreInfo, carryover: pa.Schema, kind: Kind = "embed") -> RunInfo:
    """Write the record of a new run; ids sort by time even if the clock was set back. Needs the write lock."""
    last, current = last_run(files), read_current(files)
    times = [last.started_at if last else None, run_time(current.run_id) if current else None]
    known = [time for time in times if time is not None]
    started_at = max([files.environment.now(), *(time + timedelta(seconds=1) for time in known)])
    settings, is_new = _row_settings(info, carryover), False
    while not is_new:
        # The ids of its interim publications have a 0 here (`embedder.store.publish.interim`), so they sort before it.
        ending = f"{int(files.environment.token(2), 16) % 0xF000 + 0x1000:04x}"
        run_id = f"{started_at:{_TIME_FORMAT}}-{ending}"
        run_info = RunInfo(
            run_id=run_id, started_at=started_at, kind=kind, medium_columns=info.medium_columns, **settings
        )
        files.confirm_lease()
        is_new = create_record(files, run_file(run_id, RUN_FILE), run_info)
    return run_info


def run_time(run_id: str) -> datetime | None:
    """Return a run's start from its id, to the second; None if the id contains no time."""
    try:
        return datetime.strptime(run_id.partition("-")[0], _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None


def unfinished_runs(files: StoreFiles) -> list[RunInfo]:
    """Return unpublished embedding runs that a later command may resume, oldest first."""
    current = read_current(files)
    after = "" if current is None else current.run_id
    return [run for run in all_runs(files, after) if run.kind not in OPERATIONS and not run.is_withdrawn]


def all_runs(files: StoreFiles, after: str = "") -> list[RunInfo]:
    """Read all runs of the store, oldest first."""
    run_ids = [run_id for run_id in files.folders(RUNS_FOLDER) if run_id > after]
    infos = files.each(lambda run_id: _run_info(files, run_id), run_ids, NUM_RECORD_READERS)
    return [info for info in infos if info is not None]


def last_run(files: StoreFiles) -> RunInfo | None:
    """Read only the newest run; folders of interim publications hold no record of a run."""
    found = (_run_info(files, run_id) for run_id in reversed(files.folders(RUNS_FOLDER)))
    return next((info for info in found if info is not None), None)


def _run_info(files: StoreFiles, run_id: str) -> RunInfo | None:
    return read_record(files, run_file(run_id, RUN_FILE), RunInfo)


def is_published(files: StoreFiles, run: RunInfo) -> bool:
    """Return whether readers see this run or a later one."""
    current = read_current(files)
    return current is not None and current.run_id >= run.run_id


FINISHED = ("size_bytes", "modified", "attempts", "state", "transient")
FINISHED_ITEMS = pa.schema([ITEMS.field(name) for name in ("item_id", *FINISHED)])


def finished_items(run: Run) -> HashedRows:
    """Return the items that earlier sessions of the run finished completely, embedded or rejected: `FINISHED_ITEMS`."""
    finished = read_finished(run.files, run.entries(), FINISHED)
    return hash_rows(of_whole(finished.records, finished.whole), FINISHED_ITEMS)
