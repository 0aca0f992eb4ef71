"""Bytes read by ranges, as a Python file."""

import io
from typing import Protocol


class ByteRanges(Protocol):
    """A file from which ranges are read; `version` changes when the file is replaced."""

    size: int
    version: str

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the file's end."""

    def close(self) -> None:
        """Release the file."""


class RangeFile(io.RawIOBase):
    """A Python file over ranges, for readers that want one (pyarrow, text)."""

    def __init__(self, ranges: ByteRanges) -> None:
        super().__init__()
        self._ranges = ranges
        self._position = 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def tell(self) -> int:
        """Return the position, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ranges.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, or all that are left."""
        length = self._ranges.size - self._position if size is None or size < 0 else size
        data = self._ranges.read_at(self._position, max(0, length))
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stub's type has no length
        """Fill the buffer; `io.BufferedReader` calls this."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the ranges too."""
        if not self.closed:
            self._ranges.close()
        super().close()
