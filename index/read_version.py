"""Read the files of one version, each only after its hash is found to be that of the manifest."""

import hashlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from index.errors import RetrievalError
from index.ids import read_ids
from index.manifest import IDS_NAME, INDEX_NAME, LIVE_NAME, Manifest
from index.version_files import VersionContents, read_mask

if TYPE_CHECKING:
    import faiss

# A file up to this size is read once, hashed and parsed in memory; a larger one is hashed and then mapped, or read from
# the same open file, so that the index is not in memory twice.
READ_ONCE_BYTES = 256 << 20


def read_contents(folder: Path, manifest: Manifest) -> VersionContents:
    """Read the ids of all rows, and which of them may be found.

    Raises:
        RetrievalError: a file is missing or altered, or does not fit the manifest.
    """
    ids = read_ids(read_checked(folder / IDS_NAME, manifest))
    is_live = None
    if LIVE_NAME in manifest.sha256:
        is_live = read_mask(read_checked(folder / LIVE_NAME, manifest), manifest.num_rows)
    found = (ids.num_rows, ids.num_rows if is_live is None else int(is_live.sum()))
    expected = (manifest.num_rows, manifest.num_vectors)
    if found != expected:
        raise RetrievalError(
            f"{folder}: found (ids, of them to be found) = {found}, its manifest says {expected}; build the index again"
        )
    return VersionContents(ids, is_live)


def read_index(folder: Path, manifest: Manifest, *, map_large: bool) -> "faiss.Index":
    """Read the FAISS file of a version, or map it where it is large, after its hash is checked.

    Args:
        folder: folder of the version.
        manifest: its manifest.
        map_large: whether to map a large file; a mapped index takes no more vectors.

    Raises:
        RetrievalError: it is missing or altered, FAISS does not know its format, or it does not fit the manifest.
    """
    from index import faiss_build

    path = folder / INDEX_NAME
    with _open_checked(path, manifest) as file:
        try:
            if map_large and not isinstance(file, io.BytesIO) and sys.platform == "linux":
                index = faiss_build.map_file(Path(f"/proc/self/fd/{file.fileno()}"))  # the very file that was hashed
            else:
                index = faiss_build.read(file)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RetrievalError(
                f"{path}: FAISS {faiss_build.VERSION} can't read what FAISS {manifest.faiss_version} wrote ({reason}); "
                "build the index again"
            ) from None
    found, expected = (index.ntotal, index.d), (manifest.num_rows, manifest.dim)
    if found != expected:
        raise RetrievalError(
            f"{folder}: found (rows, dimensions) = {found}, its manifest says {expected}; build the index again"
        )
    return index


def read_checked(path: Path, manifest: Manifest) -> bytes:
    """Read a small file of a version and check its hash.

    Raises:
        RetrievalError: it is missing or altered.
    """
    with _open_checked(path, manifest) as file:
        return file.read()


def _open_checked(path: Path, manifest: Manifest) -> BinaryIO:
    """Open a file, check its hash, and rewind it; what is read next is what was hashed."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; fetch the version again, or build the index again") from None
    file: BinaryIO = opened
    if os.fstat(opened.fileno()).st_size <= READ_ONCE_BYTES:
        with opened:
            file = io.BytesIO(opened.read())
    found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO has readinto in fact
    if found != manifest.sha256[path.name]:
        file.close()
        raise RetrievalError(
            f"{path}: its sha256 is {found[:16]}..., the manifest says {manifest.sha256[path.name][:16]}...: the file "
            "was altered or cut short, and is not read; fetch the version again, or build the index again"
        )
    file.seek(0)
    return file
