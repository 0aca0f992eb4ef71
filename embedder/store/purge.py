"""Remove items for good: from what is published, from every older version, and from every text; and prove it.

The order makes each step repeatable: the items are first remembered as purged, so that nobody brings them back, then
the published state loses them, and only then older files go. Killed anywhere, the same command goes on.
"""

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import RunFailed
from embedder.store.binding import check_writable, read_store_info
from embedder.store.file_scan import Scan, has_any, holds, scan_store
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.history import part_files, publications, readable
from embedder.store.item_names import ItemNames
from embedder.store.journal import Part, read_entry
from embedder.store.layout import Current, Published, RunInfo, read_current
from embedder.store.maintenance import IndexChoice, Say, begin, parts_at, publish_files, table_at
from embedder.store.parts import rewritten_name, store_part
from embedder.store.purged import remember_purged
from embedder.store.purged_indexes import caption_vectors, holding_indexes
from embedder.store.runs import unfinished_runs
from embedder.store.schema import TABLES
from embedder.store.scrub import scrub_logs, scrub_texts
from embedder.store.tables import RecordTable


@dataclass(frozen=True)
class Purge:
    """What a purge did, and what a search of the whole store found afterwards.

    Attributes:
        num_asked: items that were to be purged.
        num_published: those of them that were published until now.
        num_vectors: their rows in embeddings.
        num_files_deleted: part files, journal entries and index files that held or named them.
        num_files_changed: texts and log entries that named them.
        unreadable: run ids of the publications that can't be read any more, as they held the items.
        published: the new publication, none where the published state did not hold them.
        scan: the search.
    """

    num_asked: int
    num_published: int
    num_vectors: int
    num_files_deleted: int
    num_files_changed: int
    unreadable: tuple[str, ...]
    published: Published | None
    scan: Scan


def purge(files: StoreFiles, item_ids: Collection[str], choose_index: IndexChoice, say: Say) -> Purge:
    """Remove items for good.

    Args:
        files: the store, held by the write lock.
        item_ids: the items.
        choose_index: gives the new publication its index, where the old one held them: builds it, or none.
        say: is told what happens.

    Raises:
        StoreError: there is no store, or it is of an older format.
        RunFailed: something of them is still found afterwards.
    """
    check_writable(files, read_store_info(files))
    ids = frozenset(item_ids)
    names = ItemNames(ids, _uris(files, ids))
    indexes = holding_indexes(files, names, caption_vectors(files, ids))
    remember_purged(files, ids)
    current = read_current(files)
    num_published, num_vectors = _count(files, current, ids)
    before = readable(files, publications(files))
    new = _publish_without(files, current, ids, indexes, choose_index, say) if current is not None else None
    num_changed = scrub_logs(files, names) + scrub_texts(files, names)  # as long as part files tell the URIs
    num_deleted = _delete_holders(files, names, indexes)
    scan = scan_store(files, names)
    if scan.found_in:
        raise RunFailed(
            f"purge: {len(scan.found_in):,} of {scan.num_files:,} files still hold or name an item: "
            f"{', '.join(scan.found_in[:5])}; nothing that is published holds them; purge again, or delete these files"
        )
    lost = before - readable(files, publications(files))
    return Purge(len(ids), num_published, num_vectors, num_deleted, num_changed, tuple(sorted(lost)), new, scan)


def _uris(files: StoreFiles, ids: frozenset[str]) -> set[str]:
    """Under which addresses the items were read, as any part file tells; texts may name them by these."""
    found: set[str] = set()
    for name in TABLES:
        table = RecordTable(files, name)
        for path in part_files(files, name):
            rows = table.read(["item_id", "uri"], [path])
            found.update(rows.filter(_is_one_of(rows, ids))["uri"].drop_null().to_pylist())
    return found


