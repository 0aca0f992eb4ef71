"""Files of items: the bytes of an image or a video by Range, read in separate threads as the client takes them."""

import logging
import mimetypes
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.responses import Response, StreamingResponse

from embedder.media.formats import IMAGE_FORMATS
from embedder.media.sniff import HEAD_BYTES
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.task_threads import TaskThreads
from embedder.plugins.serve.thumbnails import unreadable
from embedder.retrieval.row_metadata import EmbeddedFiles
from embedder.sources.item_ranges import open_item
from embedder.sources.uris import name_in
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.item_error import ItemError

LOG = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
SHOWN_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/avif", "image/bmp")
"""Images that browsers show; none of these formats can hold a script."""
DEFAULT_TYPE = "application/octet-stream"
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Read a Range header: the first byte and the one after the last; None for the whole file.

    Several ranges, and units other than bytes, are answered with the whole file, as RFC 9110 allows. Raises
    `RequestError` if it begins beyond the end.
    """
    match = RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < int(first):
            return None
    else:
        start, stop = max(0, size - int(last)), size
    if start >= stop:
        raise RequestError(
            416,
            "header.Range",
            f"{header}",
            f"bytes from 0 to {size - 1}",
            "ask for bytes of the file",
            content_range=f"bytes */{size}",
        )
    return start, stop


async def clip_response(
    row: dict[str, Any],
    headers: dict[str, str],
    range_header: str | None,
    *,
    files: EmbeddedFiles,
    threads: TaskThreads,
    max_bytes: int,
    with_body: bool,
) -> Response:
    """Answer with an item's file or a range of it; RequestError if the file is gone or changed, or is shorter."""

    def open_file() -> tuple[ByteRanges, bytes]:
        embedded = files.of(row["item_id"], row["uri"], row["modality"])
        ranges = open_item(row["uri"], max_bytes=max_bytes, embedded=embedded)
        try:
            return ranges, ranges.read_at(0, HEAD_BYTES)
        except BaseException:
            ranges.close()
            raise

    try:
        ranges, head = await threads.run(open_file)
    except ItemError as error:
        raise unreadable(row["item_id"], error) from None
    try:
        wanted = parse_range(range_header, ranges.size)
    except RequestError:
        ranges.close()
        raise
    start, stop = wanted or (0, ranges.size)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{ranges.size}"
    headers |= {"Content-Length": str(stop - start), "Accept-Ranges": "bytes"}
    status, kind = 200 if wanted is None else 206, _content_type(row["uri"], head)
    if not with_body:
        ranges.close()
        return Response(None, status, headers, kind)
    return StreamingResponse(_pieces(ranges, start, stop, threads), status, headers, kind)


def _content_type(uri: str, head: bytes) -> str:
    """Type of a file: an image's by its first bytes, since names are often wrong; a video's by its name."""
    found = next((each for each in IMAGE_FORMATS if each.signatures and head.startswith(each.signatures)), None)
    image = mimetypes.guess_type(f"a{found.suffixes[0]}")[0] if found is not None else None
    if image is None and head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        image = "image/webp"
    kind = image or mimetypes.guess_type(name_in(uri))[0] or ""
    return kind if kind in SHOWN_TYPES or kind.startswith("video/") else DEFAULT_TYPE


async def _pieces(ranges: ByteRanges, start: int, stop: int, threads: TaskThreads) -> AsyncIterator[bytes]:
    """Read piece by piece; if the file shrinks, or can't be read on, the answer ends early, which the client sees."""
    try:
        while start < stop:
            piece = await threads.continue_answer(ranges.read_at, start, min(PIECE_BYTES, stop - start))
            if not piece:
                return
            yield piece
            start += len(piece)
    except ItemError as error:
        LOG.warning(f"a file ended early: {error.message}")
    finally:
        with suppress(OSError):
            ranges.close()
