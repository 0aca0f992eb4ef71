"""What goes wrong with a store's files, told as the user can mend it, or as passing trouble."""

import errno
import os
import re

from embedder.errors import RunFailedError, StoreError
from shards.object_stores import ObjectStoreError

_OS_ERROR = re.compile(r"os error (\d+)")
_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "check its rights",
    errno.EPERM: "check its rights",
}


class StoreUnavailableError(RunFailedError):
    """The store's server did not answer, many times over; what is finished is kept."""


def remote_problem(error: ObjectStoreError) -> StoreError | StoreUnavailableError:
    """A request to a bucket failed for good, or often enough to give up."""
    if error.transient:
        return StoreUnavailableError(
            f"store {error.message}: it did not answer as it should, however often it was asked; "
            "what is finished is kept, and the same command goes on"
        )
    return StoreError(f"store {error.message}")


def local_problem(error: Exception, where: str) -> Exception:
    """A disk refused; an error that no user could mend stays as it is."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(where)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    if number not in _CURES:
        return error
    return StoreError(
        f"store {where}: {os.strerror(number).lower()}; {_CURES[number]}: what is finished is kept, and the same "
        "command goes on"
    )
