"""Rollback: an earlier publication is published again, and stays until it is released."""

import logging

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import (
    Current,
    Hold,
    Published,
)
from embedder.store.publish.current import (
    IndexChoice,
    begin,
    move_current,
    parts_at,
    publish_files,
    writable,
)
from embedder.store.publish.history import check_readable, find_publication, one_before, publications
from embedder.store.publish.tombstones import check_purges

LOG = logging.getLogger(__name__)


def rollback(files: StoreFiles, run_id: str | None, choose_index: IndexChoice) -> Published:
    """Publish the rows of an earlier run again, under the model of that run, and hold the store there.

    Nothing is lost: the versions between stay in the history, so that a rollback to one of them undoes this one.
    `embed` and `refresh` publish nothing until `release`; items that the sources brought since then are new or changed
    for them again, and their vectors are taken over from the versions between.

    Args:
        files: the store, held by the write lock.
        run_id: run of the target; None: the publication before the current one.
        choose_index: chooses the index of the new publication.

    Returns:
        The new publication.

    Raises:
        StoreError: there is no such publication, it is the current one, it can't be read any more, or a purge was cut
            off.
    """
    current = writable(files)
    check_purges(files)
    target = _target(files, current, run_id)
    check_readable(files, target)
    for run in unfinished_runs(files):
        LOG.info(f"run {run.run_id} was not finished and is given up: what it embedded is not used")
    operation = begin(files, "rollback", target)
    # Of consecutive rollbacks, the first one started from the most complete publication.
    from_run = current.hold.from_run if current.hold is not None else current.run_id
    hold = Hold(since=files.environment.now(), from_run=from_run, to_run=target.run_id)
    parts = parts_at(files, target)
    return publish_files(files, operation, target, parts, choose_index, restores=target.run_id, hold=hold)


def release(files: StoreFiles) -> Hold | None:
    """Allow `embed` and `refresh` to publish again; the rows stay as they are until then.

    Returns:
        The hold that was released; None where there was none.

    Raises:
        StoreError: there is no store, nothing is published, or it is of an older format.
        LeaseLostError: another run has taken the store over.
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
            f"store {files.address}: nothing was published before {current.run_id}, as far as its records tell; "
            "there is nothing to go back to"
        )
    return before
