"""Plan of a purge: files to delete, change or rewrite, found by searching all files of the store and its models."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from embedder.plugins.maintain.purge.audit import (
    caption_vectors,
    is_among,
    is_checksum,
    is_free_text,
    may_hold,
    names_in,
)
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.plugins.maintain.purge.unknown_ids import refuse_unknown
from embedder.store.backends import FileInfo, manifests_first
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry, read_entry
from embedder.store.journal.journal_segments import is_segment, segment_lines
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import INPUT_FOLDER, Current, parse_record, read_current
from embedder.store.publish.current import model_folder, of_model
from embedder.store.publish.history import publications, readable
from embedder.store.publish.tombstones import purged_before
from embedder.store.schema import ITEMS, TABLES
from embedder.store.store_info import check_writable, read_store_info
from embedder.store.tables.delta_log import LOG_FOLDER, places_of, replay
from embedder.store.tables.models import MODELS_FOLDER, model_files
from embedder.store.tables.row_folders import ROWS_FOLDER
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import WORDS_FOLDER
from shards.file_schema import parse_json

_FOLDER = rf"(?:{MODELS_FOLDER}/(?P<model>[a-z][a-z0-9_]*)/)?"
_PART = re.compile(rf"{_FOLDER}(?P<table>{'|'.join(TABLES)})/(?P<path>[^/]+\.parquet)")
_INDEX = re.compile(rf"{_FOLDER}index/\d+/(?P<file>[^/]+)")
_ROWS = re.compile(rf"{_FOLDER}{ROWS_FOLDER}/.+")
_WORDS = re.compile(rf"{_FOLDER}{WORDS_FOLDER}/\d{{6,}}/.+")
_RUN = re.compile(rf"{_FOLDER}runs/(?P<path>.+)")
_INPUT = re.compile(rf"runs/[^/]+/{INPUT_FOLDER}/.+")

ITEM_PLACE = pa.schema([ITEMS.field("item_id"), ITEMS.field("uri")])
"""Columns of both tables, which other programs write as views of strings."""
Named = Mapping[FileInfo, frozenset[str]]
"""Files other than part files -> the ids and URIs in them."""


class PartPlace(NamedTuple):
    """Model of a part file (empty: the main one), its table, and its path relative to the table's folder."""

    model: str
    table: str
    path: str


@dataclass(frozen=True)
class PurgedItem:
    """Item to be purged.

    `is_published` is whether any model's published items include it; `num_vectors` counts its published rows over all
    models. `was_purged` is whether an earlier purge included it: if nothing is left of it, that purge is complete.
    """

    item_id: str
    is_published: bool
    num_vectors: int
    was_purged: bool


@dataclass(frozen=True)
class PurgePlan:
    """Plan of a purge.

    Attributes:
        items: the items, by id.
        names: ids and URIs that the store is searched for.
        rewritten: part files that a readable publication needs; they are rewritten in place, without the items.
        published: the part files in `rewritten` whose other rows are published again, as new files.
        deleted: files that are useless without the items, in the order of deletion: index versions, word indexes,
            journal entries, lists of ids, inputs of a killed run, part files of no publication.
        changed: texts in which the names are redacted, and log entries of tables that mention the items or a
            rewritten part file.
        indexes: folders of the index versions in `deleted`.
        versions: run ids of the publications that hold the items; they stay readable, without the items.
        publishes: whether a new publication replaces the current one.
        given_up: ids of unfinished runs that can't be resumed afterwards.
    """

    items: tuple[PurgedItem, ...]
    names: ItemNames
    rewritten: tuple[FileInfo, ...]
    published: tuple[FileInfo, ...]
    deleted: tuple[FileInfo, ...]
    changed: tuple[FileInfo, ...]
    indexes: frozenset[str]
    versions: tuple[str, ...]
    publishes: bool
    given_up: tuple[str, ...]

    @property
    def ids(self) -> frozenset[str]:
        """Return the ids of the items."""
        return self.names.ids

    @property
    def num_published(self) -> int:
        """Return the number of published items."""
        return sum(item.is_published for item in self.items)

    @property
    def num_vectors(self) -> int:
        """Return the number of published embeddings of the items."""
        return sum(item.num_vectors for item in self.items)

    @property
    def bytes_rewritten(self) -> int:
        """Return the size of the rewritten part files; those that are published again count twice."""
        return sum(info.size_bytes for info in (*self.rewritten, *self.published))

    @property
    def finds_nothing(self) -> bool:
        """Return whether an earlier purge has left nothing of the items."""
        return not (self.publishes or self.rewritten or self.deleted or self.changed)


