"""Replacement of CURRENT.json, the last step of a publication; the run's record is written before it, store.json after.

Rollback, compaction, purge and migration share more steps: their own run, one set of files per table, one swap.
Each can be repeated after a crash: a table's commit is the difference between its newest version and the wanted files,
so it also repairs what an unfinished operation left.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.journal.runs import new_run
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
    record_bytes,
    run_file,
    swap_bytes,
    swap_record,
    write_record,
)
from embedder.store.part_file import PartFile, PartKey
from embedder.store.publish.deletions import list_deletion, open_lists
from embedder.store.schema import TABLES
from embedder.store.store_info import MODEL_FIELDS, check_writable, read_published, read_store_info, served_info
from embedder.store.tables.models import MODELS_FOLDER, model_files
from embedder.store.tables.tables import RecordTable

ModelParts = Mapping[str, Mapping[str, Sequence[PartFile]]]
"""Model -> table -> files of its version; the main model has the empty name."""

COUNTS = ("num_items", "num_vectors", "num_rejected")
PROTOCOL_FIELDS = ("deleting", "last_index", "fence")
"""Fields of CURRENT.json with which writers coordinate; records of publications don't have them."""
_INDEX_FILE = re.compile(rf"(?:{MODELS_FOLDER}/(?P<model>[^/]+)/)?index/(?P<number>\d{{6,}})/")


class IndexChoice(Protocol):
    """Chooses the index number of a publication whose tables are committed and whose `index` is a proposal."""

    def __call__(self, candidate: Current, model: str = "", /) -> int | None:
        """Return the number of the index."""


def move_current(files: StoreFiles, current: Current, doomed: Sequence[str] = ()) -> None:
    """Move CURRENT.json to the next state if it is unchanged, through the lock; nothing else does this.

    Fills in the fields of `current` about files to be deleted. `doomed` are further files to delete, relative to the
    store: no state refers to them from now on, and `delete_listed` may follow. Raises LeaseLostError, with nothing
    changed, if another run has taken over the store.
    """
    before = read_current(files)
    deleting = open_lists(files, before.deleting) if before is not None else ()
    last_index = dict(before.last_index) if before is not None else {}
    for path in doomed:
        if (found := _INDEX_FILE.match(path)) is not None:
            model = found["model"] or ""
            last_index[model] = max(int(found["number"]), last_index.get(model, 0))
    update = {"deleting": (*deleting, *list_deletion(files, doomed)), "last_index": last_index}
    data = record_bytes(current.model_copy(update=update))
    if files.main.lease is None:
        swap_bytes(files.main, CURRENT_FILE, lambda before: data)
    else:
        files.main.lease.swap_current(data)


def publish_current(
    files: StoreFiles, current: Current, kind: Kind, *, ends_hold: bool = False, doomed: Sequence[str] = ()
) -> Published:
    """Make `current` what readers see.

    Its record is written into the run's folder before readers see it, so that history has no gap. After a crash between
    CURRENT.json and store.json the next writer updates store.json; readers use CURRENT.json.

    Args:
        files: the store, held by the write lock.
        current: versions that are committed, and their model.
        kind: kind of the run that publishes.
        ends_hold: whether `current` includes everything still wanted of what a rollback had removed.
        doomed: files, relative to the store, to which nothing refers from then on.

    Returns:
        The record, with the row counts of the tables.

    Raises:
        LeaseLostError: another run has taken the store over; nothing changes for readers.
    """
    before = read_current(files)
    if before is not None:
        previous = before.run_id if before.run_id != current.run_id else before.previous
        hold = None if ends_hold else current.hold or _hold_after(before.hold, kind, files.environment.now())
        current = current.model_copy(update={"previous": previous, "hold": hold})
    last = None if before is None else read_record(files, run_file(before.run_id, PUBLISHED_FILE), Published)
    fields = current.model_dump(exclude={"hold", *PROTOCOL_FIELDS}) | _count_since(files, current, last)
    record = Published(**fields, kind=kind, model_counts=_count_models(files, current, last))
    write_record(files, run_file(current.run_id, PUBLISHED_FILE), record)
    move_current(files, current, doomed)
    swap_record(files, STORE_FILE, StoreInfo, lambda info: None if info is None else served_info(info, current))
    return record


def _hold_after(hold: Hold | None, kind: Kind, now: datetime) -> Hold | None:
    """Return the hold after a publication: a (forced) embed or refresh releases it; other kinds change no rows."""
    if hold is None or hold.released_at is not None or kind not in ("embed", "refresh"):
        return hold
    return hold.model_copy(update={"released_at": now})


