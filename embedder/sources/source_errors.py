"""Errors of reading one item, and their names for the operating system's error codes."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from embedder.errors import SourceError
from embedder.storage.item_error import ItemError

# A retry may succeed: the disk, the network or the server was busy or away for a moment.
_TRANSIENT_ERRNOS = frozenset({
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH,
})  # fmt: skip
_NAMES = {
    errno.ENOENT: "FileNotFound",
    errno.ENOTDIR: "FileNotFound",
    errno.ENAMETOOLONG: "FileNotFound",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.ELOOP: "BrokenLink",
    errno.EISDIR: "NotAFile",
    errno.ENXIO: "NotAFile",
    errno.ENOSPC: "NoSpace",
}


_LISTING_CURES = {
    "NetworkError": "; check endpoint, region and credentials, then run again",
    "FileNotFound": "; check the path, and that its disk is mounted",
}


class FetchError(ItemError):
    """The bytes or the caption of one item could not be read."""


def from_os_error(error: OSError, where: str) -> FetchError:
    """Convert the operating system's error for one file."""
    code = error.errno or 0
    message = f"{where}: {error.strerror or error}"
    return FetchError(_NAMES.get(code, "ReadError"), message, code in _TRANSIENT_ERRNOS)


@contextmanager
def listing_errors() -> Iterator[None]:
    """Convert an error of reading a source into one of listing it."""
    try:
        yield
    except FetchError as error:
        raise SourceError(error.message + _LISTING_CURES.get(error.error_type, "")) from None