@dataclass(frozen=True)
class _HeldRows:
    """Rows of the items in one part file: their number by item id, and the URIs from which the items were read."""

    info: FileInfo
    num_rows: Counter[str]
    uris: frozenset[str]


def plan_purge(files: StoreFiles, item_ids: Collection[str]) -> PurgePlan:
    """Search the whole store for some items, and decide what to do with each file that contains them.

    Raises StoreError if there is no store, its format is older, a file can't be read, or an id is unknown: no table,
    log or index has it in any version, and it was never purged.
    """
    check_writable(files, read_store_info(files))
    infos, ids = list(files.list("")), frozenset(item_ids)
    held = _held_rows(files, infos, ids)
    names = ItemNames(ids, frozenset().union(*(rows.uris for rows in held.values())))
    named = _find_names(files, infos, names)
    purged = purged_before(files, ids)
    in_records = (found for info, found in named.items() if not is_free_text(info))  # a word in a text may be another
    unknown = (ids - purged).difference(*(rows.num_rows for rows in held.values()), *in_records)
    texts = {each: [info.path for info, found in named.items() if each in found] for each in unknown}
    refuse_unknown(files, texts, len(ids))
    current = read_current(files)
    needs = _needs(files, current, held)
    needed = frozenset().union(*needs.values(), _newest_unpublished(files, current, held))
    published = needs[current.run_id] if current is not None else frozenset()
    indexes = _indexes(files, infos, names, held, named)
    publishes = current is not None and _is_behind(files, current, published, held, indexes)
    deleted = _list_deleted(files, infos, indexes, held, named, needed)
    shown = _published_rows(files, current, [held[path] for path in published])
    return PurgePlan(
        items=tuple(_items(names.ids, shown, purged, current)),
        names=names,
        rewritten=tuple(held[path].info for path in sorted(needed)),
        published=tuple(held[path].info for path in sorted(published)),
        deleted=tuple(deleted),
        changed=tuple(_select_changed(files, infos, needed, named, set(deleted), names, held)),
        indexes=indexes,
        versions=tuple(run_id for run_id, paths in needs.items() if paths),
        publishes=publishes,
        given_up=tuple(run.run_id for run in unfinished_runs(files)) if publishes else (),
    )


def _held_rows(files: StoreFiles, infos: Sequence[FileInfo], ids: Collection[str]) -> dict[str, _HeldRows]:
    """Return the items' rows in each part file that has any, by path, also rows that have left by a deletion vector."""
    parts = {info: place for info in infos if (place := place_of(info.path)) is not None}
    tables = {
        (place.model, place.table): RecordTable(model_files(files, place.model), place.table)
        for place in parts.values()
    }

    def read(info: FileInfo) -> _HeldRows:
        model, name, path = parts[info]
        rows = tables[model, name].read_stored(path, ["item_id", "uri"]).cast(ITEM_PLACE)
        rows = rows.filter(is_among(rows["item_id"], ids))
        return _HeldRows(info, Counter(rows["item_id"].to_pylist()), frozenset(rows["uri"].drop_null().to_pylist()))

    found = files.each(read, parts)
    return {rows.info.path: rows for rows in found if rows.num_rows}


def _published_rows(files: StoreFiles, current: Current | None, held: Sequence[_HeldRows]) -> list[_HeldRows]:
    """Return the items' rows in some published part files, without those that have left by a deletion vector."""
    found = []
    for rows in held:
        place = place_of(rows.info.path)
        own = None if place is None or current is None else of_model(current, place.model)
        if place is not None and own is not None:
            table = RecordTable(model_files(files, place.model), place.table, getattr(own, place.table))
            if table.marked_rows(place.path) is not None:
                ids = table.read(["item_id"], [place.path])["item_id"]
                counts = Counter(ids.filter(is_among(ids, rows.num_rows)).to_pylist())
                found.append(_HeldRows(rows.info, counts, rows.uris))
                continue
        found.append(rows)
    return found


