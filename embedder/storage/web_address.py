"""Web addresses: their checked parts, and their form in ids and messages, without secrets."""

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
_KEPT = "%:/@!$&'()*+,;=~-._"  # allowed unencoded in a path; `%` because addresses come encoded


class WebAddressError(Exception):
    """An address can't be requested; the message is the reason and quotes nothing of the address."""


class WebAddress(NamedTuple):
    """Web address, ready to be requested.

    `host` is a lower-case name encoded for DNS, or an IP address without brackets; `target` is path and query,
    percent-encoded.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def url(self) -> str:
        """Return the whole address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == SCHEMES[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


def is_web(uri: str) -> bool:
    """Return whether a URI is a web address."""
    return _PREFIX.match(uri) is not None


def is_address(text: str) -> bool:
    """Return whether `parse_address` accepts the text."""
    try:
        parse_address(text)
    except WebAddressError:
        return False
    return True


def parse_address(text: str) -> WebAddress:
    """Check and parse an address, dropping a fragment and encoding characters beyond ASCII.

    Raises WebAddressError if it has credentials or control characters, no host, or an impossible port.
    """
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise WebAddressError(f"the address has more than {MAX_ADDRESS_CHARACTERS:,} characters")
    if _CONTROL.search(text):
        raise WebAddressError("the address has control characters")
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # brackets without an IPv6 address, or a port that isn't a number, which may be part of a secret
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
    """Return a URI as it may appear in ids: without credentials and tokens, and signed ones without the query.

    So an address that is signed again for each export keeps its name. Paths stay as they are.
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
    """Return the URI of an item as it may be printed: a web address without signatures and tokens."""
    return _SECRET_VALUE.sub(r"\1=***", uri) if is_web(uri) else uri


def shown_address(address: str) -> str:
    """Return an address for a message: without credentials, query and control characters, and shortened."""
    return printable(without_credentials(address), MAX_SHOWN_CHARACTERS)
