"""Errors of reading one item, and their names for what the operating system answered."""

import errno

from embedder.storage.item_error import ItemError

# A second attempt may succeed: the disk, the network or the server was busy or away for a moment.
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    }
)
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


class FetchError(ItemError):
    """The bytes or the caption of one item could not be read."""


def from_os_error(error: OSError, where: str) -> FetchError:
    """Name the error that the operating system reported for one file."""
    code = error.errno or 0
    message = f"{where}: {error.strerror or error}"
    return FetchError(_NAMES.get(code, "ReadError"), message, code in _TRANSIENT_ERRNOS)
