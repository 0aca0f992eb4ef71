"""Deletion of files that no reader or writer needs any more; what is published is never touched."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from embedder.errors import StoreError
from embedder.store.backends import FileInfo, is_unfinished, manifests_first
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import run_time, unfinished_runs
from embedder.store.layout import INPUT_FOLDER, PAIRS_FILE, RUNS_FOLDER, STORE_FILE, Current, Published
from embedder.store.publish.current import model_folder, move_current, record_of, writable
from embedder.store.publish.deletions import delete_listed, unnamed_lists
from embedder.store.publish.history import part_files, publications, readable, run_of
from embedder.store.publish.publication import INTENT_FILE
from embedder.store.publish.query_towers import unneeded_towers
from embedder.store.schema import TABLES
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.delta_log import LOG_FOLDER
from embedder.store.tables.models import model_files, model_folders
from embedder.store.tables.row_folders import unneeded_rows
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import unneeded_words
from shards.file_schema import parse_json

MAX_DAYS = 36_500  # a century; no date is a million days ago

_JOURNAL = re.compile(
    rf"runs/(?P<run_id>[^/]+)/(journal/[^/]+|{INPUT_FOLDER}/[^/]+|{re.escape(INTENT_FILE)}|retired[^/]*\.parquet)"
)
_INDEX = re.compile(r"index/(?P<number>\d{6,})/.+")


@dataclass(frozen=True)
class Vacuumed:
    """Result of a vacuum, or of its dry run.

    `deleted` are paths relative to the store. `kept` are run ids of the publications that stay readable, and `needed`
    those among them that stay readable only because other kept ones need all their files.
    """

    deleted: tuple[FileInfo, ...]
    kept: tuple[str, ...]
    needed: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the deleted files."""
        return sum(info.size_bytes for info in self.deleted)


def vacuum(files: StoreFiles, *, keep_days: float = 7.0, keep_versions: int = 2, dry_run: bool = False) -> Vacuumed:
    """Delete part files, journals, index versions and query towers that no publication worth keeping needs.

    Covers all models. Reports and records of all runs stay; of a model that no such publication has, its logs and
    store.json stay. Files left by a kill in the middle are deleted by the next vacuum. A publication whose files are
    all needed by a kept one stays readable but loses its index, so searching it compares with every vector.

    Args:
        files: the store, held by the write lock.
        keep_days: days for which a publication or an index stays readable after it was replaced.
        keep_versions: number of newest publications that stay, however old.
        dry_run: delete nothing.

    Raises:
        StoreError: there is no store, nothing is published, its format is older, or a record is damaged.
    """
    current = writable(files)
    history, now, grace = publications(files), files.environment.now(), timedelta(days=min(keep_days, MAX_DAYS))
    kept = kept_publications(history, now, grace, keep_versions)
    whole = readable(files, kept)
    versions: list[Current] = [current, *(record for record in kept if record.run_id in whole)]
    unfinished = {run.run_id for run in unfinished_runs(files)}
    doomed = _list_unneeded(files, history, versions, unfinished, now - grace)
    models = model_folders(files)
    for model in models:
        doomed += _unneeded_of_model(files, model, history, versions, unfinished, now - grace)
    asked = {version.run_id for version in versions}
    left = asked | _readable_after(files, history, versions, doomed)
    served = [each for each in (current, *history) if each.run_id in left | {current.run_id}]
    doomed += [info for model in ["", *models] for info in _unneeded_towers(files, model, served)]
    doomed += unnamed_lists(files, current)
    unfinished_files = [info for info in files.list("") if is_unfinished(info.path)]
    if not dry_run:
        files.confirm_lease()
        files.delete_each(info.path for info in unfinished_files)  # nothing ever refers to them
        if doomed:
            move_current(files, current, [info.path for info in doomed])
        delete_listed(files)
    doomed += unfinished_files
    return Vacuumed(tuple(doomed), tuple(sorted(left)), tuple(sorted(left - asked)))


def _list_unneeded(
    files: StoreFiles, history: Sequence[Published], versions: Sequence[Current], unfinished: set[str], since: datetime
) -> list[FileInfo]:
    return [
        *_parts(files, versions, unfinished),
        *_journals(files, unfinished),
        *_pairs(files, history, unfinished),
        *_indexes(files, history, versions, since),
        *unneeded_words(files, {version.embeddings for version in versions}),
        *unneeded_rows(files, versions),
    ]


def _unneeded_of_model(
    files: StoreFiles,
    model: str,
    history: Sequence[Published],
    versions: Sequence[Current],
    unfinished: set[str],
    since: datetime,
) -> list[FileInfo]:
    """List a model's unneeded files, relative to the store; all files if nothing has the model any more."""
    view, folder = model_files(files, model), model_folder(model)
    if own := _parts_of(versions, model):
        records = [record for each in history if (record := record_of(each, model)) is not None]
        found = _list_unneeded(view, records, own, unfinished, since)
    else:
        found = list(view.list(""))
        if any(run_id in info.path for run_id in unfinished for info in found):
            return []
        # Its logs and store.json stay: a later model of that name continues their numbering.
        found = [info for info in found if f"/{LOG_FOLDER}/" not in info.path and info.path != STORE_FILE]
    return [info._replace(path=folder + info.path) for info in found]


def _parts_of(versions: Sequence[Current], model: str) -> list[Current]:
    own = [(each.models[model], each.run_id) for each in versions if model in each.models]
    return [each.model_copy(update={"run_id": run_id}) for each, run_id in own]


