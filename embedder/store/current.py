"""Replacement of CURRENT.json, the last step of every publication; the run's record precedes it, store.json follows."""

from collections import Counter

import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.layout import (
    CURRENT_FILE,
    PUBLISHED_FILE,
    STORE_FILE,
    Current,
    Hold,
    Kind,
    Published,
    StoreInfo,
    read_current,
    read_record,
    run_file,
    utc_now,
    write_record,
)
from embedder.store.store_info import served_info
from embedder.store.tables import RecordTable


def write_current(files: StoreFiles, current: Current) -> None:
    """Replace CURRENT.json, through the lock where this process holds it.

    Raises:
        LeaseLostError: another run has taken the store over; nothing was changed.
    """
    data = current.model_dump_json(indent=2).encode()
    if files.lease is None:
        files.write(CURRENT_FILE, data)
    else:
        files.lease.swap_current(data)


def publish_current(files: StoreFiles, current: Current, kind: Kind, *, ends_hold: bool = False) -> Published:
    """Make `current` what readers see.

    Its record is written into the run's folder before readers see it, so that history has no gap. After a crash between
    CURRENT.json and store.json the next writer updates store.json; readers use CURRENT.json.

    Args:
        files: the store, held by the write lock.
        current: versions that are committed, and their model.
        kind: kind of the run that publishes.
        ends_hold: whether `current` includes everything still wanted of what a rollback had removed.

    Returns:
        The record, with the row counts of the tables.

    Raises:
        LeaseLostError: another run has taken the store over; nothing changes for readers.
    """
    before = read_current(files)
    if before is not None:
        previous = before.run_id if before.run_id != current.run_id else before.previous
        hold = None if ends_hold else current.hold or _hold_after(before.hold, kind)
        current = current.model_copy(update={"previous": previous, "hold": hold})
    record = Published(**current.model_dump(exclude={"hold"}), kind=kind, **count_rows(files, current, {}))
    files.confirm_lease()
    write_record(files, run_file(current.run_id, PUBLISHED_FILE), record)
    write_current(files, current)
    info = read_record(files, STORE_FILE, StoreInfo)
    if info is not None and (served := served_info(info, current)) != info:
        write_record(files, STORE_FILE, served)
    return record


def _hold_after(hold: Hold | None, kind: Kind) -> Hold | None:
    """Hold after a publication: released by an embed or refresh, which had to be forced; other kinds change no rows."""
    if hold is None or hold.released_at is not None or kind not in ("embed", "refresh"):
        return hold
    return hold.model_copy(update={"released_at": utc_now()})


def swap_index(files: StoreFiles, number: int) -> None:
    """Give the current publication another index; its record keeps the number of the earlier one."""
    current = read_current(files)
    if current is None:
        return
    path = run_file(current.run_id, PUBLISHED_FILE)
    record = read_record(files, path, Published)
    if record is not None:
        replaced = {current.index: utc_now()} if current.index is not None else {}
        past = {each: when for each, when in (record.past_indexes | replaced).items() if each != number}
        write_record(files, path, record.model_copy(update={"index": number, "past_indexes": past}))
    write_current(files, current.model_copy(update={"index": number}))


def count_rows(files: StoreFiles, version: Current, states: dict[str, Counter[str]]) -> dict[str, int]:
    """Count the rows of a publication's tables; the states of items are read file by file.

    Args:
        files: the store.
        version: the publication.
        states: part file -> number of items by state, where known already; results are added.
    """
    items = RecordTable(files, "items", version.items) if version.items >= 0 else None
    embeddings = RecordTable(files, "embeddings", version.embeddings) if version.embeddings >= 0 else None
    paths = items.paths() if items else []
    for path in paths:
        if items and path not in states:
            counts = pc.value_counts(items.read(["state"], [path])["state"]).to_pylist()
            states[path] = Counter({each["values"]: each["counts"] for each in counts})
    total = sum((states[path] for path in paths), Counter[str]())
    return {
        "num_items": total.total() - total["left_out"],
        "num_vectors": embeddings.num_rows() if embeddings else 0,
        "num_rejected": total["rejected"],
    }
