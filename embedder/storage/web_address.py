"""Addresses of the web: their parts, checked; and how they stand in ids and messages, without secrets."""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from embedder.storage.object_stores import is_remote, without_credentials
from embedder.storage.printable import printable

SCHEMES = {"http": 80, "https": 443}
MAX_SHOWN_CHARACTERS = 200
MAX_ADDRESS_CHARACTERS = 8192  # servers refuse longer ones

_PREFIX = re.compile(r"https?://", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Of S3, Google, CloudFront and Azure: the rest of such a query says how it was signed, and changes each time.
_SIGNATURE = re.compile(r"(?i)(x-(amz|goog)-)?signature|sig")
_SECRET_VALUE = re.compile(
    r"(?i)(?<=[?&])([^=&#]*(?:signature|credential|token|secret|password|api_?key|access_?key)[^=&#]*|sig)=[^&#]*"
)
_KEPT = "%:/@!$&'()*+,;=~-._"  # stands in a path as it is; `%` because addresses come encoded


class WebAddressError(Exception):
    """An address can't be asked for; the message is the reason, and quotes nothing of it."""


class WebAddress(NamedTuple):
    """Address of the web, ready to be asked for.

    Attributes:
        scheme: http or https.
        host: name in lower case, encoded for DNS, or an IP address without brackets.
        port: of the server.
        target: path and query, percent-encoded.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def url(self) -> str:
        """The whole address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == SCHEMES[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


def is_web(uri: str) -> bool:
    """Whether a URI is an address of the web."""
    return _PREFIX.match(uri) is not None


def is_address(text: str) -> bool:
    """Whether `parse_address` accepts it."""
    try:
        parse_address(text)
    except WebAddressError:
        return False
    return True


def parse_address(text: str) -> WebAddress:
    """Check an address and take it apart; a fragment is dropped, and characters beyond ASCII are encoded.

    Raises:
        WebAddressError: it has credentials or control characters, no host, or no port that there can be.
    """
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise WebAddressError(f"the address has more than {MAX_ADDRESS_CHARACTERS:,} characters")
    if _CONTROL.search(text):
        raise WebAddressError("the address has control characters")
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # brackets without an IPv6 address, or a port that is no number: it may be part of a secret
        raise WebAddressError("the address has no valid host and port") from None
    if parts.scheme not in SCHEMES:
        raise WebAddressError("the address is neither http:// nor https://")
    if "@" in parts.netloc:
        raise WebAddressError("credentials never stand in an address; use addresses that need none, or signed ones")
    if not host or port == 0 or "\\" in parts.netloc or "%" in host or " " in host:
        raise WebAddressError("the address has no valid host and port")
    if ":" not in host:
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError:
            raise WebAddressError("the address's host is no name that DNS can have") from None
    target = quote(parts.path or "/", safe=_KEPT) + (f"?{quote(parts.query, safe=_KEPT + '?')}" if parts.query else "")
    return WebAddress(parts.scheme, host, port or SCHEMES[parts.scheme], target)


def public_name(reference: str) -> str:
    """Write a URI as it may stand in ids: without credentials and tokens, and of signed addresses without the query.

    What is signed anew for each export is thereby named the same each time. Paths stand as they are.
    """
    if not is_web(reference):
        return without_credentials(reference) if is_remote(reference) else reference
    try:
        parse_address(reference)
    except WebAddressError:
        return without_credentials(reference)
    query = urlsplit(reference).query
    if any(_SIGNATURE.fullmatch(name) for name, _ in parse_qsl(query, keep_blank_values=True)):
        return reference.partition("?")[0]
    return shown_uri(reference)


def shown_uri(uri: str) -> str:
    """Write the URI of an item as it may be printed: an address of the web without signatures and tokens."""
    return _SECRET_VALUE.sub(r"\1=***", uri) if is_web(uri) else uri


def shown_address(address: str) -> str:
    """Write an address for a message: without credentials and query, shortened, no control characters."""
    return printable(without_credentials(address), MAX_SHOWN_CHARACTERS)
