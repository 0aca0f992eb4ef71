"""One object, read by ranges, for readers that need parts of it: a Parquet footer, then some columns."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from obstore.exceptions import PreconditionError

# A small part file comes whole with its footer, in one request; of a large one this holds the footer.
TAIL_BYTES = 256 << 10
BLOCK_BYTES = 16 << 20


class ObjectTail:
    """Reads ranges of one version, the end from memory: an object that is replaced meanwhile is an error."""

    def __init__(self, store: Any, path: str, named_errors: Callable[[], AbstractContextManager[None]]) -> None:
        """Ask for the object's size and its end.

        Args:
            store: an obstore store.
            path: the object's.
            named_errors: around each request; turns its errors into the caller's.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._store, self._path, self._named_errors = store, path, named_errors
        with named_errors():
            meta = store.head(path)
        self.size: int = meta["size"]
        self._etag: str | None = meta["e_tag"]
        self._tail_start = max(0, self.size - TAIL_BYTES)
        self._tail = self._get(self._tail_start, self.size) if self.size else b""

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only where the object ends."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start : stop - self._tail_start]
        blocks = range(offset, stop, BLOCK_BYTES)
        return b"".join(self._get(each, min(each + BLOCK_BYTES, stop)) for each in blocks)

    def close(self) -> None:
        """Forget the end."""
        self._tail = b""

    def _get(self, start: int, stop: int) -> bytes:
        options: dict[str, Any] = {"range": (start, stop)}
        if self._etag:
            options["if_match"] = self._etag
        try:
            with self._named_errors():
                return bytes(self._store.get(self._path, options=options).bytes())
        except PreconditionError:
            raise OSError("the object was replaced while it was read") from None
