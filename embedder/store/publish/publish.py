"""Publication of a run's finished work: commits of embeddings and items, then CURRENT.json, which makes it visible.

Every step can be repeated: a commit carries its run's id and is made once, and file names follow from their content.
The intent is recorded before the first commit. So a crash between any two steps is repaired by repeating all of them,
whatever has changed in the source or the journal since.
"""

import logging
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import whole_without
from embedder.store.journal.journal import JournalEntry, read_entries
from embedder.store.journal.metadata_updates import moves_file, read_moves
from embedder.store.journal.part_writer import RunMetadata
from embedder.store.journal.runs import Run, is_published, last_run
from embedder.store.layout import (
    STORE_FILE,
    Current,
    Published,
    RunInfo,
    StoreInfo,
    read_current,
    read_record,
    run_file,
    swap_record,
    write_record,
)
from embedder.store.publish.current import model_folder, of_model, publish_current
from embedder.store.publish.deletions import delete_listed
from embedder.store.publish.interim import (
    INTERIM_FILE,
    NO_IDS,
    InterimBatch,
    begin_interim,
    choose_batch,
    interim_state,
    kept_parts,
)
from embedder.store.publish.publication import INTENT_FILE, ModelWork, Publication, PublishIntent, commit_table
from embedder.store.schema import TABLES
from embedder.store.store_info import FURTHER_FIELDS, MODEL_FIELDS
from embedder.store.tables.models import model_files, model_folders
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)

IndexBuilder = Callable[[StoreFiles, int, StoreInfo | None], int | None]
"""Builds the index of an embeddings version that is about to be published, and returns its number.

It takes the model's view, the version, and the model of its vectors (None: the one that is served now).
"""


def no_index(view: StoreFiles, version: int, info: StoreInfo | None) -> None:
    """Build no index."""


def publish(works: Sequence[ModelWork], build_index: IndexBuilder = no_index) -> Published:
    """Commit the finished work of a run's models, make it visible to readers at once, and return its record.

    All tasks of the run have ended. The main model's work comes first. `build_index` is called between the commits and
    CURRENT.json, so that tables and index belong together.
    """
    names = tuple(work.run.files.model for work in works[1:])
    entries = {work.run.files.model: _write_intent(work) for work in works[1:]}
    entries[""] = _write_intent(works[0], models=names)  # last, as it names the others
    run = works[0].run
    return _carry_out(run.files, run.run_id, build_index, entries, run.session)


def _write_intent(work: ModelWork, **fields: Any) -> list[JournalEntry]:
    """Record what is to be published before the first commit; return the journal entries that count."""
    run = work.run
    entries, retired_file = run.entries(), f"retired-{run.session}.parquet"
    fields |= {
        "session": run.session,
        "entries": tuple(entry.name for entry in entries),
        "columns": b64encode(work.metadata.columns.serialize()).decode(),
        "retired": retired_file,
    }
    run.files.write_table(run_file(run.run_id, retired_file), pa.table({"item_id": work.retired}))
    write_record(run.files, run_file(run.run_id, INTENT_FILE), work.intent.model_copy(update=fields))
    return entries


@dataclass(frozen=True)
class InterimWork:
    """Finished work of a model, to be published while its run continues.

    `run` is in the model's view, in the process that holds the write lock. `batch` comes from
    `embedder.store.publish.interim.choose_batch`. By `intent`, nothing leaves the store.
    """

    run: Run
    batch: InterimBatch
    metadata: RunMetadata
    intent: PublishIntent


def publish_interim(parts: Sequence[InterimWork], build_index: IndexBuilder = no_index) -> Published | None:
    """Commit what a run's models have finished so far and make it visible while the run continues.

    The main model comes first and may have nothing new; models without anything new are not in `parts`. `build_index`
    is as in `publish`. Returns None if no id is free before the run's own.
    """
    main = parts[0].run
    own_id = begin_interim(main.files, main.run_id, parts[0].batch.record)
    if own_id is None:
        return None
    works = [_begin_interim(each, own_id) for each in parts]
    before = read_current(main.files)
    models = dict(before.models) if before is not None else {}
    for each, work in zip(parts, works, strict=True):
        models[work.files.model] = _commit_all(work, each.metadata.columns, build_index)
    current = models.pop("").model_copy(update={"models": models})
    doomed = [path for work in works for path in _unneeded_parts(work, current)]
    record = publish_current(main.files, current, parts[0].intent.kind, doomed=doomed)
    delete_listed(main.files)
    return record


def _begin_interim(part: InterimWork, own_id: str) -> Publication:
    run, batch = part.run, part.batch
    if run.files.model:
        write_record(run.files, run_file(own_id, INTERIM_FILE), batch.record)
    moves = read_moves(run.files, run.run_id, batch.entries, batch.whole)
    intent = part.intent.model_copy(update={"session": run.session})
    return Publication(
        run.files, own_id, intent, batch.entries, batch.finished, batch.whole, NO_IDS, moves, interim_of=run.run_id
    )


def finish_publication(files: StoreFiles, build_index: IndexBuilder = no_index) -> Published | None:
    """Complete a publication that was interrupted after its first commit, as it was decided then, and log this.

    Every writer calls this first: later work must not mix with half a publication. The caller holds the write lock.
    `build_index` is as in `publish`. Returns None if nothing was interrupted.
    """
    delete_listed(files)
    last = last_run(files)
    intent = _open_intent(files, last)
    if last is None or intent is None:
        settle(files)
        for name in model_folders(files):
            settle(model_files(files, name))
        return None
    published = _carry_out(files, last.run_id, build_index)
    LOG.info("the last publication was cut off; now it is whole")
    return published


