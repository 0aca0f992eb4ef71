"""Backends of a store: eight operations on named files, on a disk or in a bucket.

Every file appears whole or not at all, and appears under its name only once its content is durable.
`docs/store-protocol.md` says what a backend must guarantee; the store simulator (`scripts/simulate_store.py`) has more
backends.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from embedder.storage.atomic_write import NEW_NAME, rename_with
from embedder.storage.vector_pages import read_columns
from embedder.store.environment import REAL_ENVIRONMENT, Environment
from embedder.store.store_errors import local_problem

Tag = dict[str, Any]
"""Opaque version of a file that was read or written."""

Condition = Tag | Literal["absent"] | None
"""What a file must be when it is written: a version that was read, absent, or anything (None)."""

TEMPORARY = re.compile(r".+#[0-9a-f]+")
"""Name of an unfinished file, of a writer that is at work or was killed."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class FileInfo(NamedTuple):
    """One file of the store."""

    path: str
    size_bytes: int


def manifests_first(infos: Iterable[FileInfo]) -> list[FileInfo]:
    """Order files for deletion, by path within: readers ignore a folder without its manifest."""
    return sorted(infos, key=lambda info: (not info.path.endswith("/manifest.json"), info.path))


def is_unfinished(path: str) -> bool:
    """Return whether a file is unfinished: its writer is at work or was killed."""
    return TEMPORARY.fullmatch(path) is not None


class WriteConflictError(Exception):
    """The file doesn't meet the condition of a write; nothing was written."""


class Backend(Protocol):
    """Files addressed by paths relative to a root."""

    def read(self, path: str) -> tuple[bytes, Tag]:
        """Return a file's content and its version, or raise FileNotFoundError."""

    def open(self, path: str) -> Any:
        """Open a file for random access, in a form that pyarrow accepts."""

    def read_table(self, path: str, columns: list[str] | None) -> pa.Table:
        """Read a Parquet file; of `columns`, those that it has."""

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in a folder."""

    def list(self, folder: str, after: str | None) -> Iterator[FileInfo]:
        """Yield all files below a folder whose paths sort after `after`, including unfinished ones (`TEMPORARY`)."""

    def put(self, path: str, data: bytes | Path, condition: Condition) -> Tag:
        """Write bytes or a local file durably and return its new version, or raise WriteConflictError.

        Without a condition the returned version may be empty: hashing a part file costs more than writing it.
        """

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files durably; missing files are no error."""

    def below(self, folder: str) -> "Backend":
        """Return a backend whose root is a folder of this one."""


