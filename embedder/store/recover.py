"""Take back what an operation left in a table's newest version when it was killed between its commits and the swap."""

from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.schema import TABLES
from embedder.store.tables import RecordTable


def settle(files: StoreFiles, run_id: str | None = None) -> None:
    """Make each table's newest version hold what is published, so that changes start from there.

    Args:
        files: the store, held by the write lock.
        run_id: of a run that is about to publish; a commit that it has made already stays.
    """
    current = read_current(files)
    if current is None:
        return
    for name in TABLES:
        newest, number = RecordTable(files, name), getattr(current, name)
        if newest.version <= number or (run_id is not None and newest.committed(run_id)):
            continue
        mark = f"settled-{current.run_id}-{newest.version}"
        newest.commit_files(mark, RecordTable(files, name, number).parts())