def _find_names(files: StoreFiles, infos: Sequence[FileInfo], names: ItemNames) -> Named:
    """Search the files that are neither part files nor inputs of a run."""
    others = [info for info in infos if not (is_part(info) or _INPUT.fullmatch(info.path))]
    found = files.each(lambda info: names_in(files, info, names), others)
    return {info: each for info, each in zip(others, found, strict=True) if each}


def _needs(files: StoreFiles, current: Current | None, held: Collection[str]) -> dict[str, frozenset[str]]:
    """Return the part files in `held` that each readable publication, including the current one, needs; by run id."""
    versions: dict[str, Current] = {version.run_id: version for version in publications(files)}
    if current is not None:
        versions[current.run_id] = current
    whole = readable(files, versions.values())
    kept = {run_id: version for run_id, version in versions.items() if run_id in whole or version is current}
    needs = dict.fromkeys(kept, frozenset[str]())
    for (model, name), paths in _by_table(held).items():
        view, own = model_files(files, model), {run_id: of_model(version, model) for run_id, version in kept.items()}
        numbers = {run_id: getattr(each, name) for run_id, each in own.items() if each is not None}
        wanted = {number for number in numbers.values() if number >= 0}
        replayed = replay(view, name, wanted)
        if replayed is None:
            found = {number: paths.intersection(RecordTable(view, name, number).paths()) for number in wanted}
        else:
            found = {number: paths & in_version for number, in_version in replayed}
        for run_id, number in numbers.items():
            needs[run_id] |= {f"{model_folder(model)}{name}/{path}" for path in found.get(number, ())}
    return needs


def _newest_unpublished(files: StoreFiles, current: Current | None, held: Collection[str]) -> frozenset[str]:
    """Return part files in `held` of the newest version of each model's table, for models that aren't published.

    Other readers open that version, and a run that embeds with the model again builds on it.
    """
    tables = [key for key in _by_table(held) if key[0] and (current is None or key[0] not in current.models)]
    return frozenset().union(*(_newest(files, model, name) for model, name in tables)).intersection(held)


def _newest(files: StoreFiles, model: str, name: str) -> set[str]:
    paths = RecordTable(model_files(files, model), name).paths()
    return {f"{model_folder(model)}{name}/{path}" for path in paths}


def _by_table(paths: Collection[str]) -> dict[tuple[str, str], set[str]]:
    """Group part files by model and table; paths become relative to the table's folder."""
    found: dict[tuple[str, str], set[str]] = {}
    for place in filter(None, map(place_of, paths)):
        found.setdefault((place.model, place.table), set()).add(place.path)
    return found


def _is_behind(
    files: StoreFiles, current: Current, published: Collection[str], held: Collection[str], indexes: Collection[str]
) -> bool:
    """Return whether the publication, or a table's newest version that other readers open, must be replaced.

    An index may hold items that have left the tables; it masks them until it is rebuilt.
    """
    models = {"": current, **current.models}
    newest = (path for model in models for name in TABLES for path in _newest(files, model, name))
    is_indexed = any(
        own.index is not None and index_folder(own.index, model) in indexes for model, own in models.items()
    )
    return bool(published) or is_indexed or any(path in held for path in newest)


def _indexes(
    files: StoreFiles, infos: Sequence[FileInfo], names: ItemNames, held: Mapping[str, _HeldRows], named: Named
) -> frozenset[str]:
    """Return the folders of index versions with data of the items: ids (masked rows included) or caption vectors.

    An index keeps caption vectors to measure its recall after each update. They have no ids, so they are searched by
    value: an item's caption may be there even if the item has no image and none of its ids are.
    """
    vectors = frozenset[bytes]().union(
        *(
            caption_vectors(model_files(files, model), names.ids, paths)
            for (model, name), paths in _by_table(held).items()
            if name == "embeddings"
        )
    )
    found = [info for info in named if _is_index_file(info, r"ids\.parquet|ids-\d+\.arrow")]
    for info in infos if vectors else ():
        if _is_index_file(info, r"queries\.npz") and may_hold(files.read(info.path), vectors):
            found.append(info)
    return frozenset(info.path.rpartition("/")[0] for info in found)


