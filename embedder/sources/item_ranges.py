"""Reads ranges of one item's bytes, whatever holds them: a file, a tar member, a table cell or an object."""

import os
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from embedder.media.sniff import HEAD_BYTES, extra_kind, sniff
from embedder.sources.byte_ranges import EmbeddedFile, open_ranges
from embedder.sources.fetch import Fetched, Fetcher, FetchError
from embedder.sources.tar_scan import BLOCK_BYTES, check_member
from embedder.sources.uris import TableCell, TableRow, TarMember, split_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import readable
from embedder.storage.web_address import is_web

ITEM_FILE = ("item_id", "source", "size_bytes", "modified", "stale")
"""Columns of the items table that identify an item's file."""
MAX_DOWNLOAD_BYTES = 1 << 30  # of a video that is downloaded for display


class PartRanges:
    """A part of a file; closing it closes the file."""

    def __init__(self, whole: ByteRanges, start: int, size: int) -> None:
        self._whole, self._start = whole, start
        self.size, self.version = size, whole.version

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the part."""
        return self._whole.read_at(self._start + offset, max(0, min(length, self.size - offset)))

    def close(self) -> None:
        """Close the file."""
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
        """Drop the bytes."""
        self._content = b""


def embedded_file(uri: str, item: Mapping[str, Any], *, is_text: bool) -> EmbeddedFile | None:
    """Return what an item's local file has to be; None for the web and for object stores, which have no links.

    `item` has the columns `ITEM_FILE` of its row of the items table. `is_text` marks a caption without an image.
    """
    path, part = split_uri(uri)
    if is_web(path) or is_remote(path):
        return None
    root = _root(path, part, item["item_id"].removeprefix(f"{item['source']}:"))
    size_bytes = item["size_bytes"] if part is None else None
    return EmbeddedFile(root, size_bytes, item["modified"], is_text, bool(item["stale"]))


def _root(path: str, part: object, name: str) -> str:
    """Return the source's folder for a local file: ids of files and members begin with the path below it.

    If the id doesn't reveal it, as for files that a table names, return the file's folder.
    """
    match part:
        case TarMember():  # the longest, if several prefixes are names of tars
            names = [f"{prefix}{path[-len('.tar') :]}" for prefix in accumulate(name.split("/"), "{}/{}".format)][::-1]
        case TableCell():
            names = [name.rpartition("#")[0]]
        case _:
            names = [name]
    roots = (path.removesuffix(f"/{each}") for each in names if each and path.endswith(f"/{each}"))
    return next(roots, os.path.dirname(path)) or "/"  # noqa: PTH120


def check_kind(head: bytes, uri: str, embedded: EmbeddedFile | None) -> None:
    """Raise a FetchError if content with these first bytes isn't of the embedded kind; with None any kind will do."""
    if embedded is None:
        return
    found = sniff(head)
    is_media = found in ("image", "video") or (found is None and extra_kind(head) is not None)
    if not (found == "text" if embedded.is_text else is_media):
        raise FetchError("Changed", f"{readable(uri)}: it is no {'caption' if embedded.is_text else 'image or video'}")


def open_item(uri: str, *, max_bytes: int, embedded: EmbeddedFile | None = None) -> ByteRanges:
    """Open the bytes of an item; only the ranges asked for are read, where a web server gives them. Raises FetchError.

    `max_bytes` limits what is held in memory, such as a table's cell; `embedded` None allows any file.
    """
    ranges = _open(uri, max_bytes, embedded)
    try:
        check_kind(ranges.read_at(0, HEAD_BYTES) if embedded is not None else b"", uri, embedded)
    except BaseException:
        ranges.close()
        raise
    return ranges


def _open(uri: str, max_bytes: int, embedded: EmbeddedFile | None) -> ByteRanges:
    path, part = split_uri(uri)
    if part is None:
        return _open_web(path, max_bytes) if is_web(path) else open_ranges(path, embedded)
    if isinstance(part, TarMember):
        return _open_member(path, part, embedded)
    if isinstance(part, TableRow):
        raise FetchError("NoContent", f"{readable(uri)}: a row without a file")
    with (
        Fetcher() as fetcher,
        fetcher.fetch(uri, max_bytes=max_bytes, max_file_bytes=MAX_DOWNLOAD_BYTES, embedded=embedded) as fetched,
    ):
        return _keep_open(fetched)


def _open_web(address: str, max_bytes: int) -> ByteRanges:
    from embedder.sources.web.body import SizeLimits
    from embedder.sources.web.client import WebClient, WebRanges, reader_settings

    client = WebClient(reader_settings())
    try:
        found = client.open(address, SizeLimits(max_bytes, MAX_DOWNLOAD_BYTES))
    except BaseException:
        client.close()
        raise
    if isinstance(found, WebRanges):  # which closes the client
        return found
    client.close()
    with found:
        return _keep_open(found)


def _keep_open(fetched: Fetched) -> ByteRanges:
    """Open what was fetched: a struct's `path`, or a download, which stays open when deleted."""
    return open_ranges(str(fetched.path)) if fetched.path is not None else _read(fetched.data)


def _read(content: bytes | None) -> BytesRanges:
    if content is None:
        raise FetchError("NoContent", "the cell is null")
    return BytesRanges(content)


def _open_member(path: str, member: TarMember, embedded: EmbeddedFile | None) -> PartRanges:
    whole = open_ranges(path, embedded)
    try:
        start = member.offset - BLOCK_BYTES
        block = whole.read_at(start, BLOCK_BYTES) if start >= 0 else b""
        if not check_member(block, member.name, member.size) or member.offset + member.size > whole.size:
            raise FetchError(
                "Changed", f"{readable(path)}: member {member.name!r} is not where the listing found it; list again"
            )
    except BaseException:
        whole.close()
        raise
    return PartRanges(whole, member.offset, member.size)
