"""The bytes of one item, wherever they came from."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from embedder.sources.source_errors import from_os_error


@dataclass(frozen=True)
class Fetched:
    """The bytes of one item: in memory (`data`), in a file (`path`), or neither where a table's cell is null.

    Use it as a context manager or call `close`: that deletes a download's temporary file (`is_temporary`). A user's own
    file is never touched. If `descriptor` is set, `path` leads through it to the file that was opened, whatever has its
    name now.
    """

    data: bytes | None
    path: Path | None
    size_bytes: int
    is_temporary: bool = False
    descriptor: int | None = None

    @property
    def content(self) -> bytes | Path | None:
        """Return the bytes, or the path of the file that holds them; None where there is nothing."""
        return self.path if self.path is not None else self.data

    @property
    def is_null(self) -> bool:
        """Return whether there is nothing: a null cell, or a row with only a caption."""
        return self.data is None and self.path is None

    def close(self) -> None:
        """Delete the temporary file and close the descriptor, if there are any; later calls do nothing."""
        if self.is_temporary and self.path is not None:
            self.path.unlink(missing_ok=True)
        if self.descriptor is not None:
            os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_temporary(pieces: Iterable[bytes], where: str) -> Fetched:
    """Write pieces to a temporary file; on failure nothing is left behind.

    Raises a FetchError if the disk is full or can't be written, or a piece can't be read.
    """
    path = None
    try:
        descriptor, name = tempfile.mkstemp(prefix="embedder-", suffix=".part")
        path = Path(name)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (takes a descriptor)
            size = sum(map(file.write, pieces))
    except BaseException as error:
        if path is not None:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise from_os_error(error, f"{where} to {path or tempfile.gettempdir()}") from None
        raise
    return Fetched(None, path, size, is_temporary=True)
