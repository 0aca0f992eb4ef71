"""Back to an earlier publication: its rows become the newest version, and stay it until the hold is released."""

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.history import check_readable, find_publication, one_before, publications
from embedder.store.layout import Current, Hold, Published, utc_now
from embedder.store.lock import write_current
from embedder.store.maintenance import IndexChoice, Say, begin, parts_at, publish_files, writable
from embedder.store.runs import unfinished_runs


def rollback(files: StoreFiles, run_id: str | None, choose_index: IndexChoice, say: Say) -> Published:
    """Publish what was published by an earlier run, under the model of that run, and hold it there.

    Nothing is lost by it: the versions between stay in the history, so that a rollback to them undoes this one. `embed`
    and `refresh` publish nothing until `release`; what the sources brought since then is new or changed again for them,
    and is taken over from where it was.

    Args:
        files: the store, held by the write lock.
        run_id: of the publication to go back to; the one before the current one where none is named.
        choose_index: gives the new publication its index.
        say: is told what happens.

    Returns:
        The new publication.

    Raises:
        StoreError: there is no such publication, it is the current one, or it can't be read any more.
    """
    current = writable(files)
    target = _target(files, current, run_id)
    check_readable(files, target)
    for run in unfinished_runs(files):
        say(f"run {run.run_id} was not finished and is given up: what it embedded is not used")
    operation = begin(files, "rollback", target)
    # Of rollbacks one after another, the first one left the most.
    left = current.hold.from_run if current.hold is not None else current.run_id
    hold = Hold(since=utc_now(), from_run=left, to_run=target.run_id)
    parts = parts_at(files, target)
    return publish_files(files, operation, target, parts, choose_index, restores=target.run_id, hold=hold)


def release(files: StoreFiles) -> Hold | None:
    """Let `embed` and `refresh` publish again; the rows stay as they are until then.

    Args:
        files: the store, held by the write lock.

    Returns:
        What held it; None where nothing did.

    Raises:
        StoreError: there is no store, nothing is published, or it is of an older format.
        LeaseLostError: another run has taken the store over.
    """
    current = writable(files)
    if current.hold is None or not current.is_held:
        return None
    released = current.hold.model_copy(update={"released_at": utc_now()})
    write_current(files, current.model_copy(update={"hold": released}))
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
