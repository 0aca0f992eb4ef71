"""Decided publication of a run's finished work, and the commit of each table: adds, copies on write, removes."""

from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import KEYS, Finished, count_rows, hash_rows, ids_in
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.metadata_updates import MOVED, move_rows
from embedder.store.journal.part_writer import RunMetadata, gather_rows, rewrite_each, rewritten_name, store_part
from embedder.store.journal.runs import Run
from embedder.store.layout import Current, Kind, Record, StoreInfo
from embedder.store.part_file import PartFile
from embedder.store.publish.interim import NO_IDS
from embedder.store.schema import TABLES, VECTOR_COLUMNS, with_carryover
from embedder.store.tables.arrow_lookup import KnownIds
from embedder.store.tables.deletion_vectors import marked_stats, store_vectors
from embedder.store.tables.tables import RecordTable
from index.vectors import Mask, Rows

INTENT_FILE = "publication.json"
RETIRED_FILE = "retired.parquet"
MANY_IDS = 1 << 20
"""Number of items above which those that replace none are found first: each takes 80 bytes, or more with a long id."""
MAX_MARKED = 0.5
"""Share of a part file's rows that may have left before it is rewritten: that writes no more than what left."""
ROWS_PER_MOVED = 10_000
"""Rows with new metadata in one part file; they are gathered from all that mark them."""

MarkRows = Literal["auto"] | bool
"""Whether rows that leave are marked by deletion vectors; auto: in tables that have some, whose readers know them."""


class PublishIntent(Record):
    """`runs/<run_id>/publication.json`: the publication as decided before the first commit."""

    kind: Kind = "embed"
    info: StoreInfo | None = None
    """Model of the vectors."""
    replaces_all: bool = False
    """Whether all published rows leave, as another model's vectors can't be mixed with these."""
    retrieval: dict[str, Any] | None = None
    ends_hold: bool = False
    """Whether everything still wanted of what a rollback removed is included."""
    session: str = ""
    retired: str = RETIRED_FILE
    """File in the run's folder with the ids of items that leave."""
    entries: tuple[str, ...] = ()
    """Names of the journal entries that count."""
    columns: str = ""
    """Columns of the embeddings table besides its own: an Arrow schema in base 64."""
    models: tuple[str, ...] = ()
    """Further models of the run; the intent of each is in the run's folder of its view."""
    kept_models: tuple[str, ...] | None = None
    """Published models that stay unchanged besides those; None: all."""
    deletion_vectors: MarkRows = "auto"
    """Whether rows that leave are marked, instead of their part files being written without them."""

    @property
    def column_schema(self) -> pa.Schema:
        """Return the columns of the embeddings table besides its own."""
        return pa.ipc.read_schema(pa.py_buffer(b64decode(self.columns))) if self.columns else pa.schema([])


NO_INTENT = PublishIntent()


@dataclass(frozen=True)
class ModelWork:
    """Finished work of one model of a run.

    `run` is in the model's view. `metadata` includes the carried columns. `publish` fills in session and entries of
    `intent`. `retired` holds ids that leave both tables, including finished items that have since disappeared.
    """

    run: Run
    metadata: RunMetadata
    intent: PublishIntent = NO_INTENT
    retired: pa.ChunkedArray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True)
class Publication:
    """Finished work of a run, with the decisions about its publication.

    Attributes:
        files: the store.
        run_id: id of the publication; marks its commits and names the files that it rewrites.
        intent: kind, model, and what else was decided.
        entries: journal entries with the work.
        finished: their records and rows.
        whole: items to publish: `embedder.store.journal.finished.WHOLE`.
        retired: ids of items that leave.
        moves: from `embedder.store.journal.metadata_updates.read_moves`.
        interim_of: id of the run, if it continues.
        published_names: journal entries that interim publications of the run include.
    """

    files: StoreFiles
    run_id: str
    intent: PublishIntent
    entries: list[JournalEntry]
    finished: Finished
    whole: HashedRows
    retired: pa.ChunkedArray
    moves: pa.Table
    interim_of: str | None = None
    published_names: frozenset[str] = frozenset()


