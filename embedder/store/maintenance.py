"""Common steps of rollback, compaction, purge and migration: a run of their own, one set of files per table, one swap.

Each can be repeated after a crash: a table's commit is the difference between its newest version and the wanted files,
so that it also repairs what an unfinished operation left.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embedder.store.current import publish_current
from embedder.store.files import StoreFiles
from embedder.store.journal import PartFile
from embedder.store.layout import Current, Kind, Published, RunInfo, utc_now
from embedder.store.runs import begin_operation
from embedder.store.schema import TABLES
from embedder.store.store_info import MODEL_FIELDS, check_writable, published, read_store_info, served_info
from embedder.store.tables import RecordTable

IndexChoice = Callable[[Current], int | None]
"""Function from a publication whose tables are committed, with a proposed `index`, to the number of its index."""

Say = Callable[[str], None]


def writable(files: StoreFiles) -> Current:
    """Read what is published, and check that the store may be written to.

    Raises:
        StoreError: there is no store, nothing is published, or the store is of an older format.
    """
    check_writable(files, read_store_info(files))
    return published(files)


def parts_at(files: StoreFiles, version: Current) -> dict[str, list[PartFile]]:
    """Part files of a publication, by table."""
    return {name: table_at(files, name, version).parts() for name in TABLES}


def table_at(files: StoreFiles, name: str, version: Current) -> RecordTable:
    """Open one table of a publication; one without files where nothing was ever committed to it.

    Args:
        files: the store.
        name: name of the table.
        version: the publication.
    """
    number = getattr(version, name)
    return RecordTable(files, name, number if number >= 0 else None)


def begin(files: StoreFiles, kind: Kind, version: Current) -> RunInfo:
    """Start the run that will publish a successor of some version; earlier unfinished runs are abandoned by that.

    Args:
        files: the store, held by the write lock.
        kind: kind of the operation.
        version: the publication whose model it keeps.
    """
    return begin_operation(files, kind, served_info(read_store_info(files), version))


def publish_files(
    files: StoreFiles,
    run: RunInfo,
    like: Current,
    wanted: Mapping[str, Sequence[PartFile]],
    choose_index: IndexChoice,
    **fields: Any,
) -> Published:
    """Commit the wanted files and make them visible to readers.

    Args:
        files: the store, held by the write lock.
        run: the operation.
        like: the publication whose model, R@k and index the new one keeps.
        wanted: by table, the complete list of files of the new version; they exist.
        choose_index: called between the commits and CURRENT.json.
        fields: further fields of CURRENT.json.

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
        **fields,
    )
    candidate = candidate.model_copy(update={"index": choose_index(candidate)})
    return publish_current(files, candidate, run.kind)
