"""Write lock of a store: one writer at a time.

On a disk, the operating system releases the lock when its holder dies. In a bucket, the lock is a lease: an object that
its holder rewrites every few seconds with conditional writes. The object outlives a dead process, and clocks of other
machines can't be trusted. So a process that finds a lock watches it: a live holder changes it within its lease. If it
doesn't change by the watcher's own clock, the holder counts as dead, and the watcher takes the lock over by a write on
condition that it is unchanged. A holder that was only asleep finds its next write refused, and doesn't publish.

Source: leases and fencing as in C. Gray and D. Cheriton, "Leases" (SOSP 1989); conditional writes as S3 defines them.
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from embedder.errors import RunFailedError, StoreError
from embedder.quantities import duration_text
from embedder.store.backends import Tag, WriteConflictError
from embedder.store.environment import LEASE_S, MAX_LEASE_S, Repetition, lease_s
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, read_current, record_bytes
from embedder.store.store_errors import StoreUnavailableError
from shards.file_schema import parse_json

LOCK_FILE = ".lock"
BEATS_PER_LEASE = 6

LOG = logging.getLogger(__name__)


class LeaseLostError(RunFailedError):
    """Another run has taken over the store; this one has published nothing since."""


class Lease:
    """Lock on a store, held by this process, through which it publishes.

    `lost` is set when another process has taken the lock: work should stop. `is_given_up` means that this process has
    removed the lock itself and changes nothing more.
    """

    lost = False
    is_given_up = False

    def __init__(self, files: StoreFiles) -> None:
        self.files = files
        self._current: Tag | None = None

    def begin(self) -> None:
        """Read what is published, once no other process can publish."""
        try:
            self._current = self.files.read_tagged(CURRENT_FILE)[1]
        except FileNotFoundError:
            self._current = None

    def fence(self) -> None:
        """Change CURRENT.json, so that the writer whose lock was taken over can no longer publish anything."""
        current = read_current(self.files)
        if current is not None:
            fenced = current.model_copy(update={"fence": self.files.environment.token(8)})
            self.swap_current(record_bytes(fenced))

    def confirm(self) -> None:
        """Raise LeaseLostError if this process no longer holds the lock; called before every commit."""

    def swap_current(self, data: bytes) -> None:
        """Replace CURRENT.json if it is unchanged since the lock was taken.

        Raises LeaseLostError if another process has published meanwhile, or holds the lock.
        """
        self.confirm()
        try:
            self._current = self.files.replace(CURRENT_FILE, data, self._current)
        except WriteConflictError:
            raise LeaseLostError(
                f"store {self.files.address}: another run published while this one held the lock; nothing of this one "
                "is published: run the same command again"
            ) from None


class DiskLease(Lease):
    """Lock file of a store on a disk, which the operating system locks for this process."""

    def __init__(self, files: StoreFiles, handle: FileIO) -> None:
        super().__init__(files)
        self._handle = handle

    def confirm(self) -> None:
        """Check that the lock file is the one that was locked; if somebody removed it, others lock a new one."""
        own = os.fstat(self._handle.fileno())
        try:
            there = Path(self._handle.name).stat()
        except FileNotFoundError:
            there = None
        self.lost = there is None or (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino)
        if self.lost:
            raise LeaseLostError(
                f"store {self.files.address}: its file {LOCK_FILE} was removed while this run held it, so another run "
                f"may write at the same time; nothing of this one is published since: never remove {LOCK_FILE}, as a "
                "run that ends or dies frees it, and run the same command again"
            )


class BucketLease(Lease):
    """Lock object of a store in a bucket, rewritten every few seconds while this process holds it."""

    def __init__(self, files: StoreFiles) -> None:
        """Take the lock, logging the reason for a delay; raise StoreError if another run holds it."""
        super().__init__(files)
        self.lease_s = lease_s()
        self._holder: dict[str, Any] = {
            "token": files.environment.token(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": files.environment.now().isoformat(timespec="seconds"),
            "lease_s": self.lease_s,
            "beat": 0,
        }
        self._guard = files.environment.make_lock()
        self._beats: Repetition | None = None
        self._has_overtaken = False
        self._tag = self._take()

    def begin(self) -> None:
        """Start to renew the lock; raise StoreError if the server ignores conditions of writes."""
        self._beats = self.files.environment.repeat(self.lease_s / BEATS_PER_LEASE, self._beat, "lease")
        self._check_conditions()
        super().begin()
        if self._has_overtaken:
            self.fence()

    def confirm(self) -> None:
        """Renew the lock; raise LeaseLostError if another process has taken it."""
        with self._guard:
            self.lost = self.lost or not self._renew()
        if self.lost:
            holder = read_holder(self.files)
            cause = (
                f"this run was silent for longer than EMBEDDER_LEASE_S = {self.lease_s:g}, and another one took the "
                f"store over ({describe(holder)})"
                if holder
                else f"its {LOCK_FILE} was removed while this run held it (a lock that nobody holds expires by itself)"
            )
            raise LeaseLostError(
                f"store {self.files.address}: {cause}; nothing of this one is published since: run the same command "
                "again"
            )

    def _renew(self) -> bool:
        while True:
            self._holder["beat"] += 1
            try:
                self._tag = self.files.replace(LOCK_FILE, _bytes(self._holder), self._tag)
            except WriteConflictError:
                try:
                    found, tag = self.files.read_tagged(LOCK_FILE)
                except FileNotFoundError:
                    return False
                if _parse(found).get("token") != self._holder["token"]:
                    return False
                self._tag = tag  # of an abandoned renewal that reached the server after all
            else:
                return True

    def close(self) -> None:
        """Mark the lock as free; if that fails, it expires after its lease."""
        if self._beats is not None:
            self._beats.stop()
        if self.lost:
            return
        released = {"released": self.files.environment.now().isoformat(timespec="seconds")}
        with suppress(WriteConflictError, StoreError, StoreUnavailableError):
            self.files.replace(LOCK_FILE, _bytes(released), self._tag)

    def _beat(self) -> bool:
        try:
            self.confirm()
        except LeaseLostError:
            return False
        except (StoreError, StoreUnavailableError):
            pass  # the server may be back before another process has watched for a whole lease
        return True

    def _take(self) -> Tag:
        data = _bytes(self._holder)
        try:
            return self.files.replace(LOCK_FILE, data, None)
        except WriteConflictError:
            holder, tag = self._read()
        if "released" not in holder and holder.get("token") != self._holder["token"]:
            tag = self._watch(holder, tag)
        try:
            return self.files.replace(LOCK_FILE, data, tag)
        except WriteConflictError:
            raise _held_error(self.files, describe(read_holder(self.files))) from None

    def _read(self) -> tuple[dict[str, Any], Tag | None]:
        """Return the lock's content and version; one that somebody has removed counts as released."""
        try:
            found, tag = self.files.read_tagged(LOCK_FILE)
        except FileNotFoundError:
            return {"released": None}, None
        return _parse(found), tag

    def _watch(self, holder: dict[str, Any], tag: Tag | None) -> Tag | None:
        """Wait until the holder is silent for its lease or releases the lock; return the version to replace.

        A lock with damaged content may be held by somebody. Raises StoreError if the holder is alive.
        """
        watched_s = _lease_of(holder)
        LOG.info(
            f"the store is locked by {describe(holder)}; watching for {duration_text(watched_s)} whether that run lives"
        )
        environment = self.files.environment
        began_s = environment.clock_s()
        while environment.clock_s() - began_s < watched_s:
            environment.sleep(watched_s / (4 * BEATS_PER_LEASE))
            found, now = self._read()
            if now != tag and "released" not in found:
                raise _held_error(self.files, describe(found))
            if now != tag:
                return now
        LOG.info("it does not; taking the store over")
        self._has_overtaken = True
        return tag

    def _check_conditions(self) -> None:
        """Refuse a server that ignores write conditions: two runs could hold the lock."""
        if not self.files.create(LOCK_FILE, b"{}"):
            if not self.files.address.startswith("s3://"):
                return  # Google compares generations, and always has
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
    """Hold the store for writing; `files` checks the lock before each commit while the block runs.

    Raises StoreError if another process holds the lock or the store can't be written, and LeaseLostError if another run
    took the store over during the block.
    """
    with _disk_lock(files) if files.folder is not None else closing(BucketLease(files)) as lease:
        lease.begin()
        files.lease = lease
        try:
            yield lease
        except Exception:
            if not lease.is_given_up:
                with suppress(StoreError, StoreUnavailableError):
                    lease.confirm()  # whatever error ended the run, a lost lock is its cause
            raise
        finally:
            files.lease = None