def commit_table(work: Publication, name: str, columns: pa.Schema, base: Current | None) -> RecordTable:
    """Commit a publication's version of one table, unless done; return the table at that version.

    `columns` are those besides the table's own. `base` is what is published of the model, to which the work is added;
    an overtaken or unfinished operation may have left newer versions of the table.
    """
    newest, number = RecordTable(work.files, name), -1 if base is None else getattr(base, name)
    published = newest if newest.version == number else RecordTable(work.files, name, number)
    wanted = _own_parts(work, published)
    if not work.intent.replaces_all:
        rewritten, removes = _replace_older(work, published)
        gone = set(removes)
        wanted += [*rewritten, *(part for part in published.parts() if part.path not in gone)]
    schema = with_carryover(TABLES[name], columns)
    newest.commit_files(work.run_id, wanted, schema, work.intent.session)
    return newest


def _own_parts(work: Publication, table: RecordTable) -> list[PartFile]:
    """Return the run's part files, rewritten if they hold rows of incomplete or outdated items."""
    finished = work.finished
    if table.name == "items":
        num_counting, partial = count_rows(finished.files, finished.records, work.whole)
    else:
        num_counting, partial = count_rows(finished.files, finished.vectors, work.whole, _with_new_rows)
    parts = []
    for number, part in enumerate(finished.files):
        if part.table != table.name or not num_counting[number]:
            continue
        if num_counting[number] < part.num_rows:
            ids = ids_in(partial, number)
            content = table.read(paths=[part.path])
            content = content.filter(pc.is_in(content["item_id"], value_set=ids))
            part = _rewrite(work, table, part.path, content)  # noqa: PLW2901
        parts.append(part)
    return parts


def _with_new_rows(whole: pa.Table) -> pa.Table:
    """Return the items with new embeddings; the others keep their old ones."""
    return whole.filter(pc.invert(whole["kept"]))


@dataclass(frozen=True)
class _Change:
    """Part file with rows that leave or get new metadata; `stays` has a bit for each of its rows, packed.

    `moves` has the new metadata of those that stay.
    """

    part: PartFile
    stays: "np.ndarray[Any, np.dtype[np.uint8]]"
    moving: Rows
    moves: pa.Table

    @property
    def num_marked(self) -> int:
        """Number of the file's rows that have left if these are marked."""
        num_leaving = int(np.count_nonzero(~self.stays_mask)) + len(self.moving)
        return self.part.num_stored - self.part.num_rows + num_leaving

    @property
    def stays_mask(self) -> Mask:
        """Mask of the rows that stay."""
        return np.unpackbits(self.stays, count=self.part.num_rows).astype(np.bool_)


def _replace_older(work: Publication, table: RecordTable) -> tuple[list[PartFile], list[str]]:
    """Return what replaces the files with older rows of the same items, and the paths of these.

    Such a file is rewritten with the rows that stay (copy on write), or it stays and the others are marked.
    """
    moves = work.moves if table.name == "embeddings" else MOVED.empty_table()
    leaving, moving = KnownIds(_leaving(work, table)), KnownIds(moves["item_id"])
    touched = [
        each for each in table.parts() if leaving.any_between(each.id_range) or moving.any_between(each.id_range)
    ]

    def find(part: PartFile) -> _Change | None:
        rows = table.read(["item_id", *moves.schema.names[1:]], [part.path])
        stays = pc.invert(leaving.are_listed(rows["item_id"])).to_numpy()
        moves_here = moves.take(moving.find_among(rows["item_id"]))
        if stays.all() and move_rows(rows, moves_here).equals(rows):
            return None
        is_moving = pc.is_in(rows["item_id"], value_set=moves_here["item_id"].combine_chunks()).to_numpy() & stays
        return _Change(part, np.packbits(stays), np.flatnonzero(is_moving), moves_here)

    changes = [change for change in rewrite_each(find, touched) if change is not None]
    setting = work.intent.deletion_vectors
    may_mark = table.has_deletion_vectors if setting == "auto" else setting
    marked = [each for each in changes if may_mark and each.num_marked <= MAX_MARKED * each.part.num_stored]
    own = {each.part.path for each in marked}
    others = [each for each in changes if each.part.path not in own]
    rewritten = rewrite_each(lambda each: _rest(work, table, each), others)
    adds = [*(rest for rest in rewritten if rest is not None), *_mark(work, table, marked)]
    return adds, [change.part.path for change in changes]


