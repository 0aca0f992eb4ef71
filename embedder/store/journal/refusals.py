"""Clean-up after a refused command: removes whatever it has created so far."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from obstore.exceptions import BaseError

from embedder.errors import USER_MISTAKES, StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import names_in_journal
from embedder.store.journal.runs import is_published, last_run, withdraw_run
from embedder.store.layout import CURRENT_FILE, RUNS_FOLDER, STORE_FILE
from embedder.store.lock import LOCK_FILE


@dataclass(frozen=True)
class StoreBefore:
    """State of a store before the command touched it."""

    has_store: bool
    has_lock: bool
    last_run: str | None


def snapshot_files(files: StoreFiles) -> StoreBefore:
    """Record the state of a store that is about to be locked."""
    has_store = files.exists(STORE_FILE)
    last = last_run(files) if has_store else None
    return StoreBefore(has_store, files.exists(LOCK_FILE), last.run_id if last else None)


@contextmanager
def rollback_on_mistake(files: StoreFiles, before: StoreBefore) -> Iterator[None]:
    """Remove what the block created if it ends with a user mistake; finished items stay. Needs the write lock."""
    try:
        yield
    except USER_MISTAKES:
        with suppress(OSError, BaseError, StoreError):  # the mistake is to be reported
            _roll_back(files, before)
        raise


def _roll_back(files: StoreFiles, before: StoreBefore) -> None:
    last = last_run(files)
    if last is not None and last.run_id != before.last_run:
        if is_published(files, last) or names_in_journal(files, last.run_id) or not withdraw_run(files, last.run_id):
            return
        folder = f"{RUNS_FOLDER}/{last.run_id}"
        files.delete_each([info.path for info in files.list(folder)])
        if files.folder is not None:
            shutil.rmtree(files.folder / folder, ignore_errors=True)
    if before.has_store or files.exists(CURRENT_FILE):  # what failed then came after a publication
        return
    if files.folder is not None:  # in a bucket, a run that took the store over may have written the record since
        files.delete(STORE_FILE)
        if not before.has_lock:
            files.delete(LOCK_FILE)
            if files.lease is not None:
                files.lease.is_given_up = True
        with suppress(OSError):
            (files.folder / RUNS_FOLDER).rmdir()


@contextmanager
def remove_empty_folders(folder: Path | None) -> Iterator[None]:
    """Remove empty folders that the block has created if it ends with a user mistake."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()] if folder is not None else []
    try:
        yield
    except USER_MISTAKES:
        for each in missing:  # the innermost first; a folder with content stays
            with suppress(OSError):
                each.rmdir()
        raise
