"""Turns a `uri` into bytes, or into a local path that bytes can be streamed from."""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Self

from embedder.config_toml.run_sections import WebConfig
from embedder.media.sniff import HEAD_BYTES, sniff
from embedder.sources.byte_ranges import EmbeddedFile, local_version, open_ranges, open_regular
from embedder.sources.fetched import Fetched, write_temporary
from embedder.sources.parquet_cells import ParquetCells, cell_buffer, cell_reference
from embedder.sources.source_errors import FetchError, from_os_error
from embedder.sources.tar_scan import BLOCK_BYTES, check_member
from embedder.sources.unicode_forms import find_unicode_twin
from embedder.sources.uris import TableCell, TarMember, file_url_path, split_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import readable
from embedder.storage.web_address import is_web

if TYPE_CHECKING:
    from embedder.sources.web.ahead import DownloadsAhead
    from embedder.sources.web.body import SizeLimits
    from embedder.sources.web.client import WebClient

__all__ = ["FetchError", "Fetched", "Fetcher"]

CHUNK_BYTES = 4 << 20


class Fetcher:
    """Fetches items one after another; keeps the last tar and the last Parquet row group open.

    Use one per process; it isn't thread-safe, though it downloads in several threads.
    """

    def __init__(self, web: WebConfig | None = None) -> None:
        """Make a fetcher; `web` None means the limits for reading a store (`reader_settings`)."""
        self._cells = ParquetCells()
        self._tar: tuple[str, ByteRanges] | None = None
        self._web = web
        self._client: WebClient | None = None
        self._downloads: DownloadsAhead | None = None

    def fetch(
        self,
        uri: str,
        *,
        max_bytes: int,
        max_file_bytes: int | None = None,
        embedded: EmbeddedFile | None = None,
        max_read_bytes: int = 0,
    ) -> Fetched:
        """Fetch one item, given by the listing's `uri`; raises a FetchError.

        Local whole files come as a path, or as bytes up to `max_read_bytes`. Tar members, cells, and remote files up to
        `max_bytes` come as bytes; larger remote files, and web downloads beyond a few MiB, go to a temporary file.
        `max_file_bytes` limits whole files, and an image in a bucket then has at most `max_bytes`; None allows any
        size. `embedded` is what the local file of an item embedded earlier has to be; it is None for an item being
        listed now.
        """
        if is_web(uri):
            return self._download(uri, max_bytes, max_file_bytes)
        path, part = split_uri(uri)
        if isinstance(part, TarMember):
            return self._member(path, part, max_bytes, embedded)
        if isinstance(part, TableCell):
            return self._cell(path, part, max_bytes, max_file_bytes, embedded)
        if part is not None:
            return Fetched(None, None, 0)
        if is_remote(path):
            return _remote_file(path, max_bytes, max_file_bytes)
        return _local_file(path, max_file_bytes, embedded, max_read_bytes)

    @contextmanager
    def ahead(self, uris: Iterable[str], *, max_bytes: int, max_file_bytes: int | None = None) -> Iterator[None]:
        """Download web items in parallel, before `fetch` is called for them in this order."""
        addresses = [uri for uri in uris if is_web(uri)]
        if len(addresses) < 2:
            yield
            return
        from embedder.sources.web.ahead import DownloadsAhead

        downloads = DownloadsAhead(self._web_client(), addresses, _size_limits(max_bytes, max_file_bytes))
        self._downloads = downloads
        try:
            yield
        finally:
            downloads.close()
            if self._downloads is downloads:
                self._downloads = None

    def content_hash(self, fetched: Fetched) -> str:
        """Hash the content: blake2b of 128 bits, as 32 hex characters; a FetchError if the file can't be read."""
        digest = blake2b(fetched.data or b"", digest_size=16)
        if fetched.path is not None:
            with closing(open_ranges(str(fetched.path))) as ranges:
                for start in range(0, ranges.size, CHUNK_BYTES):
                    digest.update(ranges.read_at(start, CHUNK_BYTES))
        return digest.hexdigest()

    def close(self) -> None:
        """Close all open files."""
        self._cells.close()
        if self._client is not None:
            self._client.close()
        if self._tar is not None:
            self._tar[1].close()
            self._tar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _member(self, path: str, member: TarMember, max_bytes: int, embedded: EmbeddedFile | None) -> Fetched:
        _check_size(member.size, max_bytes, f"{readable(path)}: member {member.name!r}")
        was_open = self._tar is not None
        try:
            data = _read_member(self._open_tar(path, embedded), path, member)
        except FetchError as error:
            if error.error_type != "Changed" or not was_open:
                raise
            self.close()  # the tar may have been replaced and listed again since it was opened
            data = _read_member(self._open_tar(path, embedded), path, member)
        return Fetched(data, None, len(data))

    def _open_tar(self, path: str, embedded: EmbeddedFile | None) -> ByteRanges:
        if self._tar is not None:
            name, ranges = self._tar
            if name == path and (is_remote(path) or ranges.version == local_version(path, embedded)):
                return ranges
            ranges.close()
            self._tar = None
        self._tar = (path, open_ranges(path, embedded))
        return self._tar[1]

    def _cell(
        self, path: str, cell: TableCell, max_bytes: int, max_file_bytes: int | None, embedded: EmbeddedFile | None
    ) -> Fetched:
        value = self._cells.cell(path, cell, embedded)
        buffer, where = cell_buffer(value), f"{readable(path)}: row {cell.row} of {cell.column!r}"
        if buffer is None:
            reference = cell_reference(value, where)
            if not reference:
                return Fetched(None, None, 0)
            return self._fetch_referenced(path, reference, max_bytes, max_file_bytes, embedded)
        _check_size(buffer.size, max_bytes, where)
        return Fetched(buffer.to_pybytes(), None, buffer.size)

    def _web_client(self) -> "WebClient":
        if self._client is None:
            from embedder.sources.web.client import WebClient, reader_settings

            self._client = WebClient(self._web or reader_settings())
        return self._client

    def _download(self, address: str, max_bytes: int, max_file_bytes: int | None) -> Fetched:
        fetched = self._downloads.take(address) if self._downloads is not None else None
        return fetched or self._web_client().download(address, _size_limits(max_bytes, max_file_bytes))

    def _fetch_referenced(
        self, table: str, reference: str, max_bytes: int, max_file_bytes: int | None, embedded: EmbeddedFile | None
    ) -> Fetched:
        """Fetch the file that a struct's `path` names; a relative one is next to the table's file."""
        if is_web(reference):
            return self._download(reference, max_bytes, max_file_bytes)
        reference = file_url_path(reference) if reference.startswith("file://") else reference
        is_absolute = reference.startswith("/") or is_remote(reference)
        folder = "" if is_absolute else table.rpartition("/")[0]
        path = reference if is_absolute else f"{folder}/{reference}"
        if is_remote(path):
            return _remote_file(path, max_bytes, max_file_bytes)
        path = find_unicode_twin(path) or path
        return _local_file(path, embedded=None if embedded is None else embedded.for_neighbour(path, folder))


