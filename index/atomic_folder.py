"""Folders that appear atomically: made under a hidden name in the same parent, then renamed.

A running build holds a lock (flock) on its folder; a killed build's lock disappears with its process. So a leftover is
recognised by taking its lock, and a long build is never mistaken for one.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from index.index_errors import RetrievalError

_PREFIX = ".building-"


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` if the block succeeds; raises a RetrievalError if `out` exists."""
    _refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, lock = _make_locked(out)
    try:
        yield folder
        _flush(folder)
        _publish(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of files, hexadecimal, by name."""
    hashes = {}
    for path in paths:
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def sweep_leftovers(root: Path) -> list[Path]:
    """Remove folders of killed builds and return their paths; those of running builds stay."""
    removed = []
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed.append(folder)
    return removed


def _make_locked(out: Path) -> tuple[Path, int]:
    while True:
        folder = out.parent / f"{_PREFIX}{out.name}-{secrets.token_hex(4)}"
        folder.mkdir()
        lock = _try_lock(folder)
        if lock is None:
            continue
        # A sweep may have removed the folder between mkdir and lock.
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Take the lock of a folder; None if another process holds it, or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(folder: Path, out: Path) -> None:
    _refuse_existing(out)
    try:
        folder.rename(out)
    except OSError:
        _refuse_existing(out)  # made between the check and the rename
        raise
    _sync(out.parent)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise RetrievalError(f"{out}: exists already, and a version is never written twice; build the next one")


def _flush(folder: Path) -> None:
    """Sync files and names to disk before the rename makes them visible: a power cut leaves no empty version."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
