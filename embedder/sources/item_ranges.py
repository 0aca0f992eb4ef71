"""Bytes of one item by ranges, whatever holds them: a file, a member of a tar, a cell of a table, an object."""

from embedder.sources.byte_ranges import open_ranges
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.tar_scan import BLOCK_BYTES, check_member
from embedder.sources.uris import TableRow, TarMember, split_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import readable
from embedder.storage.web_address import is_web

MAX_DOWNLOAD_BYTES = 1 << 30  # of a video that is downloaded to be shown


class PartRanges:
    """Stretch of a file."""

    def __init__(self, whole: ByteRanges, start: int, size: int) -> None:
        """Take a stretch; closing it closes the file.

        Args:
            whole: the file.
            start: first byte.
            size: number of bytes.
        """
        self._whole, self._start = whole, start
        self.size, self.version = size, whole.version

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only where the stretch ends."""
        return self._whole.read_at(self._start + offset, max(0, min(length, self.size - offset)))

    def close(self) -> None:
        """Release the file."""
        self._whole.close()


class BytesRanges:
    """Bytes in memory."""

    version = ""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end."""
        return self._content[offset : offset + length]

    def close(self) -> None:
        """Forget the bytes."""
        self._content = b""


def open_item(uri: str, *, max_bytes: int) -> ByteRanges:
    """Open the bytes of an item; of a file, a tar and an object only what is asked for is read, of the web all.

    Args:
        uri: as the listing gives it.
        max_bytes: the most that may be held in memory, which a table's cell is.

    Raises:
        FetchError: the bytes are missing, forbidden, changed since the listing, or too many.
    """
    path, part = split_uri(uri)
    if part is None and not is_web(path):
        return open_ranges(path)
    if isinstance(part, TarMember):
        return _open_member(path, part)
    if isinstance(part, TableRow):
        raise FetchError("NoContent", f"{readable(uri)}: a row without a file")
    with Fetcher() as fetcher, fetcher.fetch(uri, max_bytes=max_bytes, max_file_bytes=MAX_DOWNLOAD_BYTES) as fetched:
        if fetched.path is not None:  # the file that a struct's `path` names, or a download, which is open when it goes
            return open_ranges(str(fetched.path))
        return _read(fetched.data)


def _read(content: bytes | None) -> BytesRanges:
    if content is None:
        raise FetchError("NoContent", "the cell is null")
    return BytesRanges(content)


def _open_member(path: str, member: TarMember) -> PartRanges:
    whole = open_ranges(path)
    try:
        start = member.offset - BLOCK_BYTES
        block = whole.read_at(start, BLOCK_BYTES) if start >= 0 else b""
        if not check_member(block, member.name, member.size) or member.offset + member.size > whole.size:
            raise FetchError(
                "Changed",
                f"{readable(path)}: member {member.name!r} is not where the listing found it; list again",
            )
    except BaseException:
        whole.close()
        raise
    return PartRanges(whole, member.offset, member.size)