def _readable_after(
    files: StoreFiles, history: Sequence[Published], versions: Sequence[Current], doomed: Iterable[FileInfo]
) -> set[str]:
    kept_models = {name for each in versions for name in each.models}
    whole_models = [each for each in history if kept_models.issuperset(each.models)]  # others lose all their files
    return readable(files, whole_models, [info.path for info in doomed])


def _unneeded_towers(files: StoreFiles, model: str, served: Sequence[Current]) -> list[FileInfo]:
    """List a model's query towers that match no vectors of a kept publication, relative to the store."""
    own = _parts_of(served, model) if model else served
    if not own:
        return []  # deleted with everything else, or belonging to an unfinished run
    view = model_files(files, model)
    bound = read_store_info(view)
    found = unneeded_towers(view, [served_info(bound, each) for each in own])
    return [info._replace(path=model_folder(model) + info.path) for info in found]


def kept_publications(
    history: Sequence[Published], now: datetime, grace: timedelta, keep_versions: int
) -> list[Published]:
    """Return the publications that stay readable: the newest few, and those that readers may have open.

    A reader may have opened a version up to the moment when the next one replaced it, so the grace period starts there.
    If the clock is set back, times are too early, never too late: a publication counts as no older than those before
    it, and run ids keep rising whatever the clock says.
    """
    kept = list(history[-max(1, keep_versions) :])
    latest = datetime.min.replace(tzinfo=now.tzinfo)
    replaced_at = []
    for record in history:
        latest = max(latest, record.published_at, run_time(record.run_id) or latest)
        replaced_at.append(latest)
    for record, replaced in zip(history, replaced_at[1:], strict=False):
        if grace and record not in kept and replaced > now - grace:
            kept.append(record)
    return kept


def _parts(files: StoreFiles, versions: Sequence[Current], unfinished: set[str]) -> list[FileInfo]:
    doomed = []
    for name in TABLES:
        needed = RecordTable(files, name).needed_files()  # the newest version, which other Delta readers open
        for version in versions:
            needed.update(RecordTable(files, name, getattr(version, name)).needed_files())
        for path, size_bytes in part_files(files, name).items():
            run_id = run_of(path)
            if run_id and path not in needed and run_id not in unfinished:
                doomed.append(FileInfo(f"{name}/{path}", size_bytes))
    return doomed


def _journals(files: StoreFiles, unfinished: set[str]) -> list[FileInfo]:
    """List journals of runs that ended: their content is in the tables, or abandoned."""
    matches = ((info, _JOURNAL.fullmatch(info.path)) for info in files.list("runs"))
    return [info for info, match in matches if match and match["run_id"] not in unfinished]


def _pairs(files: StoreFiles, history: Sequence[Published], unfinished: set[str]) -> list[FileInfo]:
    """List samples for the guard `retrieval` except the newest published one, on which the next run builds."""
    found = {info.path.split("/")[1]: info for info in files.list(RUNS_FOLDER) if info.path.endswith(PAIRS_FILE)}
    newest = max(found.keys() & {record.run_id for record in history}, default=None)
    return [info for run_id, info in found.items() if run_id != newest and run_id not in unfinished]


def _indexes(
    files: StoreFiles, history: Sequence[Published], versions: Sequence[Current], since: datetime
) -> list[FileInfo]:
    """List files of unneeded index versions, the manifest first: without it the rest is no version."""
    infos = [(info, match) for info in files.list("index") if (match := _INDEX.fullmatch(info.path))]
    built = {
        int(match["number"]): _read_manifest(files, info.path)
        for info, match in infos
        if info.path.endswith("/manifest.json")
    }
    needed = needed_indexes(history, versions, since)
    tables = {version.embeddings for version in versions}
    recorded = {number for record in history for number in (record.index, *record.past_indexes)}
    for number, manifest in built.items():
        is_young = datetime.fromisoformat(manifest["built_at"]) > since
        if manifest["embeddings_version"] in tables and number not in recorded and is_young:
            needed.add(number)  # from a store older than such records, or from a killed build
    doomed = [info for info, match in infos if int(match["number"]) not in needed]
    return manifests_first(doomed)


def _read_manifest(files: StoreFiles, path: str) -> dict[str, Any]:
    """Read what a vacuum needs of an index's manifest, or raise StoreError if it is damaged."""
    try:
        manifest = parse_json(files.read(path))
        return {"embeddings_version": manifest["embeddings_version"], "built_at": manifest["built_at"]}
    except (ValueError, LookupError, TypeError):
        raise StoreError(f"{files.uri(path)}: damaged; delete its folder, and build the index again") from None


def needed_indexes(history: Sequence[Published], versions: Sequence[Current], since: datetime) -> set[int]:
    """Return the numbers of the index versions that stay.

    These are the indexes of the kept publications and, however old, the one before each: a reader of the publication
    may be about to open it, and `embedder index rollback` returns to it. Any other stays until the grace period after
    its replacement has passed, which may be long after its publication's time.
    """
    needed = {version.index for version in versions if version.index is not None}
    kept = {version.run_id for version in versions}
    for record in history:
        past = record.past_indexes
        needed |= {number for number, replaced_at in past.items() if replaced_at > since}
        if past and record.run_id in kept:
            needed.add(max(past, key=lambda number: past[number]))
    return needed
