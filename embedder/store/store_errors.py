"""Errors of a store's files, as user-repairable mistakes or as transient failures."""

import errno
import os
import re

from embedder.errors import RunFailedError, StoreError
from embedder.storage.object_stores import ObjectStoreError

_REFUSALS = frozenset({"PermissionDenied", "NoCredentials", "RequestRefused"})
_OS_ERROR = re.compile(r"os error (\d+)")
_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "check its rights",
    errno.EPERM: "check its rights",
    errno.ENAMETOOLONG: "give a shorter name",
}


class StoreUnavailableError(RunFailedError):
    """The store's server failed after many retries."""

    is_resumable = True


class StoreUnwritableError(StoreError):
    """The store's disk can't be written, as it is full or permissions are missing."""

    is_resumable = True


class StoreRefusedError(StoreError):
    """The store's server refuses these credentials or this request; its files may all be there."""


TRANSIENT_ERRORS = (StoreUnavailableError, StoreUnwritableError, StoreRefusedError)
"""Errors after which the same files may be read another time."""


def remote_problem(error: ObjectStoreError) -> StoreError | StoreUnavailableError:
    """Return the error for a bucket request that failed permanently or after all retries."""
    if error.transient:
        return StoreUnavailableError(
            f"store {error.message}: it failed or did not answer, even after many retries; try again when it answers"
        )
    kind = StoreRefusedError if error.kind in _REFUSALS else StoreError
    return kind(f"store {error.message}")


def local_problem(error: Exception, where: str) -> Exception:
    """Return the error for a local disk's error; one that no user could repair stays as it is."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(where)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    if number not in _CURES:
        return error
    return StoreUnwritableError(f"store {where}: {os.strerror(number).lower()}; {_CURES[number]}, and try again")