class Disk:
    """File system calls of `DiskBackend`; a power cut may follow any of them."""

    def create(self, path: str, data: bytes | Path) -> None:
        """Write a new file."""
        with Path(path).open("xb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                with data.open("rb") as source:
                    while piece := source.read(8 << 20):
                        file.write(piece)

    def sync_file(self, path: str) -> None:
        """Flush a file's content to the disk."""
        _sync(path, os.O_RDONLY)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing the target."""
        Path(source).replace(target)

    def link(self, source: str, target: str) -> None:
        """Rename a file to a name that no file has, or raise FileExistsError."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            rename_with(NEW_NAME, source, target)
        else:
            Path(source).unlink()

    def unlink(self, path: str) -> None:
        """Remove a file."""
        Path(path).unlink()

    def make_folder(self, path: str) -> None:
        """Create a folder unless it exists; its parent must exist."""
        with suppress(FileExistsError):
            Path(path).mkdir()

    def sync_folder(self, path: str) -> None:
        """Flush the names in a folder to the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def read(self, path: str) -> bytes:
        """Read a file."""
        return Path(path).read_bytes()

    def is_file(self, path: str) -> bool:
        """Return whether the path is a file."""
        return Path(path).is_file()

    def is_folder(self, path: str) -> bool:
        """Return whether the path is a folder."""
        return Path(path).is_dir()

    def entries(self, path: str) -> list[tuple[str, bool, int]]:
        """Return name, whether it is a folder, and size of each entry; nothing if the folder doesn't exist."""
        try:
            found = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for each in found:
            with suppress(FileNotFoundError):  # deleted meanwhile
                is_folder = each.is_dir()
                entries.append((each.name, is_folder, 0 if is_folder else each.stat().st_size))
        return entries


class DiskBackend:
    """Folder on a disk.

    A file is written under a temporary name and flushed, then renamed, and the name is flushed. So a power cut leaves
    each file whole or absent, and if a file exists, so do all files that were written before it.
    """

    def __init__(self, folder: Path, disk: Disk | None = None, environment: Environment = REAL_ENVIRONMENT) -> None:
        self._folder, self._disk, self._environment = str(folder), disk or Disk(), environment

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def read(self, path: str) -> tuple[bytes, Tag]:
        """See `Backend`."""
        with self._named_errors(path):
            data = self._disk.read(self._at(path))
        return data, content_tag(data)

    def open(self, path: str) -> Any:
        """See `Backend`; memory-mapped."""
        return pa.memory_map(self._at(path))

    def read_table(self, path: str, columns: list[str] | None) -> pa.Table:
        """See `Backend`."""
        source = self.open(path)
        file = pq.ParquetFile(source, page_checksum_verification=True)
        use_threads = file.metadata.num_rows > 10_000  # otherwise waiting takes longer
        return read_columns(file, source, columns, use_threads=use_threads)

    def exists(self, path: str) -> bool:
        """See `Backend`."""
        return self._disk.is_file(self._at(path))

    def folders(self, folder: str) -> list[str]:
        """See `Backend`."""
        with self._named_errors(folder):
            return sorted(name for name, is_folder, _ in self._disk.entries(self._at(folder)) if is_folder)

    def list(self, folder: str, after: str | None) -> Iterator[FileInfo]:
        """See `Backend`; sorted."""
        start = folder.rstrip("/")
        with self._named_errors(folder):
            found = [info for info in self._below(start) if after is None or info.path > after]
        return iter(sorted(found))

    def _below(self, folder: str) -> Iterator[FileInfo]:
        for name, is_folder, size_bytes in self._disk.entries(self._at(folder)):
            path = f"{folder}/{name}" if folder else name
            if is_folder:
                yield from self._below(path)
            else:
                yield FileInfo(path, size_bytes)

    def put(self, path: str, data: bytes | Path, condition: Condition) -> Tag:
        """See `Backend`; only the holder of the store's lock may pass a version as condition.

        Comparing and writing are then two steps, between which another process could write.
        """
        target = self._at(path)
        temporary = f"{target}#{self._environment.token(4)}"
        with self._named_errors(path):
            if isinstance(condition, dict) and not self._is_version(target, condition):
                raise WriteConflictError(path)
            self._make_folder(target.rpartition("/")[0])
            try:
                self._disk.create(temporary, data)
                self._disk.sync_file(temporary)
                if condition == "absent":
                    self._disk.link(temporary, target)
                else:
                    self._disk.rename(temporary, target)
            except FileExistsError:
                raise WriteConflictError(path) from None
            finally:
                with suppress(OSError):  # it exists only if something failed
                    self._disk.unlink(temporary)
            self._disk.sync_folder(target.rpartition("/")[0])
        return content_tag(data) if isinstance(data, bytes) and condition is not None else {}

    def _is_version(self, target: str, tag: Tag) -> bool:
        try:
            return content_tag(self._disk.read(target)) == tag
        except FileNotFoundError:
            return False

    def _make_folder(self, folder: str) -> None:
        """Create a folder and its missing parents, each with its name flushed to the disk."""
        if self._disk.is_folder(folder):
            return
        parent = folder.rpartition("/")[0]
        if parent and parent != folder:
            self._make_folder(parent)
        self._disk.make_folder(folder)
        self._disk.sync_folder(parent or "/")

    def delete(self, paths: Iterable[str]) -> None:
        """See `Backend`."""
        touched = set()
        for path in paths:
            with self._named_errors(path), suppress(FileNotFoundError, NotADirectoryError):
                self._disk.unlink(self._at(path))
                touched.add(self._at(path).rpartition("/")[0])
        for folder in sorted(touched):
            with self._named_errors(folder.removeprefix(f"{self._folder}/")), suppress(FileNotFoundError):
                self._disk.sync_folder(folder)

    def below(self, folder: str) -> "DiskBackend":
        """See `Backend`."""
        return DiskBackend(Path(self._folder) / folder, self._disk, self._environment)

    @contextmanager
    def _named_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise local_problem(error, self._at(path)) from None


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_tag(data: bytes) -> Tag:
    """Return the version of a file on a disk: the hash of its content."""
    return {"sha256": hashlib.sha256(data).hexdigest()}
