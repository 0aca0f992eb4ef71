"""Write lock of a store: one writer at a time.

On a disk the operating system releases the lock when its holder dies, for whatever reason. In a bucket it is a lease: a
lock object that its holder rewrites every few seconds with conditional writes. It stays when its process dies, and the
clocks of other machines are not to be trusted. So a process that finds a lock watches it: a live holder changes it
within its lease; one that does not, by the watcher's own clock, is dead, and its lock is taken over by a write on
condition that it is unchanged. A holder that was only asleep finds its next write refused, and does not publish.

Source: leases and fencing as in C. Gray and D. Cheriton, "Leases" (SOSP 1989); conditional writes as S3 defines them.
"""

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from embedder.errors import RunFailedError, StoreError
from embedder.quantities import duration_text
from embedder.store.errors import StoreUnavailableError
from embedder.store.files import StoreFiles, Tag, WriteConflictError
from embedder.store.layout import CURRENT_FILE, utc_now

LOCK_FILE = ".lock"
LEASE_S = 60.0
BEATS_PER_LEASE = 6

LOG = logging.getLogger(__name__)


class LeaseLostError(RunFailedError):
    """Another run has taken the store over; this one has published nothing since."""


class Lease:
    """Lock on a store held by this process, through which it publishes.

    Attributes:
        lost: another process has taken the lock; work should stop.
    """

    lost = False

    def __init__(self, files: StoreFiles) -> None:
        self.files = files
        self._current: Tag | None = None

    def begin(self) -> None:
        """Read what is published, once no other process can publish."""
        try:
            self._current = self.files.read_tagged(CURRENT_FILE)[1]
        except FileNotFoundError:
            self._current = None

    def confirm(self) -> None:
        """Check, before every commit, that this process still holds the lock.

        Raises:
            LeaseLostError: it does not.
        """

    def swap_current(self, data: bytes) -> None:
        """Replace CURRENT.json, if it is unchanged since the lock was taken.

        Raises:
            LeaseLostError: another process published meanwhile, or holds the lock.
        """
        self.confirm()
        try:
            self._current = self.files.replace(CURRENT_FILE, data, self._current)
        except WriteConflictError:
            raise LeaseLostError(
                f"store {self.files.address}: another run published while this one held the lock; nothing of this one "
                "is published: run the same command again"
            ) from None


