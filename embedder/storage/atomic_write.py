"""Files on a disk that appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