def swap_index(files: StoreFiles, number: int) -> None:
    """Give the current publication, or the model of a view, another index; its record keeps the earlier number."""
    current, own = read_current(files.main), read_current(files)
    if current is None or own is None:
        return
    record = record_of(read_record(files.main, run_file(current.run_id, PUBLISHED_FILE), Published), files.model)
    if record is not None:
        replaced = {own.index: files.environment.now()} if own.index is not None else {}
        past = {each: when for each, when in (record.past_indexes | replaced).items() if each != number}
        update_record(files, current.run_id, {"index": number, "past_indexes": past})
    swapped = own.model_copy(update={"index": number})
    if files.model:
        swapped = current.model_copy(update={"models": current.models | {files.model: swapped}})
    move_current(files.main, swapped)


def record_of(record: Published | None, model: str) -> Published | None:
    """Return one model's record in a publication, under the whole's run; None if the model isn't part of it.

    An empty name means the main model, whose record is the whole.
    """
    own = None if record is None else record.models.get(model)
    if record is None or not model or own is None:
        return None if model else record
    whole = record.model_dump(include={"run_id", "published_at", "kind", "previous", "restores", "interim_of"})
    fields = own.model_dump(exclude={"hold", "models"}) | whole | dict.fromkeys(COUNTS, 0)
    past = {"past_indexes": record.past_model_indexes.get(model, {})}
    return Published(**fields | record.model_counts.get(model, {}) | past)


def update_record(files: StoreFiles, run_id: str, fields: Mapping[str, Any]) -> None:
    """Change `index`, `past_indexes` or row counts in a publication's record, or in that of the model of a view."""
    path = run_file(run_id, PUBLISHED_FILE)
    swap_record(files.main, path, Published, lambda record: record and _with_fields(record, files.model, fields))


def _with_fields(record: Published, model: str, fields: Mapping[str, Any]) -> Published:
    if not model:
        return record.model_copy(update=dict(fields))
    changes: dict[str, Any] = {}
    if "index" in fields and model in record.models:
        own = record.models[model].model_copy(update={"index": fields["index"]})
        changes["models"] = record.models | {model: own}
    if "past_indexes" in fields:
        changes["past_model_indexes"] = record.past_model_indexes | {model: fields["past_indexes"]}
    if counts := {name: fields[name] for name in (*COUNTS, "num_pictures") if name in fields}:
        changes["model_counts"] = record.model_counts | {model: record.model_counts.get(model, {}) | counts}
    return record.model_copy(update=changes)


def count_rows(files: StoreFiles, version: Current, states: dict[PartKey, Counter[str]]) -> dict[str, int]:
    """Count the rows of a publication's tables; `states` caches item states by `PartFile.key` and is updated."""
    items = RecordTable(files, "items", version.items)
    total = Counter[str]()
    for part in items.parts():
        if part.key not in states:
            states[part.key] = count_states(items, part)
        total.update(states[part.key])
    return _count_vectors(files, version) | {
        "num_items": total.total() - total["left_out"],
        "num_rejected": total["rejected"],
    }


def _count_vectors(files: StoreFiles, version: Current) -> dict[str, int]:
    """Count embeddings and, unless a file of an earlier release lacks this figure, those of pictures."""
    parts = RecordTable(files, "embeddings", version.embeddings).parts()
    pictures = [part.num_pictures for part in parts]
    counts = {"num_vectors": sum(part.num_rows for part in parts)}
    return counts if None in pictures else counts | {"num_pictures": sum(number or 0 for number in pictures)}


def writable(files: StoreFiles) -> Current:
    """Return what is published, or raise StoreError if there is no store, no publication, or an older format."""
    check_writable(files, read_store_info(files))
    return read_published(files)


def versions_of(files: StoreFiles, version: Current) -> dict[str, tuple[StoreFiles, Current]]:
    """Return files and version of each model of a publication, by name; the main one is first and has the empty name.

    A model's view has only its own publication.
    """
    further = {name: (model_files(files, name), own) for name, own in sorted(version.models.items())}
    return {"": (files, version), **further}


def of_model(version: Current, model: str) -> Current | None:
    """Return a model's part of a publication; the empty name means the main model and returns the whole."""
    return version.models.get(model) if model else version


def model_folder(model: str) -> str:
    """Return the path prefix of a model's files in the store; empty for the main one."""
    return f"{MODELS_FOLDER}/{model}/" if model else ""


