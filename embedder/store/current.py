"""Replacement of CURRENT.json, the last step of every publication; the run's record precedes it, store.json follows.

Rollback, compaction, purge and migration share more steps: a run of their own, one set of files per table, one swap.
Each can be repeated after a crash: a table's commit is the difference between its newest version and the wanted files,
so that it also repairs what an unfinished operation left.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.journal import PartFile
from embedder.store.layout import (
    CURRENT_FILE,
    PUBLISHED_FILE,
    STORE_FILE,
    Current,
    Hold,
    Kind,
    Published,
    RunInfo,
    StoreInfo,
    read_current,
    read_record,
    run_file,
    utc_now,
    write_record,
)
from embedder.store.runs import new_run
from embedder.store.schema import TABLES
from embedder.store.store_info import MODEL_FIELDS, check_writable, published, read_store_info, served_info
from embedder.store.tables import RecordTable

IndexChoice = Callable[[Current], int | None]
"""Function from a publication whose tables are committed, with a proposed `index`, to the number of its index."""


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
    fields = current.model_dump(exclude={"hold"}) | count_rows(files, current, {})
    record = Published(**fields, kind=kind)
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
    items = RecordTable(files, "items", version.items)
    paths = items.paths()
    for path in paths:
        if path not in states:
            counts = pc.value_counts(items.read(["state"], [path])["state"]).to_pylist()
            states[path] = Counter({each["values"]: each["counts"] for each in counts})
    total = sum((states[path] for path in paths), Counter[str]())
    return {
        "num_items": total.total() - total["left_out"],
        "num_vectors": RecordTable(files, "embeddings", version.embeddings).num_rows(),
        "num_rejected": total["rejected"],
    }


def writable(files: StoreFiles) -> Current:
    """Read what is published, and check that the store may be written to.

    Raises:
        StoreError: there is no store, nothing is published, or the store is of an older format.
    """
    check_writable(files, read_store_info(files))
    return published(files)


def parts_at(files: StoreFiles, version: Current) -> dict[str, list[PartFile]]:
    """Part files of a publication, by table."""
    return {name: RecordTable(files, name, getattr(version, name)).parts() for name in TABLES}


def begin(files: StoreFiles, kind: Kind, version: Current | None) -> RunInfo:
    """Start a run that embeds nothing, and will publish a successor of some version.

    Its id sorts after those of all runs, so unfinished ones are abandoned; it is never resumed itself, as repeating the
    operation makes the same rows.

    Args:
        files: the store, held by the write lock.
        kind: kind of the operation.
        version: the publication whose model it keeps; None: the model of the store.
    """
    return new_run(files, served_info(read_store_info(files), version), pa.schema([]), kind)


def publish_files(
    files: StoreFiles,
    run: RunInfo,
    like: Current,
    wanted: Mapping[str, Sequence[PartFile]],
    choose_index: IndexChoice,
    **fields: Any,
) -> Published:
    """Commit the wanted files and make them visible to readers.

    Args:
        files: the store, held by the write lock.
        run: the operation.
        like: the publication whose model, R@k and index the new one keeps.
        wanted: by table, the complete list of files of the new version; they exist.
        choose_index: called between the commits and CURRENT.json.
        fields: further fields of CURRENT.json.

    Returns:
        The new publication.
    """
    versions = {name: RecordTable(files, name).commit_files(run.run_id, wanted[name]) for name in TABLES}
    info = served_info(read_store_info(files), like)
    candidate = Current(
        run_id=run.run_id,
        items=versions["items"],
        embeddings=versions["embeddings"],
        index=like.index,
        published_at=utc_now(),
        **{name: getattr(info, name) for name in MODEL_FIELDS},
        retrieval=like.retrieval,
        **fields,
    )
    candidate = candidate.model_copy(update={"index": choose_index(candidate)})
    return publish_current(files, candidate, run.kind)
