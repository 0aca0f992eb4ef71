"""What could not be embedded, and why: of what is published, or of one run."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.store.binding import published
from embedder.store.files import StoreFiles
from embedder.store.journal import read_entries, read_keys
from embedder.store.layout import RunInfo, read_record, run_file
from embedder.store.runs import RUN_FILE
from embedder.store.schema import ITEMS, with_nulls
from embedder.store.tables import RecordTable


def rejected_items(
    files: StoreFiles, run_id: str | None = None, wanted: Mapping[str, str | bool] | None = None
) -> pa.Table:
    """Items that could not be embedded, rejected or left out: of what is published, or of one run, published or not.

    Args:
        files: the store.
        run_id: of which run.
        wanted: values that columns of `items` must have.

    Raises:
        StoreError: there is no such store or run, or nothing is published.
    """
    if run_id is None:
        table = RecordTable(files, "items", published(files).items)
        tables = [_rejects(table.read(paths=[path])) for path in table.paths()]
        items = pa.concat_tables(tables) if tables else ITEMS.empty_table()
    else:
        info = read_record(files, run_file(run_id, RUN_FILE), RunInfo)
        if info is None:
            raise StoreError(
                f"store {files.address}: no run {run_id}; the folders in {files.uri('runs')} name those that there are"
            )
        items = _rejects(read_keys(files, read_entries(files, run_id), "items", ITEMS.names))
    for column, value in (wanted or {}).items():
        items = items.filter(pc.equal(pc.fill_null(items[column], "" if isinstance(value, str) else False), value))
    return items


def _rejects(items: pa.Table) -> pa.Table:
    """Those among items that could not be embedded, with all columns; an older format's have nulls in newer ones."""
    items = with_nulls(items, ITEMS)
    return items.filter(pc.not_equal(items["state"], "embedded")).select(ITEMS.names)
