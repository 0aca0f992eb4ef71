"""Publication of a run's finished work: commits of embeddings and items, then CURRENT.json, which makes it visible.

Every step can be repeated: a commit bears its run's id and is made once, and the files a step writes have names that
follow from their content. The intent is written down before the first commit, so a crash between any two steps is
repaired by doing all of them again, whatever has changed in the source or the journal since.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embedder.store.arrow_lookup import without_items
from embedder.store.current import publish_current
from embedder.store.files import StoreFiles
from embedder.store.interim import (
    INTERIM_FILE,
    NO_IDS,
    InterimBatch,
    choose_batch,
    interim_id,
    interim_state,
    kept_parts,
)
from embedder.store.journal import Finished, JournalEntry, PartFile, parts_of, read_entries
from embedder.store.layout import (
    Current,
    Kind,
    Published,
    Record,
    RunInfo,
    StoreInfo,
    read_current,
    read_record,
    run_file,
    utc_now,
    write_record,
)
from embedder.store.metadata_updates import MOVED, moved, moves_file, read_moves
from embedder.store.part_writer import RunMetadata, rewritten_name, store_part
from embedder.store.runs import Run, is_published, last_run
from embedder.store.schema import TABLES, with_carryover
from embedder.store.store_info import MODEL_FIELDS
from embedder.store.tables import RecordTable

LOG = logging.getLogger(__name__)

IndexBuilder = Callable[[int], int | None]
"""Function from the embeddings version that is about to be published to the number of an index of it."""

INTENT_FILE = "publication.json"
RETIRED_FILE = "retired.parquet"


class PublishIntent(Record):
    """`runs/<run_id>/publication.json`: the publication as it was decided before the first commit."""

    kind: Kind = "embed"
    info: StoreInfo | None = None
    """Model of the vectors."""
    replaces_all: bool = False
    """Whether all published rows leave: another model's vectors can't be mixed with these."""
    retrieval: dict[str, Any] | None = None
    ends_hold: bool = False
    """Whether everything still wanted of what a rollback had removed is included."""
    session: str = ""
    entries: tuple[str, ...] = ()
    """Names of the journal entries that count."""


@dataclass(frozen=True)
class Publication:
    """Finished work of a run, with the decisions on its publication.

    Attributes:
        files: the store.
        run_id: id of the publication; marks its commits and names the files that it rewrites.
        intent: kind, model, and what else was decided.
        entries: journal entries with the work.
        finished: their records and rows.
        whole: items to publish.
        retired: ids of items that leave.
        moves: of `embedder.store.metadata_updates.read_moves`.
        interim_of: id of the run, if it goes on.
    """

    files: StoreFiles
    run_id: str
    intent: PublishIntent
    entries: list[JournalEntry]
    finished: Finished
    whole: pa.Table
    retired: pa.ChunkedArray
    moves: pa.Table
    interim_of: str | None = None


def publish(
    run: Run,
    metadata: RunMetadata,
    build_index: IndexBuilder,
    intent: PublishIntent | None = None,
    retired: pa.ChunkedArray = NO_IDS,
) -> Published:
    """Commit the finished work of a run and make it visible to readers.

    Args:
        run: the run, all of whose tasks have ended.
        metadata: its constants; the carried columns among them.
        build_index: called between the tables and CURRENT.json, so that the three belong together.
        intent: intent of this publication; session and entries are filled in here.
        retired: ids of items that leave both tables, and of finished items that have disappeared since.

    Returns:
        The record of what is published.
    """
    entries = run.entries()
    names = tuple(entry.name for entry in entries)
    intent = (intent or PublishIntent()).model_copy(update={"session": run.session, "entries": names})
    run.files.confirm_lease()
    run.files.write_table(run_file(run.run_id, RETIRED_FILE), pa.table({"item_id": retired}))
    write_record(run.files, run_file(run.run_id, INTENT_FILE), intent)
    return _carry_out(run.files, run.run_id, intent, entries, retired, metadata.carryover, build_index)


def publish_interim(
    run: Run, batch: InterimBatch, metadata: RunMetadata, build_index: IndexBuilder, intent: PublishIntent
) -> Published | None:
    """Commit what a run has finished so far and make it visible, while the run goes on.

    Args:
        run: the run, in the process that holds the write lock.
        batch: what to publish, of `embedder.store.interim.choose_batch`.
        metadata: the run's constants.
        build_index: as in `publish`.
        intent: intent of this publication, by which nothing leaves the store.

    Returns:
        The record of what is published; None where the run's id leaves no room for others before it.
    """
    files, own_id = run.files, interim_id(run.files, run.run_id)
    if own_id is None:
        return None
    files.confirm_lease()
    write_record(files, run_file(own_id, INTERIM_FILE), batch.record)
    moves = read_moves(files, run.run_id, batch.entries, batch.whole)
    intent = intent.model_copy(update={"session": run.session})
    work = Publication(
        files, own_id, intent, batch.entries, batch.finished, batch.whole, NO_IDS, moves, interim_of=run.run_id
    )
    record = _commit_all(work, metadata.carryover, build_index)
    sweep(files, own_id)
    return record


def finish_publication(
    files: StoreFiles, build_index: Callable[[int, StoreInfo | None], int | None]
) -> Published | None:
    """Complete a publication that was interrupted after its first commit, as it was decided then; logs that it did.

    Every writer calls this first: later work must not mix with half a publication.

    Args:
        files: the store, held by the write lock.
        build_index: as in `publish`, with the model of the vectors as second argument; None: the served model.

    Returns:
        The publication; None where nothing was interrupted.
    """
    last = last_run(files)
    intent = _open_intent(files, last)
    if last is None or intent is None:
        settle(files)
        return None
    retired = pq.read_table(BytesIO(files.read(run_file(last.run_id, RETIRED_FILE))))["item_id"]
    entries = [entry for entry in read_entries(files, last.run_id) if entry.name in set(intent.entries)]
    published = _carry_out(
        files, last.run_id, intent, entries, retired, pa.schema([]), lambda version: build_index(version, intent.info)
    )
    LOG.info("the last publication was cut off; now it is whole")
    return published


def _open_intent(files: StoreFiles, last: RunInfo | None) -> PublishIntent | None:
    """Intent of the last run, if a commit of it is made and CURRENT.json does not name it yet."""
    if last is None or is_published(files, last):
        return None
    if not any(RecordTable(files, name).committed(last.run_id) for name in TABLES):
        return None
    return read_record(files, run_file(last.run_id, INTENT_FILE), PublishIntent)


def _carry_out(
    files: StoreFiles,
    run_id: str,
    intent: PublishIntent,
    entries: list[JournalEntry],
    retired: pa.ChunkedArray,
    carryover: pa.Schema,
    build_index: IndexBuilder,
) -> Published:
    before = interim_state(files, run_id)
    batch = choose_batch(files, entries, before)
    whole = without_items(batch.whole, retired)
    moves = read_moves(files, run_id, entries, whole)
    work = Publication(files, run_id, intent, entries, batch.finished, whole, retired, moves)
    record = _commit_all(work, carryover, build_index)
    sweep(files, run_id, kept_parts(entries, before.names))
    for entry in entries:
        if entry.num_moves:
            files.delete(moves_file(run_id, entry.name))
    return record


def _commit_all(work: Publication, carryover: pa.Schema, build_index: IndexBuilder) -> Published:
    """Commit both tables, make the index, and replace CURRENT.json."""
    files, intent = work.files, work.intent
    settle(files, work.run_id)
    embeddings = _commit(work, "embeddings", work.finished.vectors, carryover)
    items = _commit(work, "items", work.finished.records, pa.schema([]))
    current = Current(
        run_id=work.run_id,
        interim_of=work.interim_of,
        embeddings=embeddings,
        items=items,
        index=build_index(embeddings),
        published_at=utc_now(),
        retrieval=intent.retrieval,
        **(intent.info.model_dump(include=set(MODEL_FIELDS)) if intent.info else {}),
    )
    return publish_current(files, current, intent.kind, ends_hold=intent.ends_hold)


def _commit(work: Publication, name: str, keys: pa.Table, carryover: pa.Schema) -> int:
    table = RecordTable(work.files, name)
    if table.committed(work.run_id):
        return table.version
    adds = _own_parts(work, name, keys)
    rewritten, removes = ([], table.paths()) if work.intent.replaces_all else _replace_older(work, table)
    return table.commit(work.run_id, [*adds, *rewritten], removes, with_carryover(TABLES[name], carryover))


def _own_parts(work: Publication, name: str, keys: pa.Table) -> list[PartFile]:
    """Part files of the run; those with rows of incomplete or outdated items are rewritten without them."""
    whole = work.whole
    if name == "embeddings":
        whole = whole.filter(pc.invert(whole["kept"]))
    counting = keys.join(whole, ["item_id", "session"], join_type="left semi")
    counts = counting.group_by("path").aggregate([("item_id", "count")]).to_pylist()
    rows_by_path = {row["path"]: row["item_id_count"] for row in counts}
    parts = []
    for part in parts_of(work.entries, name):
        num_counting = rows_by_path.get(part.path, 0)
        if num_counting == part.num_rows:
            parts.append(part)
        elif num_counting:
            here = whole.filter(pc.equal(whole["session"], part.session))["item_id"].combine_chunks()
            table = RecordTable(work.files, name)
            parts.append(_rewrite(work, table, part.path, _without(table, part.path, here, keep=True)))
    return parts


def _replace_older(work: Publication, table: RecordTable) -> tuple[list[PartFile], list[str]]:
    """Copy-on-write: new files with the other rows of files that hold older rows of the same items, and those files."""
    whole, moves = work.whole, MOVED.empty_table()
    if table.name == "embeddings":  # an item without new rows keeps those that it had
        whole = whole.filter(pc.and_(pc.invert(whole["kept"]), pc.greater(whole["num_vectors"], 0)))
        moves = work.moves
    replaced = pa.chunked_array([*whole["item_id"].chunks, *work.retired.chunks], pa.string()).combine_chunks()
    adds: list[PartFile] = []
    removes: list[str] = []
    if not (len(replaced) or moves.num_rows):
        return adds, removes
    for path in table.paths():
        rows = table.read(["item_id", *moves.schema.names[1:]], [path])
        num_replaced = pc.sum(pc.is_in(rows["item_id"], value_set=replaced)).as_py() or 0
        if not num_replaced and moved(rows, moves).equals(rows):
            continue
        removes.append(path)
        if num_replaced < rows.num_rows:
            adds.append(_rewrite(work, table, path, moved(_without(table, path, replaced), moves)))
    return adds, removes


def _without(table: RecordTable, path: str, ids: pa.Array, *, keep: bool = False) -> pa.Table:
    """Read a part file without, or with nothing but (`keep`), the rows of some items."""
    content = table.read(paths=[path])
    listed = pc.is_in(content["item_id"], value_set=ids)
    return content.filter(listed if keep else pc.invert(listed))


def _rewrite(work: Publication, table: RecordTable, path: str, content: pa.Table) -> PartFile:
    """Write the remaining rows of a part file as a new one."""
    new_path = rewritten_name(work.run_id, "rewrite", [path])
    return store_part(work.files, table.name, new_path, content, work.intent.session)


def sweep(files: StoreFiles, run_id: str, kept: Collection[str] = ()) -> None:
    """Delete the run's part files that the newest version doesn't hold: of interrupted write tasks, and rewritten ones.

    Args:
        files: the store.
        run_id: id of the run.
        kept: part files that earlier publications may need.
    """
    for name in TABLES:
        table = RecordTable(files, name)
        needed = {*table.paths(), *kept}
        for info in files.list(name):
            path = info.path.removeprefix(f"{name}/")
            if path.startswith(f"part-{run_id}-") and path not in needed:
                files.delete(info.path)


def settle(files: StoreFiles, run_id: str | None = None) -> None:
    """Revert the tables' newest versions to the published rows, so that changes start from there.

    An operation that was killed between its commits and CURRENT.json leaves newer versions.

    Args:
        files: the store, held by the write lock.
        run_id: a run that is about to publish; a commit that it has made already stays.
    """
    current = read_current(files)
    for name in TABLES:
        newest, number = RecordTable(files, name), -1 if current is None else getattr(current, name)
        if newest.version <= number or (run_id is not None and newest.committed(run_id)):
            continue
        mark = f"settled-{'' if current is None else current.run_id}-{newest.version}"
        newest.commit_files(mark, RecordTable(files, name, number).parts())