def _list_deleted(
    files: StoreFiles,
    infos: Sequence[FileInfo],
    indexes: Collection[str],
    held: Mapping[str, _HeldRows],
    named: Named,
    needed: Collection[str],
) -> list[FileInfo]:
    """List files that are useless without the items, in the order of deletion."""
    return [
        *manifests_first(info for info in infos if info.path.rpartition("/")[0] in indexes),
        # The rows of word indexes move, and they hold what captions say.
        *manifests_first(info for info in infos if _WORDS.fullmatch(info.path) and (held or named)),
        *(info for info in infos if _ROWS.fullmatch(info.path) and (held or named)),  # searches make them again
        *_entries(files, infos, held, named),
        *(info for info in named if _RUN.fullmatch(info.path) and info.path.endswith(".parquet")),
        *(info for info in infos if _INPUT.fullmatch(info.path)),  # pictures, left by a killed run
        *(info for info in named if is_checksum(info)),
        *(rows.info for path, rows in sorted(held.items()) if path not in needed),
    ]


def _is_index_file(info: FileInfo, name: str) -> bool:
    match = _INDEX.fullmatch(info.path)
    return match is not None and re.fullmatch(name, match["file"]) is not None


def _items(
    ids: Collection[str], published: Sequence[_HeldRows], purged: Collection[str], current: Current | None
) -> list[PurgedItem]:
    rows = {name: Counter[str]() for name in TABLES}
    for part in published:
        place = place_of(part.info.path)
        own = of_model(current, place.model) if place is not None and current is not None else None
        if place is not None and (place.table == "items" or own is None or own.has_vectors is not False):
            rows[place.table] += part.num_rows
    return [PurgedItem(each, each in rows["items"], rows["embeddings"][each], each in purged) for each in sorted(ids)]


def _entries(
    files: StoreFiles, infos: Sequence[FileInfo], held: Mapping[str, _HeldRows], named: Named
) -> list[FileInfo]:
    """Return journal entries that name an item or a part file with one; they are deleted before that file."""
    matches = {info: match for info in infos if (match := _RUN.fullmatch(info.path)) is not None}
    entries = [info for info in matches if "/journal/" in info.path and info.path.endswith(".json")]
    parts_by_entry = files.each(lambda info: read_entry(files, info.path).parts, entries)
    folders = [model_folder(matches[info]["model"] or "") for info in entries]
    return [
        info
        for info, folder, parts in zip(entries, folders, parts_by_entry, strict=True)
        if info in named or any(f"{folder}{part.table}/{part.path}" in held for part in parts)
    ]


def _select_changed(
    files: StoreFiles,
    infos: Sequence[FileInfo],
    needed: Collection[str],
    named: Named,
    deleted: Collection[FileInfo],
    names: ItemNames,
    parts: Collection[str],
) -> list[FileInfo]:
    logs: set[str] = set()
    for (model, name), paths in _by_table(needed).items():
        found = places_of(model_files(files, model), name, paths).values()
        logs.update(model_folder(model) + path for paths_of_part in found for path in paths_of_part)
    texts = {info for info in named if is_free_text(info) or f"/{LOG_FOLDER}/" in info.path}
    texts |= {
        info
        for info in infos
        if is_segment(info.path) and split_segment(files, info.path, files.read(info.path), names, parts)[1]
    }
    return [info for info in infos if info.path in logs or (info in texts and info not in deleted)]


def split_segment(
    files: StoreFiles, path: str, content: bytes, names: ItemNames, parts: Collection[str]
) -> tuple[list[bytes], list[bytes]]:
    """Split a journal segment into lines that stay and lines that name an item or a part file with one."""
    match = _RUN.fullmatch(path)
    folder = model_folder((match["model"] if match is not None else None) or "")
    stays, goes = list[bytes](), list[bytes]()
    for _, line in segment_lines(content):
        entry = parse_record(files, path, line, JournalEntry)
        holds = any(f"{folder}{part.table}/{part.path}" in parts for part in entry.parts)
        (goes if holds or names.found_in(parse_json(line)) else stays).append(line)
    return stays, goes


def is_part(info: FileInfo) -> bool:
    """Return whether a file is a part file of a table."""
    return place_of(info.path) is not None


def place_of(path: str) -> PartPlace | None:
    """Return the place of a part file by its path in the store; None for any other file."""
    match = _PART.fullmatch(path)
    return None if match is None else PartPlace(match["model"] or "", match["table"], match["path"])


def index_folder(number: int, model: str = "") -> str:
    """Return the folder of an index version of a model; an empty name means the main model."""
    return f"{model_folder(model)}index/{number:06d}"
