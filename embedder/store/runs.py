"""A run of the store: started, found again after a crash, and told apart from those that were published."""

import secrets
from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry, read_entries, read_keys, whole_items
from embedder.store.layout import RunInfo, StoreInfo, read_current, read_record, run_file, utc_now, write_record

STOP_FILE = "STOP"
REPORT_FILE = "report.json"


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

    def request_stop(self) -> None:
        """Ask the run's tasks, on whichever machine, to take no further items."""
        self.files.write(run_file(self.run_id, STOP_FILE), b"")

    def stop_requested(self) -> bool:
        """Whether somebody asked for that."""
        return self.files.exists(run_file(self.run_id, STOP_FILE))


def start_run(files: StoreFiles, info: StoreInfo, carryover: pa.Schema) -> Run:
    """Go on with the unfinished run that makes the same rows (model, preprocessing, carried columns), or start one."""
    kind = {
        "model_fingerprint": info.model_fingerprint,
        "preprocess_fingerprint": info.preprocess_fingerprint,
        "carryover": {column.name: str(column.type) for column in carryover},
    }
    runs = all_runs(files)
    last = runs[-1] if runs else None
    if last and last.model_dump(include=set(kind)) == kind and not is_published(files, last):
        files.delete(run_file(last.run_id, STOP_FILE))
        return Run(files, last, session=_next_session(read_entries(files, last.run_id)))
    started_at = utc_now()
    if last:  # run ids sort by time, also when the clock was set back
        started_at = max(started_at, last.started_at + timedelta(seconds=1))
    run_id = f"{started_at:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    run_info = RunInfo(run_id=run_id, started_at=started_at, **kind)
    write_record(files, run_file(run_id, "run.json"), run_info)
    return Run(files, run_info, session=_next_session([]))


def all_runs(files: StoreFiles) -> list[RunInfo]:
    """All runs of the store, oldest first."""
    paths = sorted(info.path for info in files.list("runs") if info.path.endswith("/run.json"))
    infos = (read_record(files, path, RunInfo) for path in paths)
    return [info for info in infos if info is not None]


def is_published(files: StoreFiles, run: RunInfo) -> bool:
    """Whether this run or a later one is what readers see."""
    current = read_current(files)
    return current is not None and current.run_id >= run.run_id


def _next_session(entries: list[JournalEntry]) -> str:
    """Sorts after all earlier sessions; the random end keeps it apart from one that left no entry."""
    number = max((int(entry.name.partition("-")[0]) for entry in entries), default=0) + 1
    return f"{number:04d}-{secrets.token_hex(2)}"


def finished_items(run: Run) -> pa.Table:
    """Items that earlier sessions of the run finished whole: `item_id`, `size_bytes`, `modified`, `attempts`."""
    entries = run.entries()
    facts = ["size_bytes", "modified", "attempts"]
    records = read_keys(run.files, entries, "items", ["item_id", "num_vectors", *facts])
    vectors = read_keys(run.files, entries, "embeddings", ["item_id", "segment"])
    whole = whole_items(records, vectors)
    return records.join(whole, ["item_id", "session"], join_type="left semi").select(["item_id", *facts])