def _size_limits(max_bytes: int, max_file_bytes: int | None) -> "SizeLimits":
    from embedder.sources.web.body import SizeLimits

    return SizeLimits(max_bytes, max_bytes if max_file_bytes is None else max_file_bytes)


def _read_member(ranges: ByteRanges, path: str, member: TarMember) -> bytes:
    """Read a member after checking that the header before it is still its own."""
    where = f"{readable(path)}: member {member.name!r}"
    start = member.offset - BLOCK_BYTES
    block = ranges.read_at(start, BLOCK_BYTES + member.size) if start >= 0 else b""
    if not check_member(block[:BLOCK_BYTES], member.name, member.size):
        raise FetchError("Changed", f"{where} is not where the listing found it; the tar was rewritten, list again")
    data = block[BLOCK_BYTES:]
    if len(data) < member.size:
        raise FetchError("Truncated", f"{where} ends after {len(data):,} of {member.size:,} bytes")
    return data


def _local_file(
    path: str, max_file_bytes: int | None = None, embedded: EmbeddedFile | None = None, max_read_bytes: int = 0
) -> Fetched:
    descriptor, status = open_regular(path, embedded)  # opened here so that unreadable files are found
    try:
        _check_size(status.st_size, max_file_bytes, readable(path), "decode.max_video_bytes")
        data = _read_small(descriptor, status.st_size, path) if status.st_size <= max_read_bytes else None
    except FetchError:
        os.close(descriptor)
        raise
    if data is not None:
        os.close(descriptor)
        return Fetched(data, None, len(data))
    open_path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # for the sandbox, whatever has the name by then
    if embedded is not None and open_path.exists():
        return Fetched(None, open_path, status.st_size, descriptor=descriptor)
    os.close(descriptor)
    return Fetched(None, Path(path), status.st_size)


def _read_small(descriptor: int, size: int, path: str) -> bytes | None:
    """Read an open file whole; None if it has grown since, because it is still being written."""
    try:
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
    except OSError as error:
        raise from_os_error(error, readable(path)) from None
    return data if len(data) <= size else None


def _remote_file(uri: str, max_bytes: int, max_file_bytes: int | None = None) -> Fetched:
    with closing(open_ranges(uri)) as ranges:
        _check_size(ranges.size, max_file_bytes, readable(uri), "decode.max_video_bytes")
        if ranges.size <= max_bytes:
            return Fetched(ranges.read_at(0, ranges.size), None, ranges.size)
        if max_file_bytes is not None and sniff(ranges.read_at(0, HEAD_BYTES)) == "image":
            _check_size(ranges.size, max_bytes, readable(uri))  # it would be refused once all of it has come
        starts = range(0, ranges.size, CHUNK_BYTES)
        pieces = (ranges.read_at(start, min(CHUNK_BYTES, ranges.size - start)) for start in starts)
        return write_temporary(pieces, f"{uri}: download")


def _check_size(size: int, max_bytes: int | None, where: str, limit: str = "decode.max_file_bytes") -> None:
    if max_bytes is not None and size > max_bytes:
        raise FetchError("TooLarge", f"{where} has {size:,} bytes; {limit} allows {max_bytes:,}")
