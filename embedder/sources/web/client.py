"""Web client for addresses and servers that can't be trusted: redirects, retries and time are all bounded."""

import http.client
import random
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from os import environ
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin

from embedder.config_toml.run_sections import WebConfig
from embedder.media.sniff import sniff
from embedder.sources.fetched import Fetched
from embedder.sources.source_errors import FetchError
from embedder.sources.web.body import CHUNK_BYTES, HEAD_BYTES, SizeLimits, receive
from embedder.sources.web.hosts import Hosts
from embedder.storage.http import Connections, Limits, PrivateAddressError, Response, Stop, is_public, retry_after_s
from embedder.storage.web_address import WebAddress, WebAddressError, parse_address, shown_address

FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0  # between two attempts, doubled each time
MAX_KEPT = 32  # hosts whose idle connections are kept
MAX_DRAINED_BYTES = 64 << 10  # of an unwanted answer, so that its connection can be reused
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which the same request may succeed
BUSY = frozenset({429, 503})
READER_PARALLEL, READER_TIMEOUT_S, READER_TRIES = 8, 20.0, 2  # somebody is waiting
MAX_VALIDATOR_CHARACTERS = 200
RANGED = (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
FIRST_BYTES = 64 << 10  # of a range that opens an address: all of a small image
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy"})
UNKNOWN_HOST = frozenset(getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name))
REFUSALS = {
    401: ("AccessDenied", "it wants a login; name addresses that need none, or signed ones"),
    403: ("AccessDenied", "it may be signed for a time that is over, or want another web.user_agent"),
    404: ("NotFound", "correct the address, or take the row out"),
    407: ("AccessDenied", "the proxy wants a login"),
    410: ("NotFound", "take the row out"),
}

T = TypeVar("T")
Read = Callable[[Response], T]


def reader_settings() -> WebConfig:
    """Return the settings for reading a store without a run's configuration: sheets, thumbnails, `Hit.image`.

    `EMBEDDER_ALLOW_PRIVATE=1` gives access to private networks; a store, which others may have made, can't.
    """
    return WebConfig(
        allow_private=environ.get("EMBEDDER_ALLOW_PRIVATE") == "1",
        parallel=READER_PARALLEL,
        timeout_s=READER_TIMEOUT_S,
        max_tries=READER_TRIES,
    )


