"""A run of the store: started, found again after a crash, and told apart from those that were published."""

import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry, read_entries, read_finished
from embedder.store.layout import (
    Kind,
    RunInfo,
    StoreInfo,
    read_current,
    read_record,
    run_file,
    utc_now,
    write_record,
)

STOP_FILE = "STOP"
STOP_SEEN_AFTER_S = 2.0  # asked before each item, which in a bucket would be a request an item
REPORT_FILE = "report.json"
RUN_FILE = "run.json"
OPERATIONS: tuple[Kind, ...] = ("rollback", "compaction", "purge", "migration", "index")
"""Runs that embed nothing."""

_TIME_FORMAT = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True)
class Run:
    """One run, and the session (process) that works on it now."""

    files: StoreFiles
    info: RunInfo
    session: str

    @property
    def run_id(self) -> str:
        """Names the run's folder and its part files; sorts by time."""
        return self.info.run_id

    def entries(self) -> list[JournalEntry]:
        """What is finished so far, by this session and by those before it."""
        return read_entries(self.files, self.run_id)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the store over; known in the process that holds the lock only."""
        return self.files.lease is not None and self.files.lease.lost

    def request_stop(self) -> None:
        """Ask this session's tasks, on whichever machine, to take no further items."""
        self.files.write(run_file(self.run_id, f"{STOP_FILE}-{self.session}"), b"")

    def stop_requested(self) -> bool:
        """Whether somebody asked for that; in a bucket it takes a moment to be seen."""
        path = run_file(self.run_id, f"{STOP_FILE}-{self.session}")
        return self.is_lost or self.files.exists(path, max_age_s=STOP_SEEN_AFTER_S)


def start_run(files: StoreFiles, info: StoreInfo, carryover: pa.Schema) -> Run:
    """Go on with the unfinished run that makes the same rows (model, preprocessing, carried columns), or start one."""
    last = resumable_run(files, info, carryover)
    if last is not None:
        return Run(files, last, session=_next_session(read_entries(files, last.run_id)))
    run_id, started_at = _new_run(files)
    run_info = RunInfo(run_id=run_id, started_at=started_at, **_makes(info, carryover))
    write_record(files, run_file(run_id, RUN_FILE), run_info)
    return Run(files, run_info, session=_next_session([]))


def next_session(run: Run) -> Run:
    """The same run, its next session: what it has written so far counts as finished before."""
    return replace(run, session=_next_session(run.entries()))


def resumable_run(files: StoreFiles, info: StoreInfo, carryover: pa.Schema) -> RunInfo | None:
    """The last run, if it is not finished and makes the same rows."""
    last, makes = last_run(files), _makes(info, carryover)
    if last is None or last.kind in OPERATIONS or is_published(files, last):
        return None
    return last if last.model_dump(include=set(makes)) == makes else None


def _makes(info: StoreInfo, carryover: pa.Schema) -> dict[str, Any]:
    """What the rows of a run depend on, beside the items."""
    return {
        "model_fingerprint": info.model_fingerprint,
        "preprocess_fingerprint": info.preprocess_fingerprint,
        "carryover": {column.name: str(column.type) for column in carryover},
    }


def begin_operation(files: StoreFiles, kind: Kind, info: StoreInfo) -> RunInfo:
    """Start a run that embeds nothing: a rollback, a compaction and the like.

    Its id sorts after those of all runs, so those not finished are given up; it is never gone on with itself, as doing
    the operation again makes the same rows.
    """
    run_id, started_at = _new_run(files)
    run_info = RunInfo(
        run_id=run_id,
        started_at=started_at,
        kind=kind,
        model_fingerprint=info.model_fingerprint,
        preprocess_fingerprint=info.preprocess_fingerprint,
    )
    write_record(files, run_file(run_id, RUN_FILE), run_info)
    return run_info


def _new_run(files: StoreFiles) -> tuple[str, datetime]:
    """A run id and its time; ids sort by time, also when the clock was set back."""
    last, current = last_run(files), read_current(files)
    times = [last.started_at if last else None, run_time(current.run_id) if current else None]
    known = [time for time in times if time is not None]
    started_at = max([utc_now(), *(time + timedelta(seconds=1) for time in known)])
    return f"{started_at:{_TIME_FORMAT}}-{secrets.token_hex(2)}", started_at


def run_time(run_id: str) -> datetime | None:
    """When a run began, by its id, to the second; none where the id bears no time."""
    try:
        return datetime.strptime(run_id.partition("-")[0], _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None


def unfinished_runs(files: StoreFiles) -> list[RunInfo]:
    """Runs that embed and have not published, and that a later command may go on with, oldest first."""
    current = read_current(files)
    runs = (run for run in all_runs(files) if run.kind not in OPERATIONS)
    return [run for run in runs if current is None or run.run_id > current.run_id]


def all_runs(files: StoreFiles) -> list[RunInfo]:
    """All runs of the store, oldest first."""
    infos = files.each(lambda path: read_record(files, path, RunInfo), _run_paths(files))
    return [info for info in infos if info is not None]


def last_run(files: StoreFiles) -> RunInfo | None:
    """The newest run, the others unread."""
    return next((read_record(files, path, RunInfo) for path in _run_paths(files)[-1:]), None)


def _run_paths(files: StoreFiles) -> list[str]:
    return sorted(info.path for info in files.list("runs") if info.path.endswith(f"/{RUN_FILE}"))


def is_published(files: StoreFiles, run: RunInfo) -> bool:
    """Whether this run or a later one is what readers see."""
    current = read_current(files)
    return current is not None and current.run_id >= run.run_id


def _next_session(entries: list[JournalEntry]) -> str:
    """Sorts after all earlier sessions; the random end keeps it apart from one that left no entry."""
    number = max((int(entry.name.partition("-")[0]) for entry in entries), default=0) + 1
    return f"{number:04d}-{secrets.token_hex(2)}"


FINISHED = ("size_bytes", "modified", "attempts", "state", "transient")


def finished_items(run: Run) -> pa.Table:
    """Items that earlier sessions of the run finished whole, embedded or rejected: `item_id`, and `FINISHED`."""
    finished = read_finished(run.files, run.entries(), FINISHED)
    whole = finished.records.join(finished.whole, ["item_id", "session"], join_type="left semi")
    return whole.select(["item_id", *FINISHED])
