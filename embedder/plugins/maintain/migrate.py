"""Migration of a store of an older format to this one, without touching a vector."""

import logging

from embedder.store.files import StoreFiles
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import STORE_FILE, Published, read_current, write_record
from embedder.store.maintenance.compact import same_index
from embedder.store.publish.current import begin, parts_at, publish_files
from embedder.store.schema import FORMAT_VERSION, TABLES
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)


def migrate(files: StoreFiles) -> tuple[bool, Published | None]:
    """Add the columns and records that an older store format lacks; does nothing if it lacks none.

    store.json is written last, so a store whose migration was killed still has the old format: readers read it as
    before, writers ask for the migration again. Returns whether the store's format was older, and the new publication,
    if any. Raises StoreError if there is no store, or its format is unknown.
    """
    info = read_store_info(files)
    if info.format_version == FORMAT_VERSION:
        return False, None
    current = read_current(files)
    for run in unfinished_runs(files):
        LOG.info(f"run {run.run_id} was not finished and is given up: the next run embeds its items again")
    for name, schema in TABLES.items():
        RecordTable(files, name).add_columns(schema)
    operation = begin(files, "migration", current)
    new = None
    if current is not None:
        new = publish_files(files, operation, current, parts_at(files, current), same_index)
    served = served_info(info, read_current(files))
    write_record(files, STORE_FILE, served.model_copy(update={"format_version": FORMAT_VERSION}))
    return True, new
