"""Receives a response body within limits: its first bytes reveal its kind, which decides the limit."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from embedder.media.sniff import sniff, unreadable_kind
from embedder.sources.fetched import Fetched, write_temporary
from embedder.sources.source_errors import FetchError
from embedder.storage.http import Response
from embedder.storage.printable import printable

CHUNK_BYTES = 64 << 10
HEAD_BYTES = 4096  # enough for every signature that `sniff` knows
HELD_BYTES = 8 << 20  # of each of many downloads in memory; more goes to a temporary file
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # of zlib


@dataclass(frozen=True)
class SizeLimits:
    """Most bytes of one downloaded image or video, decompressed or as received."""

    image_bytes: int
    video_bytes: int

    def of(self, kind: str) -> tuple[int, str]:
        """Return the limit of a kind, and the key that sets it."""
        if kind == "video":
            return self.video_bytes, "decode.max_video_bytes"
        return self.image_bytes, "decode.max_file_bytes"

    def check(self, kind: str, num_bytes: int, where: str) -> None:
        """Refuse what its server says to be larger; raises a FetchError."""
        limit, key = self.of(kind)
        if num_bytes > limit:
            raise FetchError("TooLarge", f"{where}: {kind} of {num_bytes:,} bytes; {key} allows {limit:,}")


def receive(response: Response, limits: SizeLimits, where: str) -> Fetched:
    """Receive an image or a video; anything else is abandoned after its first bytes, with a FetchError.

    Returns the bytes, or their temporary file; of an image or clip that can't be decoded, the first bytes.
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
    announced = response.headers.get("Content-Length") or ""
    if announced.isdecimal() and len(announced) < 20:
        limits.check(kind, int(announced), where)
    limit, key = limits.of(kind)
    too_large = FetchError("TooLarge", f"{where}: {kind} of more than {limit:,} bytes, which {key} allows")
    pieces = _within(chain((head,), pieces), limit, too_large)
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) > HELD_BYTES:
            return write_temporary(chain((bytes(held),), pieces), f"{where}: download")
    return Fetched(bytes(held), None, len(held))


def _within(pieces: Iterable[bytes], limit: int, too_large: FetchError) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise too_large
        yield piece


def _describe(response: Response, head: bytes) -> str:
    """Describe a non-media response by its declared type, or a web page by its first bytes."""
    declared = printable(response.headers.get("Content-Type") or "no type", 80)
    if not head:
        return f"the answer is empty ({declared})"
    if head[:1024].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return f"the answer is a web page ({declared})"
    return f"the answer is neither an image nor a video ({declared})"


def _pieces(response: Response, max_bytes: int, where: str) -> Iterator[bytes]:
    coding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
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
    if expander is not None:
        raise FetchError("Truncated", f"{where}: the connection ended after {num_received:,} bytes", transient=True)


def _expand(expander: "zlib._Decompress", chunk: bytes) -> Iterator[bytes]:
    """Decompress a chunk in pieces of bounded size: a few kilobytes may expand to gigabytes."""
    while True:
        piece = expander.decompress(chunk, CHUNK_BYTES)
        yield piece
        chunk = expander.unconsumed_tail
        if not chunk and len(piece) < CHUNK_BYTES:
            return
