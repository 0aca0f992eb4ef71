"""The last step of whatever publishes: the run's record, CURRENT.json, and store.json, which follows it."""

from collections import Counter

import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.layout import (
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
from embedder.store.lock import write_current
from embedder.store.store_info import served_info
from embedder.store.tables import RecordTable


def swap_current(files: StoreFiles, current: Current, kind: Kind, *, ends_hold: bool = False) -> Published:
    """Make `current` what readers see.

    Its record stands in the run's folder before readers see it, so that history has no gap. A crash after the swap
    leaves store.json behind; the next writer brings it up to date, and readers take CURRENT.json's word.

    Args:
        files: the store, held by the write lock.
        current: versions that are committed, and whose model they are of.
        kind: what publishes.
        ends_hold: whether all that a rollback had left, and that is still wanted, is in `current`.

    Returns:
        The record, with what the tables hold.

    Raises:
        LeaseLostError: another run has taken the store over; readers see what they saw.
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
    """What is left of a hold: a run that published had to be forced; what else publishes brings no other rows."""
    if hold is None or hold.released_at is not None or kind not in ("embed", "refresh"):
        return hold
    return hold.model_copy(update={"released_at": utc_now()})


def swap_index(files: StoreFiles, number: int) -> None:
    """Give what is published another index; it stays the same publication, and remembers the one it had."""
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
    """Count what the tables of a publication hold; the states of items are read file by file.

    Args:
        files: the store.
        version: the publication.
        states: how many items of each state a part file has, where that is known already; what is read is added.
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
