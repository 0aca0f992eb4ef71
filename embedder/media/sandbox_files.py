"""Encoded bytes in the sandbox process: a file on disk, or the inbox shared with the parent."""

import io
import os
import stat
from typing import Any, BinaryIO

from embedder.media.errors import DecodeError


class InboxFile(io.RawIOBase):
    """First `size` bytes of an open file, with a position of its own: the parent holds the same file open."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__()
        self._fd = fd
        self._size = size
        self._position = 0

    def readable(self) -> bool:  # noqa: D102 - as in io.RawIOBase
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: D102
        wanted = memoryview(buffer)[: max(0, self._size - self._position)]
        num_bytes = os.preadv(self._fd, [wanted], self._position)
        self._position += num_bytes
        return num_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: D102
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position


def open_regular(path: str) -> BinaryIO:
    """Open a file on disk, unbuffered; pipes and devices, which may never end, are refused.

    Raises:
        DecodeError: the file can't be opened; transient, for its content is not to blame.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DecodeError("NotAFile", "this is a folder, a pipe or a device, not a file")
    return open(fd, "rb", buffering=0)  # noqa: PTH123 - it is open already


def read_whole(file: BinaryIO, max_bytes: int) -> bytes:
    """Read a file from its beginning to its end.

    Raises:
        DecodeError: it is larger than `max_bytes`, or can't be read.
    """
    size = file.seek(0, os.SEEK_END)
    if size > max_bytes:
        raise DecodeError("FileTooLarge", f"the file has {size} bytes; an image may have {max_bytes}")
    file.seek(0)
    try:
        return file.read()
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError | ValueError) -> DecodeError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DecodeError(type(error).__name__, f"the file can't be read: {reason}", transient=True)