def _rest(work: Publication, table: RecordTable, change: _Change) -> PartFile | None:
    stays = change.stays_mask
    if not stays.any():
        return None
    content = table.read(paths=[change.part.path]).filter(pa.array(stays))
    return _rewrite(work, table, change.part.path, move_rows(content, change.moves))


def _mark(work: Publication, table: RecordTable, changes: list[_Change]) -> list[PartFile]:
    """Mark the rows that leave; return the part files with their marks, and new ones of the rows with new metadata."""
    rows = {each.part.path: _rows_to_mark(table, each) for each in changes}
    vectors = store_vectors(work.files, table.name, work.run_id, work.intent.session, rows)
    parts = [
        each.part.model_copy(
            update={
                "num_rows": each.part.num_stored - each.num_marked,
                "stats": marked_stats(each.part.stats, _count_marked_nulls(table, each.part, rows[each.part.path])),
                "deletion_vector": vectors[each.part.path],
            }
        )
        for each in changes
    ]
    moved = (
        move_rows(table.read(paths=[each.part.path]).take(pa.array(each.moving)), each.moves)
        for each in changes
        if len(each.moving)
    )
    for number, content in enumerate(gather_rows(moved, ROWS_PER_MOVED)):
        path = rewritten_name(work.run_id, work.intent.session, "rewrite", [f"moved-{number}", *sorted(rows)])
        parts.append(store_part(work.files, table.name, path, content, work.intent.session))
    return parts


def _rows_to_mark(table: RecordTable, change: _Change) -> Rows:
    leaving = ~change.stays_mask
    leaving[change.moving] = True
    before = table.marked_rows(change.part.path)
    if before is None:
        return np.flatnonzero(leaving)
    live = np.delete(np.arange(change.part.num_stored), before)
    return np.union1d(before, live[leaving])


def _count_marked_nulls(table: RecordTable, part: PartFile, rows: Rows) -> dict[str, int]:
    """Count the rows without a vector among those that have left, by column, where the statistics don't say."""
    counts = part.null_counts
    unsure = [name for name in VECTOR_COLUMNS if 0 < counts.get(name, 0) < part.num_stored]
    stored = table.read_stored(part.path, unsure).take(pa.array(rows)) if unsure else pa.table({})
    return {name: stored[name].null_count for name in unsure}


def _leaving(work: Publication, table: RecordTable) -> pa.ChunkedArray:
    """Return ids of items whose rows in a table are replaced or removed; if many are new, only those it holds."""
    whole, ids = work.whole, KEYS.remove(1)
    are_many = whole.num_rows > MANY_IDS
    held = hash_rows(table.pieces(["item_id"]) if are_many else (), ids)
    found = [work.retired]
    for items, in_table in read_parts(whole, held):
        own = items["item_id"]
        if table.name == "embeddings":
            new = _with_new_rows(items)
            own = new.filter(pc.greater(new["num_vectors"], 0))["item_id"]
        if are_many:
            own = own.filter(pc.is_in(own, value_set=in_table["item_id"].combine_chunks()))
        found.append(own)
    return pa.chunked_array([chunk for column in found for chunk in column.chunks], pa.string())


def _rewrite(work: Publication, table: RecordTable, path: str, content: pa.Table) -> PartFile:
    new_path = rewritten_name(work.run_id, work.intent.session, "rewrite", [path])
    return store_part(work.files, table.name, new_path, content, work.intent.session)
