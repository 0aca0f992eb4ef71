"""What a run's journal adds up to, committed: embeddings, items, then CURRENT.json, which makes it visible.

Every step can be repeated: a commit bears its run's id and is made once, and the files a step writes have names that
follow from what they hold. So a crash between any two steps is mended by doing all of them again.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry, Part, parts_of, read_keys, whole_items
from embedder.store.layout import CURRENT_FILE, Current, utc_now, write_record
from embedder.store.parts import Stamp, store_part
from embedder.store.runs import Run
from embedder.store.schema import TABLES, with_carryover
from embedder.store.tables import Change, RecordTable

IndexBuilder = Callable[[int], int | None]
"""Given the embeddings version that is about to be published, makes an index of it and returns its number."""


@dataclass(frozen=True)
class Publication:
    """A run's finished work, on its way into the tables."""

    run: Run
    stamp: Stamp
    entries: list[JournalEntry]
    whole: pa.Table

    @property
    def files(self) -> StoreFiles:
        """The store."""
        return self.run.files


def publish(run: Run, stamp: Stamp, build_index: IndexBuilder) -> Current:
    """Commit what the run finished and make it what readers see.

    Args:
        run: the run, all of whose tasks have ended.
        stamp: its constants; the carried columns among them.
        build_index: called between the tables and CURRENT.json, so that the three belong together.
    """
    entries = run.entries()
    records = read_keys(run.files, entries, "items", ["item_id", "num_vectors"])
    vectors = read_keys(run.files, entries, "embeddings", ["item_id", "segment"])
    work = Publication(run, stamp, entries, whole_items(records, vectors))
    versions = {
        "embeddings": _commit(work, "embeddings", vectors, stamp.carryover),
        "items": _commit(work, "items", records, pa.schema([])),
    }
    current = Current(
        run_id=run.run_id,
        **versions,
        index=build_index(versions["embeddings"]),
        published_at=utc_now(),
    )
    write_record(run.files, CURRENT_FILE, current)
    sweep(run)
    return current


def _commit(work: Publication, name: str, keys: pa.Table, carryover: pa.Schema) -> int:
    table = RecordTable(work.files, name)
    schema = with_carryover(TABLES[name], carryover)
    if table.committed(work.run.run_id):
        return table.version
    change = Change(adds=_own_parts(work, name, keys))
    _replace_older(work, table, change)
    return table.commit(work.run.run_id, change, schema)


def _own_parts(work: Publication, name: str, keys: pa.Table) -> list[Part]:
    """The run's part files, those with rows that do not count (torn or outdated items) written anew without them."""
    counting = keys.join(work.whole, ["item_id", "session"], join_type="left semi")
    counts = counting.group_by("path").aggregate([("item_id", "count")]).to_pylist()
    rows_by_path = {row["path"]: row["item_id_count"] for row in counts}
    parts = []
    for part in parts_of(work.entries, name):
        num_counting = rows_by_path.get(part.path, 0)
        if num_counting == part.num_rows:
            parts.append(part)
        elif num_counting:
            whole_here = work.whole.filter(pc.equal(work.whole["session"], part.session))
            parts.append(_without(work, RecordTable(work.files, name), part.path, whole_here["item_id"], keep=True))
    return parts


def _replace_older(work: Publication, table: RecordTable, change: Change) -> None:
    """Copy-on-write: files with older rows of the same items leave; what else they hold joins again.

    An item that could not be read now keeps the vectors that it had.
    """
    whole = work.whole
    if table.name == "embeddings":
        whole = whole.filter(pc.greater(whole["num_vectors"], 0))
    for path in table.paths():
        ids = table.read(["item_id"], [path])["item_id"]
        num_replaced = pc.sum(pc.is_in(ids, value_set=whole["item_id"].combine_chunks())).as_py()
        if num_replaced:
            change.removes.append(path)
        if num_replaced and num_replaced < len(ids):
            change.adds.append(_without(work, table, path, whole["item_id"], keep=False))


def _without(work: Publication, table: RecordTable, path: str, ids: pa.ChunkedArray, *, keep: bool) -> Part:
    """Write a part file anew with (`keep`) or without the rows of some items."""
    content = table.read(paths=[path])
    listed = pc.is_in(content["item_id"], value_set=ids.combine_chunks())
    content = content.filter(listed if keep else pc.invert(listed))
    digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
    new_path = f"part-{work.run.run_id}-rewrite-{digest}.parquet"  # of one length, however often it was rewritten
    return store_part(work.files, table.name, new_path, content, work.stamp.session)


def sweep(run: Run) -> None:
    """Delete the run's part files that no version holds: of write tasks that were cut off, and rewritten ones."""
    for name in TABLES:
        table = RecordTable(run.files, name)
        kept = set(table.paths())
        for info in run.files.list(name):
            path = info.path.removeprefix(f"{name}/")
            if path.startswith(f"part-{run.run_id}-") and path not in kept:
                run.files.delete(info.path)
