"""Write lock of a store: one writer at a time.

On a disk the operating system releases the lock when its holder dies, for whatever reason; in a bucket it is a lease
(`embedder.store.lease`).
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedder.errors import RunFailedError, StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import utc_now
from embedder.store.lease import LOCK_FILE, BucketLease, Lease, Say


@contextmanager
def write_lock(files: StoreFiles, say: Say = lambda message: None) -> Iterator[Lease]:
    """Hold the store for writing.

    Args:
        files: the store; refers to the lock while it is held, and checks it before each commit.
        say: receives the reason for a delay.

    Raises:
        StoreError: another process holds it, or the store can't be written.
        LeaseLostError: the store was taken over by another run while the block ran.
    """
    with _disk_lock(files) if files.folder is not None else _bucket_lock(files, say) as lease:
        lease.begin()
        files.lease = lease
        try:
            yield lease
        except RunFailedError:
            if lease.lost:  # whatever error ended the run, this is the cause
                lease.confirm()
            raise
        finally:
            files.lease = None


@contextmanager
def _bucket_lock(files: StoreFiles, say: Say) -> Iterator[Lease]:
    lease = BucketLease(files, say)
    try:
        yield lease
    finally:
        lease.release()


@contextmanager
def _disk_lock(files: StoreFiles) -> Iterator[Lease]:
    folder = files.folder or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"store {files.address}: can't be written ({error.strerror}); check the path and its rights"
        ) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise StoreError(
                f"store {files.address}: another run is writing to it ({handle.read().strip() or 'unknown'}); "
                "wait for it to end, or stop it"
            ) from None
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": utc_now().isoformat(timespec="seconds"),
        }
        handle.truncate(0)
        handle.write(json.dumps(holder))
        handle.flush()
        try:
            yield Lease(files)
        finally:
            handle.truncate(0)
