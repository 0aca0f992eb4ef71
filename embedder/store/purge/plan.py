"""Plan of a purge: files to delete, change and rewrite, found by a search of every file of the store."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from embedder.store.delta_log import LOG_FOLDER, places_of, replay
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.history import publications, readable
from embedder.store.journal import read_entry
from embedder.store.layout import Current, read_current
from embedder.store.purge.audit import caption_vectors, is_among, is_free_text, names_in
from embedder.store.purge.id_matcher import ItemNames
from embedder.store.purge.tombstones import purged_before
from embedder.store.purge.unknown_ids import refuse_unknown
from embedder.store.runs import unfinished_runs
from embedder.store.schema import TABLES
from embedder.store.store_info import check_writable, read_store_info
from embedder.store.tables import RecordTable

Named = Mapping[FileInfo, frozenset[str]]
"""Files other than part files -> the ids and URIs in them."""


@dataclass(frozen=True)
class PurgedItem:
    """Item that is to be purged.

    Attributes:
        item_id: id of the item.
        is_published: whether the published items include it.
        num_vectors: its rows in the published embeddings.
        was_purged: whether an earlier purge included it; with nothing left of it, that one is complete.
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
        rewritten: part files that some readable publication needs: they are rewritten in place, without the items.
        published: those of them whose other rows are published again, as new files.
        deleted: files that are useless without the items, in the order of their deletion: index versions, journal
            entries, lists of ids, part files of no publication.
        changed: texts in which the names are redacted, and entries of the tables' logs that mention the items or a
            rewritten part file.
        indexes: folders of the index versions in `deleted`.
        versions: run ids of the publications that hold the items; they stay readable, without them.
        publishes: whether a new publication replaces the current one.
        given_up: run ids of the unfinished runs that can't be resumed after that.
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
        """Ids of the items."""
        return self.names.ids

    @property
    def num_published(self) -> int:
        """Number of the items that are published."""
        return sum(item.is_published for item in self.items)

    @property
    def num_vectors(self) -> int:
        """Number of their rows in the published embeddings."""
        return sum(item.num_vectors for item in self.items)

    @property
    def bytes_rewritten(self) -> int:
        """Size of the part files that are rewritten; those that are published again count twice."""
        return sum(info.size_bytes for info in (*self.rewritten, *self.published))

    @property
    def finds_nothing(self) -> bool:
        """Whether nothing of the items is left after an earlier purge."""
        return not (self.publishes or self.rewritten or self.deleted or self.changed)


@dataclass(frozen=True)
class _HeldRows:
    """Rows of the items in one part file.

    Attributes:
        info: the file.
        num_rows: item_id -> number of rows.
        uris: URIs from which the items were read.
    """

    info: FileInfo
    num_rows: Counter[str]
    uris: frozenset[str]


def plan_purge(files: StoreFiles, item_ids: Collection[str]) -> PurgePlan:
    """Search the whole store for some items, and decide what to do with each file that has them.

    Args:
        files: the store; no other process writes to it.
        item_ids: the items.

    Raises:
        StoreError: there is no store, it is of an older format, a file of it can't be read, or an id is unknown: no
            table, log or index has it in any version, and it was not purged before.
    """
    check_writable(files, read_store_info(files))
    infos, ids = list(files.list("")), frozenset(item_ids)
    held = _held_rows(files, infos, ids)
    names = ItemNames(ids, frozenset().union(*(rows.uris for rows in held.values())))
    others = [info for info in infos if not is_part(info)]
    found = files.each(lambda info: names_in(files, info, names), others)
    named = {info: each for info, each in zip(others, found, strict=True) if each}
    purged = purged_before(files, ids)
    # A word in a text that equals an id may be anything: a misspelt id, a URI.
    known = purged.union(
        *(rows.num_rows for rows in held.values()), *(found for info, found in named.items() if not is_free_text(info))
    )
    texts = {each: [info.path for info, found in named.items() if each in found] for each in ids - known}
    refuse_unknown(files, texts, len(ids))
    current = read_current(files)
    needs = _needs(files, current, held)
    needed = frozenset().union(*needs.values())
    published = needs[current.run_id] if current is not None else frozenset()
    indexes = _indexes(files, infos, names, held, named)
    publishes = current is not None and _is_behind(files, current, published, held, indexes)
    in_indexes = [info for info in infos if info.path.rpartition("/")[0] in indexes]
    deleted = [
        # The manifest first, without which the rest is no version.
        *sorted(in_indexes, key=lambda info: not info.path.endswith("/manifest.json")),
        *_entries(files, infos, held, named),
        *(info for info in named if info.path.startswith("runs/") and _is_parquet(info)),
        *(rows.info for path, rows in sorted(held.items()) if path not in needed),
    ]
    return PurgePlan(
        items=tuple(_items(names.ids, [held[path] for path in published], purged)),
        names=names,
        rewritten=tuple(held[path].info for path in sorted(needed)),
        published=tuple(held[path].info for path in sorted(published)),
        deleted=tuple(deleted),
        changed=tuple(_changed(files, infos, needed, named, set(deleted))),
        indexes=indexes,
        versions=tuple(run_id for run_id, paths in needs.items() if paths),
        publishes=publishes,
        given_up=tuple(run.run_id for run in unfinished_runs(files)) if publishes else (),
    )


