"""What rollback, compaction, purge and migration share: a run of their own, one set of files a table, one swap.

Each can be done again after a crash: a table's commit is what its newest version lacks of the wanted files, so that it
also mends what an unfinished commit of somebody else left behind.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embedder.store.current import swap_current
from embedder.store.files import StoreFiles
from embedder.store.journal import PartFile
from embedder.store.layout import Current, Kind, Published, RunInfo, utc_now
from embedder.store.runs import begin_operation
from embedder.store.schema import TABLES
from embedder.store.store_info import MODEL_FIELDS, check_writable, published, read_store_info, served_info
from embedder.store.tables import RecordTable

IndexChoice = Callable[[Current], int | None]
"""Given a publication whose tables are committed, its `index` a proposal, gives the number of its index."""

Say = Callable[[str], None]


def writable(files: StoreFiles) -> Current:
    """What is published, of a store that may be written to.

    Raises:
        StoreError: there is no store, nothing is published, or the store is of an older format.
    """
    check_writable(files, read_store_info(files))
    return published(files)


def parts_at(files: StoreFiles, version: Current) -> dict[str, list[PartFile]]:
    """The files that hold a publication, by table."""
    return {name: table_at(files, name, version).parts() for name in TABLES}


def table_at(files: StoreFiles, name: str, version: Current) -> RecordTable:
    """One table of a publication; one without files where nothing was ever committed to it."""
    number = getattr(version, name)
    return RecordTable(files, name, number if number >= 0 else None)


def begin(files: StoreFiles, kind: Kind, version: Current) -> RunInfo:
    """Start the run that will publish a successor of some version; unfinished runs before it are given up by that."""
    return begin_operation(files, kind, served_info(read_store_info(files), version))


def publish_files(
    files: StoreFiles,
    run: RunInfo,
    like: Current,
    wanted: Mapping[str, Sequence[PartFile]],
    choose_index: IndexChoice,
    **said: Any,
) -> Published:
    """Commit the wanted files and make them what readers see.

    Args:
        files: the store, held by the write lock.
        run: the operation.
        like: the publication whose model, figures and index the new one has.
        wanted: by table, the files that the new version holds, no other; they exist.
        choose_index: is asked between the tables and the swap.
        said: what CURRENT.json says beside.

    Returns:
        The new publication.
    """
    versions = {name: RecordTable(files, name).commit_files(run.run_id, wanted[name]) for name in TABLES}
    info = served_info(read_store_info(files), like)
    candidate = Current(
        run_id=run.run_id,
        **versions,
        index=like.index,
        published_at=utc_now(),
        **{name: getattr(info, name) for name in MODEL_FIELDS},
        retrieval=like.retrieval,
        **said,
    )
    candidate = candidate.model_copy(update={"index": choose_index(candidate)})
    return swap_current(files, candidate, run.kind)