def _open_intent(files: StoreFiles, last: RunInfo | None) -> PublishIntent | None:
    """Return the last run's intent if it has a commit and CURRENT.json doesn't name the run yet."""
    if last is None or is_published(files, last):
        return None
    intent = read_record(files, run_file(last.run_id, INTENT_FILE), PublishIntent)
    views = [files, *(model_files(files, name) for name in (intent.models if intent is not None else ()))]
    is_begun = any(RecordTable(view, name).is_committed(last.run_id) for view in views for name in TABLES)
    return intent if is_begun else None


def _carry_out(
    files: StoreFiles,
    run_id: str,
    build_index: IndexBuilder,
    entries: Mapping[str, list[JournalEntry]] | None = None,
    session: str | None = None,
) -> Published:
    """Carry out a run's intents: all commits, the indexes, then CURRENT.json once.

    `entries` holds journal entries by model that are already known. If `session` is given, the decision must be of that
    session.
    """
    known, before = entries or {}, read_current(files)
    main = _read_decision(files, run_id, known.get(""), session)
    intent, models = main.intent, dict(before.models) if before is not None else {}
    if intent.kept_models is not None:
        models = {name: own for name, own in models.items() if name in intent.kept_models}
    further = (_read_decision(model_files(files, name), run_id, known.get(name), session) for name in intent.models)
    works = [main, *further]
    for work in works:
        models[work.files.model] = _commit_all(work, work.intent.column_schema, build_index)
    current = models.pop("").model_copy(update={"models": models})
    doomed = [path for work in works for path in (*_unneeded_parts(work, current), *_used_moves(work))]
    record = publish_current(files, current, intent.kind, ends_hold=intent.ends_hold, doomed=doomed)
    for work in works[1:]:
        if work.intent.info is not None:
            _record_model(work.files, work.intent.info)
    delete_listed(files)
    return record


def _record_model(view: StoreFiles, info: StoreInfo) -> None:
    """Note a further model in its store.json, as only that says whose vectors are rounded."""
    swap_record(
        view,
        STORE_FILE,
        StoreInfo,
        lambda found: info if found is None else info.model_copy(update={"half_of": found.half_of}),
    )


def _read_decision(
    files: StoreFiles, run_id: str, entries: list[JournalEntry] | None = None, session: str | None = None
) -> Publication:
    """Read what was decided about a run's publication.

    `files` may be another model's view; `entries` are the journal entries that count, if known. Raises LeaseLostError
    if a session other than `session` has decided since, because it took over the store, and StoreError if the record is
    missing.
    """
    path = run_file(run_id, INTENT_FILE)
    intent = read_record(files, path, PublishIntent)
    if intent is None:
        raise StoreError(
            f"{files.uri(path)}: missing, and without it the publication of run {run_id} can't be finished; restore "
            "the file, or go back with `embedder rollback`"
        )
    if session not in (None, intent.session):  # whose order must not be mixed with what this one knows
        files.confirm_lease()
        raise StoreError(f"{files.uri(path)}: written by session {intent.session} of the run meanwhile; run again")
    retired = files.read_table(run_file(run_id, intent.retired))["item_id"]
    if entries is None:
        counting = set(intent.entries)
        entries = [entry for entry in read_entries(files, run_id) if entry.name in counting]
    before = interim_state(files, run_id)
    batch = choose_batch(files, entries, before)
    whole = whole_without(batch.whole, retired)
    moves = read_moves(files, run_id, entries, whole)
    return Publication(
        files, run_id, intent, entries, batch.finished, whole, retired, moves, published_names=before.names
    )


def _commit_all(work: Publication, columns: pa.Schema, build_index: IndexBuilder) -> Current:
    """Commit both tables of a model, with `columns` besides their own, and build its index; return what to publish."""
    files, intent = work.files, work.intent
    base = read_current(files)
    embeddings = commit_table(work, "embeddings", columns, base).version
    items = commit_table(work, "items", pa.schema([]), base).version
    fields = (*MODEL_FIELDS, *FURTHER_FIELDS)
    return Current(
        run_id=work.run_id,
        interim_of=work.interim_of,
        embeddings=embeddings,
        items=items,
        index=build_index(files, embeddings, intent.info),
        published_at=files.environment.now(),
        retrieval=intent.retrieval,
        **(intent.info.model_dump(include=set(fields)) if intent.info else {}),
    )


def _unneeded_parts(work: Publication, current: Current) -> list[str]:
    """List the run's part files that no version needs, from interrupted write tasks or because they were rewritten."""
    files, own = work.files, of_model(current, work.files.model)
    kept = kept_parts(work.entries, work.published_names)
    doomed = []
    for name in TABLES:
        needed = {*RecordTable(files, name, getattr(own, name)).needed_files(), *kept}
        for info in files.list(name, f"{name}/part-{work.run_id}-"):
            path = info.path.removeprefix(f"{name}/")
            if path.startswith(f"part-{work.run_id}-") and path not in needed:
                doomed.append(model_folder(files.model) + info.path)
    return doomed


def _used_moves(work: Publication) -> list[str]:
    paths = (moves_file(work.run_id, entry.name) for entry in work.entries if entry.num_moves)
    return [model_folder(work.files.model) + path for path in paths]


def settle(files: StoreFiles) -> None:
    """Revert the tables' newest versions to the published rows, so that other readers see no half publication.

    An operation that was killed between its commits and CURRENT.json leaves newer versions.
    """
    current = read_current(files)
    for name in TABLES:
        newest, number = RecordTable(files, name), -1 if current is None else getattr(current, name)
        if newest.version > number:
            mark = f"settled-{'' if current is None else current.run_id}-{newest.version}"
            newest.commit_files(mark, RecordTable(files, name, number).parts())