class BucketLease(Lease):
    """Lock object of a store in a bucket, rewritten by a thread while this process holds it."""

    def __init__(self, files: StoreFiles) -> None:
        """Take the lock; the reason for a delay is logged.

        Raises:
            StoreError: another run holds it.
        """
        super().__init__(files)
        self.lease_s = _lease_s()
        self._holder: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": utc_now().isoformat(timespec="seconds"),
            "lease_s": self.lease_s,
            "beat": 0,
        }
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._tag = self._take()

    def begin(self) -> None:
        """Start to renew the lock.

        Raises:
            StoreError: the server ignores the conditions of writes.
        """
        self._thread.start()
        self._check_conditions()
        super().begin()

    def confirm(self) -> None:
        """Renew the lock; refused where another process has taken it."""
        with self._guard:
            self._holder["beat"] += 1
            try:
                self._tag = self.files.replace(LOCK_FILE, _bytes(self._holder), self._tag)
            except WriteConflictError:
                self.lost = True
        if self.lost:
            raise LeaseLostError(
                f"store {self.files.address}: this run was silent for longer than EMBEDDER_LEASE_S = {self.lease_s:g}, "
                f"and another one took the store over ({describe(read_holder(self.files))}); nothing of this one is "
                "published since: run the same command again"
            )

    def close(self) -> None:
        """Mark the lock as free; where that fails, it expires after its lease."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.lost:
            return
        try:
            self.files.replace(LOCK_FILE, _bytes({"released": utc_now().isoformat(timespec="seconds")}), self._tag)
        except (WriteConflictError, StoreError, StoreUnavailableError):
            return

    def _beat(self) -> None:
        while not self._ended.wait(self.lease_s / BEATS_PER_LEASE):
            try:
                self.confirm()
            except LeaseLostError:
                return
            except (StoreError, StoreUnavailableError):
                continue  # the server may be back before another process has watched for a whole lease

    def _take(self) -> Tag:
        data = _bytes(self._holder)
        try:
            return self.files.replace(LOCK_FILE, data, None)
        except WriteConflictError:
            found, tag = self.files.read_tagged(LOCK_FILE)
        holder = _parse(found)
        if holder.get("token") not in (None, self._holder["token"]):
            tag = self._watch(holder, tag)
        try:
            return self.files.replace(LOCK_FILE, data, tag)
        except WriteConflictError:
            raise _held(self.files, describe(read_holder(self.files))) from None

    def _watch(self, holder: dict[str, Any], tag: Tag) -> Tag:
        """Wait until the holder has been silent for its lease, or has released the lock; return the version to replace.

        Raises:
            StoreError: the holder is alive.
        """
        lease_s = float(holder.get("lease_s", LEASE_S))
        LOG.info(
            f"the store is locked by {describe(holder)}; watching for {duration_text(lease_s)} whether that run lives"
        )
        began_s = clock_s()
        while clock_s() - began_s < lease_s:
            time.sleep(lease_s / (4 * BEATS_PER_LEASE))
            found, now = self.files.read_tagged(LOCK_FILE)
            if now != tag and "token" in _parse(found):
                raise _held(self.files, describe(_parse(found)))
            if now != tag:
                return now
        LOG.info("it does not; taking the store over")
        return tag

    def _check_conditions(self) -> None:
        """Refuse a server that ignores the conditions: two runs could hold the lock."""
        if not self.files.create(LOCK_FILE, b"{}"):
            if not self.files.address.startswith("s3://"):
                return  # Google compares generations, and has done so from the beginning
            try:
                self.files.replace(LOCK_FILE, b"{}", {"e_tag": f'"{"0" * 32}"'})
            except WriteConflictError:
                return
        raise StoreError(
            f"store {self.files.address}: its server ignores If-Match or If-None-Match, so two runs could publish at "
            "once; keep the store on a server with conditional writes (S3, MinIO, R2), or on a disk"
        )


@contextmanager
def write_lock(files: StoreFiles) -> Iterator[Lease]:
    """Hold the store for writing.

    Args:
        files: the store; refers to the lock while it is held, and checks it before each commit.

    Raises:
        StoreError: another process holds it, or the store can't be written.
        LeaseLostError: the store was taken over by another run while the block ran.
    """
    with _disk_lock(files) if files.folder is not None else closing(BucketLease(files)) as lease:
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
            raise _held(files, describe(_parse(handle.read().encode()))) from None
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


def clock_s() -> float:
    """Monotonic clock that includes the machine's sleep, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_holder(files: StoreFiles) -> dict[str, Any]:
    """Read the holder from the lock; empty where there never was one."""
    try:
        return _parse(files.read(LOCK_FILE))
    except FileNotFoundError:
        return {}


def describe(holder: dict[str, Any]) -> str:
    """Describe the holder, and since when it holds the lock."""
    if "token" not in holder and "pid" not in holder:
        return "unknown"
    pid, host, since = (holder.get(name, "unknown") for name in ("pid", "host", "since"))
    return f"process {pid} on {host}, since {since}"


def _held(files: StoreFiles, holder: str) -> StoreError:
    return StoreError(f"store {files.address}: another run is writing to it ({holder}); wait for it to end, or stop it")


def _lease_s() -> float:
    text = os.environ.get("EMBEDDER_LEASE_S", str(LEASE_S))
    try:
        lease_s = float(text)
    except ValueError:
        lease_s = 0.0
    if lease_s <= 0:
        raise StoreError(f"EMBEDDER_LEASE_S is {text!r}; write seconds above 0, or leave it out for {LEASE_S:g}")
    return lease_s


def _bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
