"""Why the bytes of one item could not be had: a reject of that item, never the end of a run."""

import errno

# What a second attempt may cure: the disk, the network or the server had a bad moment.
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


class FetchError(Exception):
    """The bytes or the caption of one item could not be read.

    Attributes:
        error_type: a short name that rejects are counted by, such as `FileNotFound`.
        message: one line for people.
        transient: whether trying again later may help.
    """

    def __init__(self, error_type: str, message: str, transient: bool = False) -> None:
        super().__init__(error_type, message, transient)
        self.error_type = error_type
        self.message = message
        self.transient = transient

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}"


def from_os_error(error: OSError, where: str) -> FetchError:
    """Name what the operating system said about one file."""
    code = error.errno or 0
    message = f"{where}: {error.strerror or error}"
    return FetchError(_NAMES.get(code, "ReadError"), message, code in _TRANSIENT_ERRNOS)
