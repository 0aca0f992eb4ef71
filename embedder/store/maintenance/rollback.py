"""Rollback: publishes an earlier publication again and holds it until it is released."""

import logging

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import Current, Hold, Published
from embedder.store.publish.current import IndexChoice, begin, move_current, parts_at, publish_files, writable
from embedder.store.publish.history import check_readable, find_publication, one_before, publications
from embedder.store.publish.tombstones import check_purges

LOG = logging.getLogger(__name__)


def rollback(files: StoreFiles, run_id: str | None, choose_index: IndexChoice) -> Published:
    """Publish the rows of an earlier run again, under that run's model, and hold the store there.

    Nothing is lost: the versions in between stay in the history, so a rollback to one of them undoes this one. `embed`
    and `refresh` publish nothing until `release`. For them, items that the sources have brought since are new or
    changed again, and their vectors are taken from the versions in between.

    The caller holds the write lock. None means the publication before the current one. Raises StoreError if there is no
    such publication, it is the current one or no longer readable, or a purge was interrupted.
    """
    current = writable(files)
    check_purges(files)
    target = _target(files, current, run_id)
    check_readable(files, target)
    for run in unfinished_runs(files):
        LOG.info(f"run {run.run_id} was not finished and is given up: what it embedded is not used")
    operation = begin(files, "rollback", target)
    # Of consecutive rollbacks, the first one started from the most complete publication; after a release, this one.
    from_run = current.hold.from_run if current.hold is not None and current.is_held else current.run_id
    hold = Hold(since=files.environment.now(), from_run=from_run, to_run=target.run_id)
    parts = parts_at(files, target)
    return publish_files(files, operation, target, parts, choose_index, restores=target.run_id, hold=hold)


def release(files: StoreFiles) -> Hold | None:
    """Allow `embed` and `refresh` to publish again; until then the rows stay as they are.

    Returns the released hold, None if there was none. Raises StoreError if there is no store, no publication, or an
    older format, and LeaseLostError if another run has taken over the store.
    """
    current = writable(files)
    if current.hold is None or not current.is_held:
        return None
    released = current.hold.model_copy(update={"released_at": files.environment.now()})
    move_current(files, current.model_copy(update={"hold": released}))
    return released


def _target(files: StoreFiles, current: Current, run_id: str | None) -> Published:
    if run_id is not None:
        target = find_publication(files, run_id)
        if target.run_id == current.run_id:
            raise StoreError(
                f"store {files.address}: run {run_id} is what is published now; name another to go back to"
            )
        return target
    before = one_before(publications(files))
    if before is None:
        raise StoreError(
            f"store {files.address}: nothing was published before {current.run_id}, as far as its records say; "
            "there is nothing to go back to"
        )
    return before
