"""Files on a disk that appear whole or not at all, and renames beyond those of Python."""

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

NEW_NAME, EXCHANGE = 1, 2
"""Of `rename_with`: the target must not exist, without hard links; both names exist, and change places (renameat2)."""
RENAME_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Errors of `rename_with` on file systems and systems that can't do it."""
_AT_FDCWD = -100


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`, which takes that name when the block succeeds.

    A crash leaves the old file or the new one: the content reaches the disk before the name does. Every call uses its
    own temporary file, so processes that write the same file replace each other's and never mix. Raises OSError if the
    folder is missing or not writable.
    """
    # Cut, as a name has 255 bytes at most, and a character up to four.
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def rename_with(flag: int, source: str | Path, target: str | Path) -> None:
    """Rename in one step; FileExistsError where NEW_NAME finds the name taken, OSError if it is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(target))
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
