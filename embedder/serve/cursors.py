"""Cursors: where a query goes on, bound to the query, its options and the publication."""

import base64
import binascii
import json
from hashlib import blake2b
from typing import NamedTuple

from embedder.serve.errors import RequestError


class Cursor(NamedTuple):
    """Place in the hits of one query."""

    version: str
    offset: int
    digest: str


def query_digest(*parts: object) -> str:
    """Digest of a query and its options."""
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=9).hexdigest()


def make_cursor(version: str, offset: int, digest: str) -> str:
    """Write a cursor.

    Args:
        version: publication of the hits so far.
        offset: their number.
        digest: of the query and its options.
    """
    return base64.urlsafe_b64encode(json.dumps([version, offset, digest]).encode()).decode()


def read_cursor(text: str, max_depth: int) -> Cursor:
    """Read a cursor of a client.

    Args:
        text: as an answer gave it.
        max_depth: largest offset.

    Raises:
        RequestError: it is none.
    """
    try:
        version, offset, digest = json.loads(base64.b64decode(text.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise _refused("it is not one that an answer gave") from None
    if not (isinstance(version, str) and isinstance(digest, str) and type(offset) is int and 0 < offset <= max_depth):
        raise _refused("it is not one that an answer gave")
    return Cursor(version, offset, digest)


def check_cursor(cursor: Cursor, digest: str) -> None:
    """Refuse a cursor of another query.

    Raises:
        RequestError: query or options differ from those that the cursor was made for.
    """
    if cursor.digest != digest:
        raise _refused("it belongs to another query or to other options")


def _refused(what: str) -> RequestError:
    return RequestError(
        422, "body.cursor", what, "the cursor of an answer, with the query and options of that answer", "search anew"
    )
