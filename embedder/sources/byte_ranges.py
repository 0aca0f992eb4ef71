"""Random access to the bytes of one file, local or in an object store, by one interface."""

import io
import os
import stat
from typing import BinaryIO

from embedder.sources.errors import FetchError, from_os_error
from embedder.storage.file_adapter import ByteRanges, RangeFile
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import readable


class LocalRanges:
    """A regular local file; anything else is refused before a read could block."""

    def __init__(self, path: str) -> None:
        self._descriptor, status = open_regular(path)
        self._path = path
        self.size = status.st_size
        self.version = _version_of(status)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only where the file ends."""
        pieces = []
        try:
            while length > 0 and (piece := os.pread(self._descriptor, min(length, 1 << 30), offset)):
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        except OSError as error:
            raise from_os_error(error, readable(self._path)) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the descriptor, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_ranges(path: str) -> ByteRanges:
    """Open a local path or an object store URI.

    Raises:
        FetchError: the file is missing, no regular file, or may not be read.
    """
    if is_remote(path):
        from embedder.sources.object_listing import open_object

        return open_object(path)
    return LocalRanges(path)


def open_file(path: str) -> BinaryIO:
    """Open a local path or an object store URI as a buffered binary file.

    Raises:
        FetchError: as `open_ranges`.
    """
    return io.BufferedReader(RangeFile(open_ranges(path)), buffer_size=1 << 20)


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file to read; return its descriptor and status.

    Links are followed (the listing allows those that stay in the root), so what is open is looked at again: a name may
    have been swapped for a pipe since it was listed. O_NONBLOCK keeps even that from blocking.

    Raises:
        FetchError: the file is missing, no regular file, or may not be read.
    """
    try:
        _check_regular(os.stat(path), path)  # noqa: PTH116 (before the open: opening a device can have effects)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, readable(path)) from None
    except ValueError:
        raise FetchError("BadUri", f"{readable(path)!r}: a path can't hold a NUL character") from None
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
    except FetchError:
        os.close(descriptor)
        raise
    return descriptor, status


def local_version(path: str) -> str:
    """Return the version of the local file that has this name now.

    Raises:
        FetchError: there is none, or it can't be looked at.
    """
    try:
        return _version_of(os.stat(path))  # noqa: PTH116
    except OSError as error:
        raise from_os_error(error, readable(path)) from None


def _version_of(status: os.stat_result) -> str:
    """Name the state of a file; another file under the same name has another."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FetchError("NotAFile", f"{readable(path)}: only regular files are opened")