@contextmanager
def _disk_lock(files: StoreFiles) -> Iterator[Lease]:
    path = (files.folder or Path()) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+b", buffering=0)
    except OSError as error:
        raise StoreError(
            f"store {files.address}: can't be written ({error.strerror}); check the path and its rights"
        ) from None
    with handle:
        _flock(files, handle)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": files.environment.now().isoformat(timespec="seconds"),
        }
        handle.truncate(0)
        with suppress(OSError):  # the disk is full; the holder is for messages only
            handle.write(json.dumps(holder).encode())
        try:
            yield DiskLease(files, handle)
        finally:
            handle.truncate(0)


def _flock(files: StoreFiles, handle: FileIO) -> None:
    """Lock the file through the operating system; StoreError if another process holds it or locks don't work."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        raise _held_error(files, describe(_parse(handle.read()))) from None
    except OSError as error:
        raise StoreError(
            f"store {files.address}: its file system has no locks ({error.strerror}), so two runs could write at once; "
            "keep the store on a local disk, on one whose mount has locks (NFS 4), or in a bucket"
        ) from None


def read_holder(files: StoreFiles) -> dict[str, Any]:
    """Return the holder that the lock names; empty if there never was one."""
    try:
        return _parse(files.read(LOCK_FILE))
    except FileNotFoundError:
        return {}


def describe(holder: dict[str, Any]) -> str:
    """Describe the holder, and how long it has held the lock."""
    if "token" not in holder and "pid" not in holder:
        return "unknown"
    pid, host, since = (holder.get(name, "unknown") for name in ("pid", "host", "since"))
    return f"process {pid} on {host}, since {since}"


def _held_error(files: StoreFiles, holder: str) -> StoreError:
    return StoreError(f"store {files.address}: another run is writing to it ({holder}); wait for it to end, or stop it")


def _lease_of(holder: dict[str, Any]) -> float:
    """Return the seconds of a holder's lease: its own figure if that is plausible."""
    try:
        found = float(holder.get("lease_s", LEASE_S))
    except (TypeError, ValueError, OverflowError):
        return LEASE_S
    return found if 0 < found <= MAX_LEASE_S else LEASE_S


def _bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = parse_json(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
