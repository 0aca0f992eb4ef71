"""Files of a version, opened only after their hash matches the manifest's, or a hash of samples where one is known."""

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from index.index_errors import RetrievalError
from index.manifest import Manifest

END_BYTES, SAMPLE_BYTES, NUM_SAMPLES = 64 << 10, 4 << 10, 14
"""Of a file, both ends and so many pages between them, evenly spaced, go into its hash of samples."""


def hash_samples(path: Path) -> str:
    """Return a hash of a file's size, its ends and some of its pages, hexadecimal; 184 KiB are read at most.

    It finds a file that is another one, cut short or left half written; `hash_files` finds any altered byte. Raises
    OSError if the file can't be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
        between = range(END_BYTES, max(END_BYTES, size - END_BYTES), max(1, (size - 2 * END_BYTES) // NUM_SAMPLES))
        places = [(0, END_BYTES), *((at, SAMPLE_BYTES) for at in between), (max(0, size - END_BYTES), END_BYTES)]
        for at, num_bytes in places[: NUM_SAMPLES + 3]:
            found.update(os.pread(file.fileno(), num_bytes, at))
    return found.hexdigest()


def check_hashes(folder: Path, sha256: Mapping[str, str], names: Iterable[str]) -> None:
    """Read files of a folder whole; raises a RetrievalError at the first whose hash is not that of `sha256`.

    OSError if one can't be read: it may have been deleted since it was opened.
    """
    for name in names:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256[name]:
            raise _altered_error(folder / name, found, sha256[name])


def open_checked(
    path: Path, manifest: Manifest, read_once_bytes: int, samples: Mapping[str, str] | None = None
) -> BinaryIO:
    """Open a file, check its hash, and rewind it, so that exactly the hashed bytes are read next.

    Up to `read_once_bytes`, it is read into memory and closed. With `samples`, the known `hash_samples` by file name,
    only those are compared. Raises a RetrievalError if it is missing or altered.
    """
    opened = _open(path)
    if samples is not None and path.name in samples:
        if (found := hash_samples(path)) != samples[path.name]:
            opened.close()
            raise _altered_error(path, found, samples[path.name], "hash of samples")
        return opened
    file: BinaryIO = opened
    if os.fstat(opened.fileno()).st_size <= read_once_bytes:
        with opened:
            file = io.BytesIO(opened.read())
    found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO has readinto in fact
    if found != manifest.sha256[path.name]:
        file.close()
        raise _altered_error(path, found, manifest.sha256[path.name])
    file.seek(0)
    return file


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; fetch the version again, or build the index again") from None


def _altered_error(path: Path, found: str, expected: str, kind: str = "sha256") -> RetrievalError:
    return RetrievalError(
        f"{path}: its {kind} is {found[:16]}..., the manifest says {expected[:16]}...: the file was altered or cut "
        "short, and is not read; fetch the version again, or build the index again"
    )
