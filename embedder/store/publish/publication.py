"""Decided publication of a run's finished work, and the commit of each table: adds, copies on write, removes."""

from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows, common_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import KEYS, Finished, count_rows, hash_rows, ids_in
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.metadata_updates import MOVED, move_rows
from embedder.store.journal.part_writer import RunMetadata, rewrite_each, rewritten_name, store_part
from embedder.store.journal.runs import Run
from embedder.store.layout import Current, Kind, Record, StoreInfo
from embedder.store.part_file import PartFile
from embedder.store.publish.interim import NO_IDS
from embedder.store.schema import TABLES, with_carryover
from embedder.store.tables.arrow_lookup import KnownIds
from embedder.store.tables.tables import RecordTable

INTENT_FILE = "publication.json"
RETIRED_FILE = "retired.parquet"
MANY_IDS = 1 << 20
"""Number of items above which those that replace none are found first: each takes 80 bytes, or more with a long id."""


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
    own, counting = (finished.records, _all_items) if table.name == "items" else (finished.vectors, _with_new_rows)
    num_counting, partial = count_rows(finished.files, own, work.whole, counting)
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


def _all_items(whole: pa.Table) -> pa.Table:
    return whole


def _with_new_rows(whole: pa.Table) -> pa.Table:
    """Return the items with new embeddings; the others keep their old ones."""
    return whole.filter(pc.invert(whole["kept"]))


def _replace_older(work: Publication, table: RecordTable) -> tuple[list[PartFile], list[str]]:
    """Copy on write: return new files with the rows that stay, and the files with older rows of the same items."""
    parts = table.parts()
    if not parts:
        return [], []
    moves = work.moves if table.name == "embeddings" else MOVED.empty_table()
    leaving, moving = KnownIds(_leaving(work, table)), KnownIds(moves["item_id"])
    adds: list[PartFile] = []
    removes: list[str] = []

    def replace(part: PartFile) -> tuple[bool, PartFile | None]:
        """Return whether the part file leaves, and the file with its remaining rows."""
        rows = table.read(["item_id", *moves.schema.names[1:]], [part.path])
        stays = pc.invert(leaving.are_listed(rows["item_id"]))
        moves_here = moves.take(moving.find_among(rows["item_id"]))
        num_left = pc.sum(stays).as_py() or 0
        if num_left == rows.num_rows and move_rows(rows, moves_here).equals(rows):
            return False, None
        if not num_left:
            return True, None
        content = table.read(paths=[part.path]).filter(stays)
        return True, _rewrite(work, table, part.path, move_rows(content, moves_here))

    touched = [each for each in parts if leaving.any_between(each.id_range) or moving.any_between(each.id_range)]
    for part, (leaves, rest) in zip(touched, rewrite_each(replace, touched), strict=True):
        removes += [part.path] if leaves else []
        adds += [rest] if rest is not None else []
    return adds, removes


def _leaving(work: Publication, table: RecordTable) -> pa.ChunkedArray:
    """Return ids of items whose rows in a table are replaced or removed; if many are new, only those it holds."""
    whole, ids = work.whole, KEYS.remove(1)
    are_many = whole.num_rows > MANY_IDS
    held = hash_rows(table.pieces(["item_id"]) if are_many else (), ids)
    num_parts = common_parts(whole, held)
    found = [work.retired]
    for number in range(num_parts):
        items = whole.part(number, num_parts)
        if table.name == "embeddings":
            items = _with_new_rows(items)
            items = items.filter(pc.greater(items["num_vectors"], 0))
        own = items["item_id"]
        if are_many:
            own = own.filter(pc.is_in(own, value_set=held.part(number, num_parts)["item_id"].combine_chunks()))
        found.append(own)
    return pa.chunked_array([chunk for column in found for chunk in column.chunks], pa.string())


def _rewrite(work: Publication, table: RecordTable, path: str, content: pa.Table) -> PartFile:
    new_path = rewritten_name(work.run_id, work.intent.session, "rewrite", [path])
    return store_part(work.files, table.name, new_path, content, work.intent.session)
