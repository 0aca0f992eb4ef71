"""Random access to the bytes of one file, local or in an object store, through one interface."""

import errno
import io
import os
import re
import stat
from typing import BinaryIO, NamedTuple, Self

from embedder.sources.listing_schema import time_text, without_change_time
from embedder.sources.local_listing import is_inside
from embedder.sources.source_errors import FetchError, from_os_error
from embedder.storage.file_adapter import ByteRanges, RangeFile
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import readable

_TIME = re.compile(r"@-?\d+ns|\d{4}-\d\d-\d\dT[\d:.]+Z")  # a file's time, as `time_text` writes it
REFRESH = "`embedder refresh` embeds it as it is now"
_LOOK_UP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class EmbeddedFile(NamedTuple):
    """What a store knows about the file an item was embedded from, so that opening a different file can be refused.

    `root` is the folder of the source: a link below it is followed only to targets that are also below it. `size_bytes`
    is None if the listing didn't know it. `modified` is the file's time, then `|` and whatever else changes the item;
    items identified by a hash have other text or None, and any content passes. `is_text` marks a caption without an
    image or video; `is_stale` means that the listing has seen newer content that couldn't be embedded.
    """

    root: str
    size_bytes: int | None = None
    modified: str | None = None
    is_text: bool = False
    is_stale: bool = False

    def check(self, path: str, status: os.stat_result) -> None:
        """Raise a FetchError if an open file isn't the one that was embedded."""
        time = without_change_time((self.modified or "").partition("|")[0])
        has_time = _TIME.fullmatch(time) is not None
        # A mount may truncate times to the second or to some fraction of it.
        is_as_old = time.startswith(time_text(status.st_mtime_ns).rstrip("0Z").rstrip("."))
        if self.is_stale or (has_time and not (is_as_old and self.size_bytes in (None, status.st_size))):
            raise FetchError("Changed", f"{readable(path)}: it has changed since it was embedded; {REFRESH}")

    def for_neighbour(self, path: str, root: str) -> Self:
        """Return what is known about a local file that a cell of this file, a table, names.

        `root` is the folder that the name is relative to; it is empty for an absolute name.
        """
        modified = (self.modified or "").partition("|")[2] or None
        return self._replace(root=root or os.path.dirname(path), size_bytes=None, modified=modified)  # noqa: PTH120


class LocalRanges:
    """A regular local file; anything else is refused before a read could block."""

    def __init__(self, path: str, embedded: EmbeddedFile | None = None) -> None:
        self._descriptor, status = open_regular(path, embedded)
        self._path = path
        self.size = status.st_size
        self.version = _version_of(status)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
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
        """Close the descriptor; later calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_ranges(path: str, embedded: EmbeddedFile | None = None) -> ByteRanges:
    """Open a local path or an object store URI; a local file is checked against `embedded` unless that is None.

    Raises a FetchError if the file is missing, not a regular file, unreadable, or not the one that was embedded.
    """
    if is_remote(path):
        from embedder.sources.object_listing import open_object

        return open_object(path)
    return LocalRanges(path, embedded)


def open_file(path: str) -> BinaryIO:
    """Open a local path or an object store URI as a buffered binary file; raises like `open_ranges`."""
    return io.BufferedReader(RangeFile(open_ranges(path)), buffer_size=1 << 20)


def open_regular(path: str, embedded: EmbeddedFile | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file for reading and return its descriptor and status; raises like `open_ranges`.

    Links are followed while items are embedded (the listing allows those that stay in the root), so the open file is
    checked again: its name may have been swapped for a pipe since it was listed. O_NONBLOCK keeps even that from
    blocking. Later, with `embedded` given, the folder's owner may have replaced an item's file with a link to any other
    file.
    """
    try:
        if embedded is not None:
            descriptor = _open_beneath(embedded.root, path)
        else:
            _check_regular(os.stat(path), path)  # noqa: PTH116 (before the open: opening a device can have effects)
            descriptor = os.open(path, _READ)
    except OSError as error:
        raise from_os_error(error, readable(path)) from None
    except ValueError:
        raise FetchError("BadUri", f"{readable(path)!r}: a path can't hold a NUL character") from None
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        if embedded is not None:
            embedded.check(path, status)
    except FetchError:
        os.close(descriptor)
        raise
    return descriptor, status


def _open_beneath(root: str, path: str) -> int:
    """Open a file below a folder; a link is followed only if its target is also below that folder."""
    try:
        return _walk(root, path)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    real_root, target = os.path.realpath(root), os.path.realpath(path)
    if not is_inside(target, real_root):
        raise FetchError(
            "LinkOutsideRoot",
            f"{readable(path)}: a link that leaves {readable(root)} is not followed; put the file itself there",
        )
    return _walk(real_root, target)  # a link that appears meanwhile is not followed


def _walk(root: str, path: str) -> int:
    """Open a file below a folder component by component; none of them may be a link."""
    *folders, name = [part for part in path[len(root) :].split("/") if part]
    if ".." in folders:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    here = os.open(root, _LOOK_UP)
    try:
        for folder in folders:
            above, here = here, os.open(folder, _LOOK_UP | os.O_NOFOLLOW, dir_fd=here)
            os.close(above)
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        _check_regular(status, path)
        return os.open(name, _READ | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def local_version(path: str, embedded: EmbeddedFile | None = None) -> str:
    """Return the version of the local file that has this name now; raises like `open_ranges`."""
    if embedded is not None:
        descriptor, status = open_regular(path, embedded)
        os.close(descriptor)
        return _version_of(status)
    try:
        return _version_of(os.stat(path))  # noqa: PTH116
    except OSError as error:
        raise from_os_error(error, readable(path)) from None


def _version_of(status: os.stat_result) -> str:
    """Return a text for the state of a file; a different file under the same name has a different one."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FetchError("NotAFile", f"{readable(path)}: only regular files are opened")