def _held_rows(files: StoreFiles, infos: Sequence[FileInfo], ids: Collection[str]) -> dict[str, _HeldRows]:
    """Path of a part file -> rows of the items in it, where it has any."""
    tables = {name: RecordTable(files, name) for name in TABLES}

    def read(info: FileInfo) -> _HeldRows:
        name, _, path = info.path.partition("/")
        rows = tables[name].read(["item_id", "uri"], [path])
        rows = rows.filter(is_among(rows["item_id"], ids))
        return _HeldRows(info, Counter(rows["item_id"].to_pylist()), frozenset(rows["uri"].drop_null().to_pylist()))

    found = files.each(read, [info for info in infos if is_part(info)])
    return {rows.info.path: rows for rows in found if rows.num_rows}


def _needs(files: StoreFiles, current: Current | None, held: Mapping[str, _HeldRows]) -> dict[str, frozenset[str]]:
    """Run id of each readable publication, including the current one -> the part files in `held` that it needs."""
    versions: dict[str, Current] = {version.run_id: version for version in publications(files)}
    if current is not None:
        versions[current.run_id] = current
    whole = readable(files, versions.values())
    kept = {run_id: version for run_id, version in versions.items() if run_id in whole or version is current}
    needs = dict.fromkeys(kept, frozenset[str]())
    for name in TABLES:
        paths = {path.removeprefix(f"{name}/") for path in held if path.startswith(f"{name}/")}
        numbers = {run_id: getattr(version, name) for run_id, version in kept.items() if getattr(version, name) >= 0}
        wanted = set(numbers.values())
        replayed = replay(files, name, wanted)
        if replayed is None:
            found = {number: paths.intersection(RecordTable(files, name, number).paths()) for number in wanted}
        else:
            found = {number: paths & in_version for number, in_version in replayed}
        for run_id, number in numbers.items():
            needs[run_id] |= {f"{name}/{path}" for path in found[number]}
    return needs


def _is_behind(
    files: StoreFiles,
    current: Current,
    published: Collection[str],
    held: Collection[str],
    indexes: Collection[str],
) -> bool:
    """Whether the publication, or a table's newest version, which other readers open, has to be replaced.

    The index may hold items that left the tables before: it masks them until it is rebuilt.
    """
    newest = (f"{name}/{path}" for name in TABLES for path in RecordTable(files, name).paths())
    is_indexed = current.index is not None and index_folder(current.index) in indexes
    return bool(published) or is_indexed or any(path in held for path in newest)


def _indexes(
    files: StoreFiles, infos: Sequence[FileInfo], names: ItemNames, held: Mapping[str, _HeldRows], named: Named
) -> frozenset[str]:
    """Folders of the index versions with data of the items: ids, also of masked rows, or vectors of their captions.

    An index holds captions' vectors, as its recall is measured on them after each update; they have no id, so they are
    searched by value. An item's caption may be there though it has no image, and none of its ids is.
    """
    paths = [path.removeprefix("embeddings/") for path in held if path.startswith("embeddings/")]
    vectors = caption_vectors(files, names.ids, paths)
    found = [info for info in named if info.path.startswith("index/") and info.path.endswith("/ids.parquet")]
    for info in infos if vectors else ():
        if info.path.startswith("index/") and info.path.endswith("/queries.npz"):
            content = files.read(info.path)  # uncompressed: it contains the bytes of the vectors
            if any(vector in content for vector in vectors):
                found.append(info)
    return frozenset(info.path.rpartition("/")[0] for info in found)


def _items(ids: Collection[str], published: Sequence[_HeldRows], purged: Collection[str]) -> list[PurgedItem]:
    rows = {name: Counter[str]() for name in TABLES}
    for part in published:
        rows[part.info.path.partition("/")[0]] += part.num_rows
    return [PurgedItem(each, each in rows["items"], rows["embeddings"][each], each in purged) for each in sorted(ids)]


def _entries(
    files: StoreFiles, infos: Sequence[FileInfo], held: Mapping[str, _HeldRows], named: Named
) -> list[FileInfo]:
    """Journal entries that name an item, or a part file with one: they are deleted before that file."""
    entries = [info for info in infos if "/journal/" in info.path and info.path.endswith(".json")]
    parts_by_entry = files.each(lambda info: read_entry(files, info.path).parts, entries)
    return [
        info
        for info, parts in zip(entries, parts_by_entry, strict=True)
        if info in named or any(f"{part.table}/{part.path}" in held for part in parts)
    ]


def _changed(
    files: StoreFiles,
    infos: Sequence[FileInfo],
    needed: Collection[str],
    named: Named,
    deleted: Collection[FileInfo],
) -> list[FileInfo]:
    logs: set[str] = set()
    for name in TABLES:
        paths = {path.removeprefix(f"{name}/") for path in needed if path.startswith(f"{name}/")}
        logs.update(*places_of(files, name, paths).values())
    texts = {info for info in named if is_free_text(info) or f"/{LOG_FOLDER}/" in info.path}
    return [info for info in infos if info.path in logs or (info in texts and info not in deleted)]


def is_part(info: FileInfo) -> bool:
    """Whether a file is a part file of a table."""
    return info.path.rpartition("/")[0] in TABLES and _is_parquet(info)


def index_folder(number: int) -> str:
    """Folder of an index version."""
    return f"index/{number:06d}"


def _is_parquet(info: FileInfo) -> bool:
    return info.path.endswith(".parquet")
