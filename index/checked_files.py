"""Files of a version, opened only after their hash matches the manifest's."""

import hashlib
import io
import os
from pathlib import Path
from typing import BinaryIO

from index.index_errors import RetrievalError
from index.manifest import Manifest


def open_checked(path: Path, manifest: Manifest, read_once_bytes: int) -> BinaryIO:
    """Open a file, check its hash, and rewind it, so that exactly the hashed bytes are read next.

    Up to `read_once_bytes`, it is read into memory and closed. Raises a RetrievalError if it is missing or altered.
    """
    try:
        opened = path.open("rb")
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; fetch the version again, or build the index again") from None
    file: BinaryIO = opened
    if os.fstat(opened.fileno()).st_size <= read_once_bytes:
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
