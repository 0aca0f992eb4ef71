"""Cursors: where a query continues, bound to the query, its options and the publication.

A cursor holds which hits were shown, not only how many. The next search is deeper, so an approximate index may find
other rows, and equal scores may come in another order; a number would then repeat hits and omit others. The cursor
holds all that is needed, so any replica accepts it, and a restart loses none.
"""

import base64
import binascii
import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from embedder.plugins.serve.serve_errors import RequestError
from embedder.retrieval.hit import Hit
from embedder.retrieval.queries import SearchOptions
from shards.file_schema import parse_json

NAME_BYTES = 5  # of ten thousand hits, two have the same name in one of 20,000 lists


class Cursor(NamedTuple):
    """Place in the hits of one query: publication, digest of query and options, and names of the hits so far."""

    version: str
    digest: str
    seen: bytes


def query_digest(*parts: object) -> str:
    """Digest of a query and its options."""
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=9).hexdigest()


def count_seen(seen: bytes) -> int:
    """Count the hits that a cursor names."""
    return len(seen) // NAME_BYTES


def following(hits: Iterable[Hit], seen: bytes, options: SearchOptions) -> tuple[list[Hit], bytes]:
    """Return the first k hits that were not seen, and their names.

    The search must be deep enough for the seen hits and k more. If the options make a video one hit, any of its
    segments stands for it.
    """
    known = {seen[start : start + NAME_BYTES] for start in range(0, len(seen), NAME_BYTES)}
    named = [(hit, _name(hit.item_id, 0 if options.group else hit.segment)) for hit in hits]
    taken = [(hit, name) for hit, name in named if name not in known][: options.k]
    return [hit for hit, _ in taken], b"".join(name for _, name in taken)


def make_cursor(cursor: Cursor) -> str:
    """Write a cursor for clients."""
    head = json.dumps([cursor.version, cursor.digest]).encode()  # JSON escapes the zero byte that follows it
    return base64.urlsafe_b64encode(head + b"\0" + cursor.seen).decode()


def read_cursor(text: str, max_depth: int) -> Cursor:
    """Read a client's cursor; RequestError if it is invalid."""
    try:
        head, _, seen = base64.b64decode(text.encode(), altchars=b"-_", validate=True).partition(b"\0")
        version, digest = parse_json(head)
    except (binascii.Error, ValueError, TypeError):
        raise _refusal("it is not one that an answer gave") from None
    is_whole = len(seen) % NAME_BYTES == 0 and 0 < count_seen(seen) <= max_depth
    if not (isinstance(version, str) and isinstance(digest, str) and is_whole):
        raise _refusal("it is not one that an answer gave")
    return Cursor(version, digest, seen)


def check_cursor(cursor: Cursor, digest: str) -> None:
    """Refuse (RequestError) a cursor that was made for another query or other options."""
    if cursor.digest != digest:
        raise _refusal("it belongs to another query or to other options")


def _name(item_id: str, segment: int) -> bytes:
    return blake2b(f"{segment} {item_id}".encode(errors="surrogatepass"), digest_size=NAME_BYTES).digest()


def _refusal(what: str) -> RequestError:
    return RequestError(
        422, "body.cursor", what, "the cursor of an answer, with the query and options of that answer", "search again"
    )
