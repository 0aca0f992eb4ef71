"""Body of an answer, received within limits: its kind is known from the first bytes, and decides how much may come."""

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import BinaryIO, Self

from embedder.media.sniff import sniff, unreadable_kind
from embedder.sources.errors import FetchError, from_os_error
from embedder.sources.fetched import Fetched
from embedder.storage.printable import printable

CHUNK_BYTES = 64 << 10
HEAD_BYTES = 4096  # enough for every signature that `sniff` knows
HELD_BYTES = 8 << 20  # of one download in memory, which many have at the same time; more goes to a temporary file
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # of zlib


@dataclass(frozen=True)
class SizeLimits:
    """Most bytes of one download, decompressed or as they come.

    Attributes:
        image_bytes: of an image.
        video_bytes: of a video.
    """

    image_bytes: int
    video_bytes: int

    def of(self, kind: str) -> tuple[int, str]:
        """Return the limit of a kind, and the key that sets it."""
        if kind == "video":
            return self.video_bytes, "decode.max_video_bytes"
        return self.image_bytes, "decode.max_file_bytes"


def receive(response: HTTPResponse, limits: SizeLimits, where: str) -> Fetched:
    """Receive an image or a video; whatever else is sent is left after its first bytes.

    Args:
        response: whose head has been read.
        limits: most bytes.
        where: the address, for people.

    Returns:
        The bytes, or the temporary file that holds them; of an image or clip that can't be decoded the first bytes.

    Raises:
        FetchError: it is neither an image nor a video, too large, cut off, or encoded in an unknown way.
    """
    pieces = _pieces(response, max(limits.image_bytes, limits.video_bytes), where)
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    kind = sniff(head[:HEAD_BYTES])
    if kind not in ("image", "video"):
        if unreadable_kind(head[:HEAD_BYTES]):
            return Fetched(head, None, len(head))
        raise FetchError("NotMedia", f"{where}: {_describe(response, head)}; name the address of an image or a video")
    limit, key = limits.of(kind)
    announced = response.getheader("Content-Length") or ""
    if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
        raise FetchError("TooLarge", f"{where}: {kind} of {int(announced):,} bytes; {key} allows {limit:,}")
    with _Received(where) as received:
        received.write(head)
        for piece in pieces:
            received.write(piece)
            if received.size > limit:
                break
        if received.size > limit:
            raise FetchError("TooLarge", f"{where}: {kind} of more than {limit:,} bytes, which {key} allows")
        return received.finish()


def _describe(response: HTTPResponse, head: bytes) -> str:
    """Describe an answer that is no media by what it is declared to be, a web page by its first bytes."""
    declared = printable(response.getheader("Content-Type") or "no type", 80)
    if not head:
        return f"the answer is empty ({declared})"
    if head[:1024].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return f"the answer is a web page ({declared})"
    return f"the answer is neither an image nor a video ({declared})"


def _pieces(response: HTTPResponse, max_bytes: int, where: str) -> Iterator[bytes]:
    """Yield the body, decompressed piece by piece; ends where it is whole."""
    coding = (response.getheader("Content-Encoding") or "identity").strip().lower()
    if coding != "identity" and coding not in WINDOW_BITS:
        raise FetchError(
            "BadEncoding",
            f"{where}: the answer is encoded as {printable(coding, 40)!r}, which was not asked for; images and videos "
            "come as they are",
        )
    expander = None if coding == "identity" else zlib.decompressobj(WINDOW_BITS[coding])
    num_received = 0
    while chunk := response.read(CHUNK_BYTES if num_received else HEAD_BYTES):
        num_received += len(chunk)
        if num_received > max_bytes:
            raise FetchError("TooLarge", f"{where}: more than {max_bytes:,} bytes came, compressed")
        if expander is None:
            yield chunk
            continue
        try:
            yield from _expand(expander, chunk)
        except zlib.error:
            raise FetchError("BadEncoding", f"{where}: the answer is declared as {coding}, and is not") from None
        if expander.eof:
            return
    if response.length or expander is not None:
        raise FetchError("Truncated", f"{where}: the connection ended after {num_received:,} bytes", transient=True)


def _expand(expander: "zlib._Decompress", chunk: bytes) -> Iterator[bytes]:
    """Decompress a chunk in pieces of bounded size: one of a few kilobytes may hold gigabytes."""
    while True:
        piece = expander.decompress(chunk, CHUNK_BYTES)
        yield piece
        chunk = expander.unconsumed_tail
        if not chunk and len(piece) < CHUNK_BYTES:
            return


class _Received:
    """Bytes received so far: in memory, then in a temporary file, which is deleted unless it is handed out."""

    def __init__(self, where: str) -> None:
        self.size = 0
        self._where = where
        self._held = bytearray()
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._is_given = False

    def write(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FetchError: the disk is full, or can't be written.
        """
        self.size += len(piece)
        if self._file is None and self.size <= HELD_BYTES:
            self._held += piece
            return
        try:
            if self._file is None:
                descriptor, name = tempfile.mkstemp(prefix="embedder-", suffix=".part")
                self._path, self._file = Path(name), open(descriptor, "wb")  # noqa: PTH123, SIM115
                self._file.write(self._held)
                self._held = bytearray()
            self._file.write(piece)
        except OSError as error:
            raise from_os_error(error, f"{self._where}: download to {tempfile.gettempdir()}") from None

    def finish(self) -> Fetched:
        """Hand out what came."""
        if self._file is None:
            return Fetched(bytes(self._held), None, self.size)
        try:
            self._file.close()
        except OSError as error:
            raise from_os_error(error, f"{self._where}: download to {tempfile.gettempdir()}") from None
        self._is_given = True
        return Fetched(None, self._path, self.size, is_temporary=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None and not self._is_given:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._path.unlink(missing_ok=True)
