"""One object of a bucket, read by ranges of one version."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from embedder.storage.object_stores import ObjectStoreError

# A small part file comes whole with its footer in one request; for a large one this covers the footer.
TAIL_BYTES = 256 << 10
# One request reads this much ahead: a tar of small members is then streamed, one of large members is skipped through.
AHEAD_BYTES = 4 << 20
# Maximum size of one request; `object_stores` says why.
PIECE_BYTES = 16 << 20


class ObjectRanges:
    """Random access to an object; if it is replaced meanwhile, that is an error, not a mixture.

    One window of the object is kept in memory: its end (`tail_bytes`) for readers of a Parquet footer and then of some
    columns, or the latest block (`ahead_bytes`) for readers that advance in small steps. `version` is the ETag, or the
    time of the last change if the store has none; another version means other content.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        named_errors: Callable[[], AbstractContextManager[None]],
        *,
        tail_bytes: int = 0,
        ahead_bytes: int = 0,
        meta: Any = None,
    ) -> None:
        """Get the object's size and version, and read its end if that is to be kept.

        Args:
            store: an obstore store.
            key: the object's path in it.
            named_errors: makes a context around each request that turns its errors into the caller's.
            tail_bytes: size of the end that is read now and kept.
            ahead_bytes: size of the block that a smaller read fetches and keeps; 0 reads nothing ahead.
            meta: the object's listing entry, which saves the request and determines the version that is read.
        """
        self._store, self._key, self._named_errors = store, key, named_errors
        if meta is None:
            with named_errors():
                meta = store.head(key)
        self.size: int = meta["size"]
        self.version = object_version(meta["e_tag"], meta["last_modified"])
        self._condition = {"if_match": meta["e_tag"]} if meta["e_tag"] else {}
        self._ahead_bytes = ahead_bytes
        self._start = max(0, self.size - tail_bytes)
        self._window = self._get(self._start, self.size)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the object's end."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if not self._start <= offset <= stop <= self._start + len(self._window):
            if stop - offset >= self._ahead_bytes:
                pieces = range(offset, stop, PIECE_BYTES)
                return b"".join(self._get(start, min(start + PIECE_BYTES, stop)) for start in pieces)
            self._window = self._get(offset, min(offset + self._ahead_bytes, self.size))
            self._start = offset
        return self._window[offset - self._start : stop - self._start]

    def close(self) -> None:
        """Drop the window; connections belong to the bucket's client."""
        self._window = b""

    def _get(self, start: int, stop: int) -> bytes:
        """Request one range; OSError if the object was replaced, unless `named_errors` turns it into another error."""
        if start >= stop:
            return b""
        from obstore.exceptions import PreconditionError

        options: dict[str, Any] = {"range": (start, stop), **self._condition}
        try:
            with self._named_errors():
                data = bytes(self._store.get(self._key, options=options).bytes())
                if len(data) != stop - start:
                    message = f"{self._key}: {len(data)} bytes came of {stop - start}"
                    raise ObjectStoreError("Truncated", message, transient=True)
        except PreconditionError:
            raise OSError("the object was replaced while it was read") from None
        return data


def object_version(etag: str | None, moment: Any) -> str:
    """Return an object's version: its ETag, else the time of its last change."""
    return etag.strip('"') if etag else str(moment.isoformat())


def join_ranges(ranges: Iterable[tuple[int, int]], gap_bytes: int = 0) -> list[tuple[int, int]]:
    """Return ranges (start, stop) in order, those merged that overlap or have at most a gap between them."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= gap_bytes:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
