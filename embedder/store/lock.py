"""One writer a store: a lock that the operating system drops when its holder dies, however it dies."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import utc_now

LOCK_FILE = ".lock"


@contextmanager
def write_lock(files: StoreFiles) -> Iterator[None]:
    """Hold the store for writing.

    Raises:
        StoreError: another process holds it, or the store can't be written.
    """
    path = files.root / LOCK_FILE
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"store {files.root}: can't be written ({error.strerror}); check the path and its rights"
        ) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise StoreError(
                f"store {files.root}: another run is writing to it ({handle.read().strip() or 'unknown'}); "
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
        yield
