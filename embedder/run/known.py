"""What a store and the journal of its unfinished run already know about items."""

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.run.diff import KNOWN
from embedder.store.binding import published
from embedder.store.files import StoreFiles
from embedder.store.journal import read_entries, read_keys
from embedder.store.layout import RunInfo, read_current, read_record, run_file
from embedder.store.runs import Run, finished_items
from embedder.store.schema import ITEMS
from embedder.store.tables import RecordTable


def known_items(run: Run, *, retry_rejects: bool = False) -> pa.Table:
    """Items that need not be embedded again as they are; the journal's word counts before the table's.

    Items that failed in passing (`transient`) are not among them, nor, with `retry_rejects`, are the published rejects.
    """
    finished = finished_items(run)
    published = _published_items(run, retry_rejects)
    older = published.join(finished.select(["item_id"]), "item_id", join_type="left anti")
    return pa.concat_tables([finished.select(KNOWN.names).cast(KNOWN), older.select(KNOWN.names).cast(KNOWN)])


def _published_items(run: Run, retry_rejects: bool) -> pa.Table:
    current = read_current(run.files)
    if current is None:
        return KNOWN.empty_table()
    items = RecordTable(run.files, "items", current.items).read([*KNOWN.names, "state", "transient"])
    again = pc.equal(items["state"], "rejected")
    if not retry_rejects:
        again = pc.and_(again, pc.fill_null(items["transient"], False))
    return items.filter(pc.invert(again))


def rejected_items(files: StoreFiles, run_id: str | None = None) -> pa.Table:
    """Rejected items: of what is published, or of one run, published or not.

    Raises:
        StoreError: there is no such store or run, or nothing is published.
    """
    if run_id is None:
        items = RecordTable(files, "items", published(files).items).read()
    else:
        info = read_record(files, run_file(run_id, "run.json"), RunInfo)
        if info is None:
            raise StoreError(f"store {files.root}: no run {run_id}; `ls {files.root}/runs` names those that there are")
        items = read_keys(files, read_entries(files, run_id), "items", ITEMS.names)
    return items.filter(pc.equal(items["state"], "rejected")).select(ITEMS.names)