def _is_one_of(rows: pa.Table, ids: frozenset[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["item_id"], value_set=pa.array(sorted(ids), pa.string()))


def _count(files: StoreFiles, current: Current | None, ids: frozenset[str]) -> tuple[int, int]:
    """Rows of the items in what is published: records and vectors."""
    counts = dict.fromkeys(TABLES, 0)
    if current is None:
        return 0, 0
    for name in TABLES:
        table = table_at(files, name, current)
        for path in table.paths():
            rows = table.read(["item_id"], [path])
            counts[name] += pc.sum(_is_one_of(rows, ids)).as_py() or 0
    return counts["items"], counts["embeddings"]


def _publish_without(
    files: StoreFiles,
    current: Current,
    ids: frozenset[str],
    indexes: Collection[str],
    choose_index: IndexChoice,
    say: Say,
) -> Published | None:
    """A publication whose files hold none of the items; none where they don't anyway, nor does the newest version.

    The index may hold items that left the tables before: it masks what is gone, until it is built anew.
    """
    is_indexed = current.index is not None and _index_folder(current.index) in indexes
    parts = parts_at(files, current)
    newest = {name: RecordTable(files, name).parts() for name in TABLES}
    holding = {name: _holding(files, name, [*parts[name], *newest[name]], ids) for name in TABLES}
    if not any(holding.values()) and not is_indexed:
        return None
    for run in unfinished_runs(files):
        say(f"run {run.run_id} was not finished and is given up: the next run embeds its items again")
    operation = begin(files, "purge", current)
    wanted = {name: [*_rewritten(files, operation, name, parts[name], holding[name], ids)] for name in TABLES}

    def choose(candidate: Current) -> int | None:
        return choose_index(candidate) if is_indexed else candidate.index

    return publish_files(files, operation, current, wanted, choose)


def _holding(files: StoreFiles, name: str, parts: list[Part], ids: frozenset[str]) -> set[str]:
    table = RecordTable(files, name)
    return {part.path for part in parts if has_any(table.read(["item_id"], [part.path])["item_id"], ids)}


def _rewritten(
    files: StoreFiles, run: RunInfo, name: str, parts: list[Part], holding: set[str], ids: frozenset[str]
) -> list[Part]:
    """The files as they are, those that hold an item written anew without it."""
    wanted = [part for part in parts if part.path not in holding]
    table = RecordTable(files, name)
    for part in parts:
        if part.path not in holding:
            continue
        rows = table.read(paths=[part.path])
        rest = rows.filter(pc.invert(_is_one_of(rows, ids)))
        if rest.num_rows:
            path = rewritten_name(run.run_id, "purge", [part.path])
            wanted.append(store_part(files, name, path, rest, session=""))
    return wanted


def _index_folder(number: int) -> str:
    return f"index/{number:06d}"


def _delete_holders(files: StoreFiles, names: ItemNames, indexes: Collection[str]) -> int:
    """Delete part files, journal entries, lists of ids and whole index versions with an item; returns how many."""
    infos = list(files.list(""))
    parts = {info.path for info in infos if _is_part(info) and holds(files, info, names)}
    entries = [info.path for info in infos if "/journal/" in info.path and _tells_of(files, info, parts, names)]
    lists = [
        info.path for info in infos if info.path.startswith("runs/") and _is_parquet(info) and holds(files, info, names)
    ]
    of_indexes = [info.path for info in infos if info.path.rpartition("/")[0] in indexes]
    # An index version without its manifest is none, and a part file without its journal entry: so those go first.
    of_indexes.sort(key=lambda path: not path.endswith("/manifest.json"))
    doomed = [*of_indexes, *entries, *lists, *sorted(parts)]
    files.confirm_lease()
    for path in doomed:
        files.delete(path)
    return len(doomed)


def _is_part(info: FileInfo) -> bool:
    return info.path.rpartition("/")[0] in TABLES and _is_parquet(info)


def _is_parquet(info: FileInfo) -> bool:
    return info.path.endswith(".parquet")


def _tells_of(files: StoreFiles, info: FileInfo, parts: set[str], names: ItemNames) -> bool:
    """Whether a journal entry names an item, or a part file that goes."""
    entry = read_entry(files, info.path)
    return any(f"{part.table}/{part.path}" in parts for part in entry.parts) or holds(files, info, names)