class WebError(FetchError):
    """A failed attempt; `wait_s` is how long the host asks to wait before a retry, 0 if it doesn't say."""

    def __init__(self, error_type: str, message: str, transient: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(error_type, message, transient)
        self.wait_s = wait_s


@dataclass
class _WebItem:
    """One requested item, or a span of its bytes, over all its attempts; its time starts with the first attempt."""

    method: str
    address: str
    stop: Stop
    settings: WebConfig
    where: str
    span: tuple[int, int] | None = None
    ends_s: float | None = None

    def limits(self) -> Limits:
        settings = self.settings
        if self.ends_s is None:
            self.ends_s = time.monotonic() + settings.timeout_s
        return Limits(settings.idle_timeout_s, self.ends_s, settings.allow_private, self.stop)

    @property
    def left_s(self) -> float:
        """Return the seconds until its time is over."""
        return self.settings.timeout_s if self.ends_s is None else self.ends_s - time.monotonic()


class WebClient:
    """Client that keeps connections open; thread-safe."""

    def __init__(self, settings: WebConfig) -> None:
        self.settings = settings
        self._hosts = Hosts(settings.parallel_per_host)
        self._connections = Connections(MAX_KEPT, settings.parallel_per_host)

    def download(self, address: str, limits: SizeLimits, stop: Stop | None = None) -> Fetched:
        """Download an image or a video, else a FetchError; after `stop` asked for an end, the error means nothing."""
        where = shown_address(address)
        return self._ask("GET", address, stop or Stop(), lambda response: receive(response, limits, where))

    def open(self, address: str, limits: SizeLimits) -> "Fetched | WebRanges":
        """Open an image or a video whose bytes are requested as they are read, by a client that closes with it.

        What the server gives only whole is downloaded; raises like `download`.
        """
        where = shown_address(address)

        def read(response: Response) -> Fetched | WebPart | None:
            if response.status == HTTPStatus.OK:
                return receive(response, limits, where)
            return _read_part(response, 0, FIRST_BYTES, where)

        found = self._ask("GET", address, Stop(), read, (0, FIRST_BYTES))
        if isinstance(found, Fetched):
            return found
        kind = sniff(found.content[:HEAD_BYTES]) if found is not None else None
        if found is None or kind not in ("image", "video"):
            return self.download(address, limits)
        limits.check(kind, found.size, where)
        return WebRanges(self, address, found)

    def read_part(self, address: str, start: int, stop: int) -> "WebPart | None":
        """Request bytes of an address; None if the server gives them in no way that can be used. Raises FetchError."""
        where = shown_address(address)

        def read(response: Response) -> WebPart | None:
            return _read_part(response, start, stop, where)

        return self._ask("GET", address, Stop(), read, (start, stop))

    def validator(self, address: str) -> str:
        """Request what shows whether an address has changed: ETag, else time and size; empty if there is neither.

        Raises like `download`.
        """
        return self._ask("HEAD", address, Stop(), _validator)

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()

    def _ask(self, method: str, address: str, stop: Stop, read: Read[T], span: tuple[int, int] | None = None) -> T:
        item = _WebItem(method, address, stop, self.settings, shown_address(address), span)
        tries = 0
        while True:
            tries += 1
            try:
                return self._follow(item, read)
            except WebError as error:
                wait_s = min(FIRST_WAIT_S * 2 ** (tries - 1), MAX_WAIT_S) * random.uniform(0.5, 1.0)
                wait_s = max(wait_s, error.wait_s)
                if not error.transient or tries >= self.settings.max_tries or wait_s >= item.left_s:
                    message = f"{error.message}, after {tries} tries" if tries > 1 else error.message
                    raise FetchError(error.error_type, message, error.transient) from None
                stop.sleep(wait_s)

    def _follow(self, item: _WebItem, read: Read[T]) -> T:
        """Ask and follow redirects; each is checked like the first address."""
        address = item.address
        for _ in range(self.settings.max_redirects + 1):
            target = _parse_address(address, item)
            with self._hosts.place(f"{target.host}:{target.port}", item.where, item.stop):
                found = self._visit(target, item, read)
            if not isinstance(found, _Redirect):
                return found
            try:
                address = urljoin(address, found)
            except ValueError:  # brackets without an IPv6 address
                raise WebError("BadAddress", f"{item.where}: redirected to what is no address") from None
        most = self.settings.max_redirects
        raise WebError("TooManyRedirects", f"{item.where}: more redirects than web.max_redirects = {most} allows")

    def _visit(self, target: WebAddress, item: _WebItem, read: "Read[T]") -> "T | _Redirect":
        """Ask one server once, and record whether it works."""
        host = f"{target.host}:{target.port}"
        try:
            found = self._exchange(target, item, read)
        except (OSError, http.client.HTTPException) as error:
            failure = _to_web_error(error, item)
        except PrivateAddressError as error:
            failure = _private_address(str(error), item)
        except WebError as error:
            failure = error
        except FetchError as error:  # while reading the body
            failure = WebError(error.error_type, error.message, error.transient)
        else:
            self._hosts.note(host, failed=False)
            return found
        wait_s = min(failure.wait_s, self.settings.timeout_s)
        self._hosts.note(host, failed=failure.transient, wait_s=wait_s)
        raise failure from None

    def _exchange(self, target: WebAddress, item: _WebItem, read: "Read[T]") -> "T | _Redirect":
        """Send one request and take the answer; a small unwanted one is read so that its connection can be reused."""
        settings = self.settings
        wanted = {"User-Agent": settings.user_agent, "Accept": "image/*, video/*", "Accept-Encoding": "identity"}
        if item.span is not None:
            wanted["Range"] = f"bytes={item.span[0]}-{item.span[1] - 1}"
        taken = (HTTPStatus.OK,) if item.span is None else RANGED
        asked = self._connections.ask(item.method, target, item.limits(), wanted, use_proxy=settings.use_proxy)
        with asked as response:
            if response.status in taken:
                return read(response)
            if response.length_remaining is not None and response.length_remaining <= MAX_DRAINED_BYTES:
                response.read(MAX_DRAINED_BYTES)  # `http.client` may have found no length where urllib3 has
            location = response.headers.get("Location")
            if response.status in REDIRECTS and location:
                return _Redirect(_as_text(location))
            raise _refusal(response, item)


class WebPart(NamedTuple):
    """Bytes of an address, the size of the whole, and what shows whether that has changed."""

    content: bytes
    size: int
    version: str


class WebRanges:
    """An image or a video of the web by ranges, each of which is requested."""

    def __init__(self, client: WebClient, address: str, first: WebPart) -> None:
        """Begin with the first bytes."""
        self.size, self.version = first.size, first.version
        self._client, self._address, self._first = client, address, first.content

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end. Raises FetchError, also if it has changed since."""
        stop = min(offset + length, self.size)
        if stop <= len(self._first) or offset >= stop:
            return self._first[offset:stop]
        part = self._client.read_part(self._address, offset, stop)
        if part is None or (part.size, part.version, len(part.content)) != (self.size, self.version, stop - offset):
            where = shown_address(self._address)
            raise FetchError("Changed", f"{where}: it has changed while it was read; read it again")
        return part.content

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class _Redirect(str):
    """Target of a redirect, absolute or relative."""

    __slots__ = ()


def _as_text(location: str) -> str:
    with suppress(UnicodeError):
        return location.encode("latin-1").decode("utf-8")
    return location


def _parse_address(address: str, item: _WebItem) -> WebAddress:
    try:
        target = parse_address(address)
    except WebAddressError as error:
        what = "" if address == item.address else "redirected to what is refused: "
        raise WebError("BadAddress", f"{item.where}: {what}{error}") from None
    if item.settings.use_proxy and not item.settings.allow_private:  # the proxy resolves names
        with suppress(ValueError):
            if not is_public(target.host):
                raise _private_address(target.host, item)
    return target


def _private_address(found: str, item: _WebItem) -> WebError:
    return WebError(
        "PrivateAddress",
        f"{item.where}: {found}, which is not on the open internet; a table may not reach into this network unless "
        "web.allow_private = true",
    )


def _read_part(response: Response, start: int, stop: int, where: str) -> WebPart | None:
    """Read an answer with bytes from `start` up to `stop` at most; None if it is another one."""
    span = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range") or "")
    coding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if response.status != HTTPStatus.PARTIAL_CONTENT or span is None or coding != "identity":
        return None
    first, last, size = (int(each) for each in span.groups())
    if first != start or not start <= last < stop:
        return None
    content = bytearray()
    while chunk := response.read(min(CHUNK_BYTES, last + 1 - start - len(content))):
        content += chunk
    if len(content) <= last - start:
        raise FetchError("Truncated", f"{where}: the connection ended after {len(content):,} bytes", transient=True)
    version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return WebPart(bytes(content), size, version[:MAX_VALIDATOR_CHARACTERS])


def _validator(response: Response) -> str:
    """Return what a response says about the state of its content."""
    response.read()  # empty; then the connection can be reused
    etag, time_text = response.headers.get("ETag"), response.headers.get("Last-Modified")
    if etag:
        return etag[:MAX_VALIDATOR_CHARACTERS]
    size = response.headers.get("Content-Length")
    return f"{time_text or ''}|{size or ''}"[:MAX_VALIDATOR_CHARACTERS] if time_text or size else ""


def _refusal(response: Response, item: _WebItem) -> WebError:
    status = response.status
    try:
        answer = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        answer = str(status)
    message = f"{item.where}: the server answers {answer}"
    if status in BUSY:
        wait_s = retry_after_s(response)
        asked = "" if wait_s is None else f" and asks to wait {wait_s:g} s"
        return WebError("ServerBusy", message + asked, True, wait_s or 0.0)
    if status in PASSING:
        return WebError("ServerError", message, True)
    error_type, cure = REFUSALS.get(status, ("RequestRefused", "check the address in a browser"))
    return WebError(error_type, f"{message}; {cure}")


def _to_web_error(error: OSError | http.client.HTTPException, item: _WebItem) -> WebError:
    settings = item.settings
    match error:
        case ssl.SSLCertVerificationError():
            found = ("BadCertificate", f"the server's certificate is refused ({error.verify_message})", False)
        case socket.gaierror() if error.errno in UNKNOWN_HOST:
            found = ("UnknownHost", f"there is no host of this name; correct the address{_hint(settings)}", False)
        case TimeoutError() if item.left_s <= 0:
            found = ("Timeout", f"no whole answer within web.timeout_s = {settings.timeout_s:g}{_hint(settings)}", True)
        case TimeoutError():
            waited = f"web.idle_timeout_s = {settings.idle_timeout_s:g}"
            found = ("Timeout", f"no byte within {waited}{_hint(settings)}", True)
        case http.client.IncompleteRead():
            found = ("Truncated", "the connection ended before the answer was whole", True)
        case OSError():  # includes http.client.RemoteDisconnected
            found = ("NetworkError", f"{error.strerror or error}{_hint(settings)}", True)
        case _:
            found = ("BadAnswer", f"the answer is no HTTP ({type(error).__name__})", False)
    error_type, message, transient = found
    return WebError(error_type, f"{item.where}: {message}", transient)


def _hint(settings: WebConfig) -> str:
    if settings.use_proxy or not any(name.lower() in PROXY_VARIABLES for name in environ):
        return ""
    return "; the environment names a proxy, which web.use_proxy = true connects through"