def _count_models(files: StoreFiles, current: Current, last: Published | None) -> dict[str, dict[str, int]]:
    """Return the row counts of the other models; an unchanged model's counts come from the last record."""
    counts = {}
    for name, own in current.models.items():
        record = record_of(last, name)
        if last is not None and record is not None and name in last.model_counts:
            is_same = (record.items, record.embeddings) == (own.items, own.embeddings)
            known = last.model_counts[name]
            counts[name] = known if is_same else _count_since(model_files(files, name), own, record)
        else:
            counts[name] = count_rows(model_files(files, name), own, {})
    return counts


def _count_since(files: StoreFiles, version: Current, last: Published | None) -> dict[str, int]:
    """Return a publication's row counts, derived from the last record by reading only the files that differ.

    If as many files differ as there are, all are counted again. `last` is that model's part of the record before, or
    None.
    """
    if last is None:
        return count_rows(files, version, {})
    items, before = (RecordTable(files, "items", each.items) for each in (version, last))
    held, was = ({part.key: part for part in each.parts()} for each in (items, before))
    added, gone = ([part for key, part in one.items() if key not in two] for one, two in ((held, was), (was, held)))
    if len(added) + len(gone) >= len(held):
        return count_rows(files, version, {})
    change = Counter[str]()
    for part in added:
        change.update(count_states(items, part))
    for part in gone:
        change.subtract(count_states(before, part))
    return _count_vectors(files, version) | {
        "num_items": last.num_items + change.total() - change["left_out"],
        "num_rejected": last.num_rejected + change["rejected"],
    }


def count_states(items: RecordTable, part: PartFile) -> Counter[str]:
    """Count the items of a part file by state, from its statistics if possible, else by reading it."""
    if part.state is not None:
        return Counter({part.state: part.num_rows})
    counts = pc.value_counts(items.read(["state"], [part.path])["state"]).to_pylist()
    return Counter({each["values"]: each["counts"] for each in counts})


def parts_at(files: StoreFiles, version: Current) -> dict[str, dict[str, list[PartFile]]]:
    """Return the part files of a publication, by model and table."""
    return {
        model: {name: RecordTable(view, name, getattr(own, name)).parts() for name in TABLES}
        for model, (view, own) in versions_of(files, version).items()
    }


def begin(files: StoreFiles, kind: Kind, version: Current | None) -> RunInfo:
    """Start a run that embeds nothing and will publish a successor of `version`, whose model it keeps.

    None means the model of the store. The run's id sorts after all others, so unfinished runs are abandoned. It is
    never resumed itself, as repeating the operation makes the same rows.
    """
    return new_run(files, served_info(read_store_info(files), version), pa.schema([]), kind)


def publish_files(
    files: StoreFiles, run: RunInfo, like: Current, wanted: ModelParts, choose_index: IndexChoice, **fields: Any
) -> Published:
    """Commit the wanted files of all models and make them visible to readers.

    `like` is the publication whose models, R@k and indexes are kept. `wanted` lists, by model and table, all files of
    the new version; they exist. `choose_index` is called between the commits and CURRENT.json, for each model with
    vectors. `fields` are further fields of CURRENT.json.
    """
    info = served_info(read_store_info(files), like)
    candidates, now, last = {}, files.environment.now(), read_current(files)
    medium = info.medium_columns  # of `like`; a table keeps the columns that came after it
    medium += tuple(name for name in (last.medium_columns if last is not None else ()) if name not in medium)
    for model, (view, own) in versions_of(files, like).items():
        versions = {name: RecordTable(view, name).commit_files(run.run_id, wanted[model][name]) for name in TABLES}
        fresh = {"run_id": run.run_id, "published_at": now, "interim_of": None}
        candidates[model] = own.model_copy(update=versions | fresh)
    candidate = Current(
        run_id=run.run_id,
        items=candidates[""].items,
        embeddings=candidates[""].embeddings,
        index=like.index,
        published_at=now,
        **{name: getattr(info, name) for name in MODEL_FIELDS} | {"medium_columns": medium} | fields,
        retrieval=like.retrieval,
    )
    candidate = candidate.model_copy(update={"index": choose_index(candidate)})
    models = {
        name: own.model_copy(update={"index": None if own.has_vectors is False else choose_index(own, name)})
        for name, own in candidates.items()
        if name
    }
    return publish_current(files, candidate.model_copy(update={"models": models}), run.kind)
