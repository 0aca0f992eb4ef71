"""HTTP of all clients: kept connections, checked addresses on request, and no read beyond its deadline."""

import errno
import ipaddress
import logging
import math
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import BadStatusLine, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from embedder.storage.web_address import WebAddress, WebAddressError, parse_address

Response = urllib3.BaseHTTPResponse
"""Answer whose head has been read; its body is raw, neither decompressed nor decoded."""

logging.getLogger("urllib3.connection").setLevel(logging.ERROR)  # it warns about each malformed header

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address is in its last 32 bits
PROXY_PORT = 3128  # if its address names none; other programs use the same
# Addresses that `is_global` accepts in some Python versions: protocols' own (the metadata of Oracle's cloud), Azure's
# for its machines, and documentation.
RESERVED_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "168.63.129.16/32")))
RESERVED_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "3fff::/20")))


class PrivateAddressError(Exception):
    """The server is not on the open internet; the message says what was found, such as `photos.example is 10.0.0.1`."""


class StoppedError(Exception):
    """The requests were stopped."""


class Stop:
    """Signal that ends other requests at once, whatever they wait for."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._sockets: set[socket.socket] = set()

    def set(self) -> None:
        """End them by shutting their sockets, so that no read continues."""
        with self._lock:
            self._event.set()
            for each in self._sockets:
                with suppress(OSError):  # not TLS's own shutdown, which another thread may be in
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def sleep(self, seconds: float) -> None:
        """Wait, or raise StoppedError when the signal comes."""
        if self._event.wait(max(seconds, 0.0)):
            raise StoppedError

    @contextmanager
    def watch(self, opened: socket.socket) -> Iterator[None]:
        """Shut a socket when the signal comes; raise StoppedError if it has come."""
        with self._lock:
            if self._event.is_set():
                raise StoppedError
            self._sockets.add(opened)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(opened)


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        idle_s: seconds without a byte.
        ends_s: deadline on the clock of `time.monotonic`; a slow trickle of bytes doesn't extend it.
        allow_private: whether the server may be in a private network.
        stop: signal that ends the request.
    """

    idle_s: float
    ends_s: float = math.inf
    allow_private: bool = True
    stop: Stop = field(default_factory=Stop)

    def seconds(self) -> float:
        """Return the seconds that one operation may take; raise TimeoutError if none are left."""
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is over")
        return min(left_s, self.idle_s)


@dataclass
class _Exchange:
    """Request in progress in this thread, for the sockets and connections below urllib3."""

    limits: Limits
    target: str
    has_connected: bool = False


_exchange: ContextVar[_Exchange] = ContextVar("_exchange")


class _PacedSocket(socket.socket):
    """Socket whose every operation obeys the request's limits; `http.client` reads through `recv_into`."""

    def connect(self, address: Any) -> None:
        limits = _exchange.get().limits
        with limits.stop.watch(self):
            self.settimeout(limits.seconds())
            super().connect(address)

    def recv_into(self, *args: Any, **options: Any) -> int:
        limits = _exchange.get().limits
        with limits.stop.watch(self):
            self.settimeout(limits.seconds())
            return super().recv_into(*args, **options)


class _PacedTlsSocket(_PacedSocket, ssl.SSLSocket):
    """The same, with TLS."""


class _CheckedAnswer(HTTPResponse):
    """Answer as `http.client` reads it, except for two cases; without these hooks it would read them as it does."""

    def _read_status(self) -> tuple[str, int, str]:
        """Have every interim answer skipped, such as 103 Early Hints; `http.client` skips only 100."""
        version, status, reason = super()._read_status()  # type: ignore[misc]
        is_interim = 100 <= status < 200 and status != HTTPStatus.SWITCHING_PROTOCOLS
        return version, HTTPStatus.CONTINUE if is_interim else status, reason

    def _read_next_chunk_size(self) -> int:
        """Refuse a negative size: -1 would read all that the server sends at once, however much was asked for."""
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise ValueError("a chunk of negative size")  # the caller makes it an IncompleteRead
        return size


class _Connection(HTTPConnection):
    """Connection to one server, or to a proxy before it."""

    response_class = _CheckedAnswer

    def _new_conn(self) -> socket.socket:
        """Resolve the name once and connect to the result, so that a second answer can't lead elsewhere."""
        exchange = _exchange.get()
        exchange.has_connected, limits = True, exchange.limits
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        is_free = limits.allow_private or self.proxy is not None
        allowed = [each for each in found if is_free or is_public(str(each[4][0]))]
        if not allowed:
            addresses = ", ".join(sorted({str(each[4][0]) for each in found}))
            raise PrivateAddressError(addresses if self.host == addresses else f"{self.host} is {addresses}")
        failure: OSError | None = None
        for family, kind, protocol, _, address in allowed:
            opened = _PacedSocket(family, kind, protocol)
            try:
                opened.connect(address)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opened.settimeout(limits.seconds())  # of the TLS handshake as a whole
            except OSError as error:
                failure = failure or error
                opened.close()
            except StoppedError:
                opened.close()
                raise
            else:
                return opened
        raise failure or OSError("the name has no address")

    def connect(self) -> None:
        super().connect()
        if not isinstance(self.sock, _PacedSocket):  # `_new_conn` is not a public hook
            self.close()
            raise OSError("this version of urllib3 connects in another way, without the checks of addresses")

    def putrequest(self, method: str, url: str, *args: Any, **options: Any) -> None:
        """Request the target as the address writes it; urllib3 has encoded it a second time."""
        super().putrequest(method, _exchange.get().target, *args, **options)


class _SecureConnection(_Connection, HTTPSConnection):
    """The same with TLS, verified for the name of the address."""


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class Connections:
    """Kept connections to any servers; thread-safe."""

    def __init__(self, max_hosts: int = 1, max_per_host: int = 256) -> None:
        self._max_hosts, self._max_per_host = max_hosts, max_per_host
        self._managers: dict[tuple[str, str | None], urllib3.PoolManager] = {}

    @contextmanager
    def ask(
        self,
        method: str,
        address: WebAddress,
        limits: Limits,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        use_proxy: bool = False,
    ) -> Iterator[Response]:
        """Send a request on a kept connection, or on a new one if that has been closed.

        Yields the answer after its head. Read the body within the block, as it comes; leaving the block before the
        body's end closes the connection. Redirects are not followed.

        Raises:
            OSError, HTTPException: of the system, of TLS, or of `http.client`, also from within the block.
            PrivateAddressError: the server is in a private network.
            StoppedError: the stop signal came.
        """
        proxy = proxy_for(address) if use_proxy else None
        target = address.target if proxy is None or address.scheme == "https" else address.url
        token = _exchange.set(_Exchange(limits, target))
        response = None
        try:
            response = self._send(method, address, headers, body, proxy)
            yield response
        except urllib3.exceptions.HTTPError as error:
            raise _cause(error) from None
        finally:
            if response is not None:
                response.close()
            _exchange.reset(token)

    def close(self) -> None:
        """Close the idle connections."""
        while self._managers:
            self._managers.popitem()[1].clear()

    def _send(
        self, method: str, address: WebAddress, headers: Mapping[str, str], body: bytes | None, proxy: str | None
    ) -> Response:
        manager = self._managers.get((address.scheme, proxy))
        if manager is None:
            manager = self._managers.setdefault((address.scheme, proxy), self._make_manager(address.scheme, proxy))
        pool = manager.connection_from_host(address.host, address.port, address.scheme)
        exchange = _exchange.get()
        while True:
            try:
                return pool.urlopen(
                    method,
                    exchange.target,
                    body,
                    headers,
                    retries=False,
                    redirect=False,
                    assert_same_host=False,
                    timeout=exchange.limits.seconds(),
                    preload_content=False,
                    decode_content=False,
                )
            except urllib3.exceptions.HTTPError as error:
                if exchange.has_connected or not isinstance(_cause(error), ConnectionError | BadStatusLine):
                    raise

    def _make_manager(self, scheme: str, proxy: str | None) -> urllib3.PoolManager:
        options: dict[str, Any] = {"num_pools": self._max_hosts, "maxsize": self._max_per_host}
        if scheme == "https":  # certificates and names are verified against the system's authorities
            options["ssl_context"] = ssl.create_default_context()
            options["ssl_context"].sslsocket_class = _PacedTlsSocket
        if proxy is None:
            manager = urllib3.PoolManager(**options)
        else:
            address, user, password = _parse_proxy(proxy, scheme)
            if user:
                pair = f"{unquote(user)}:{unquote(password or '')}"
                options["proxy_headers"] = {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
            manager = urllib3.ProxyManager(address.url, **options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        return manager


def _parse_proxy(proxy: str, scheme: str) -> tuple[WebAddress, str | None, str | None]:
    """Parse the proxy for a scheme: its address, user and password. An OSError, which has neither, if that fails."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        return parse_address(f"http://{host}:{parts.port or PROXY_PORT}"), parts.username, parts.password
    except (ValueError, WebAddressError):
        message = (
            f"{scheme}_proxy of the environment has no valid host and port; write it as "
            f"http://proxy.example:{PROXY_PORT}"
        )
        raise OSError(errno.EINVAL, message) from None


def _cause(error: BaseException) -> OSError | HTTPException:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError | HTTPException):
        found = found.__cause__ or found.__context__
    return found or HTTPException(str(error))


def is_public(address: str) -> bool:
    """Return whether an IP address is public: not private, local, shared (CGNAT), reserved or a cloud's own.

    An IPv6 address that stands for an IPv4 one (mapped, 6to4, NAT64) is judged by that one. Raises ValueError if
    `address` is no IP address.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast and not any(found in each for each in RESERVED_V4)
    inner = found.ipv4_mapped or found.sixtofour
    if found in NAT64:
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(str(inner))
    return found in GLOBAL_UNICAST and found.is_global and not any(found in each for each in RESERVED_V6)


def proxy_for(address: WebAddress) -> str | None:
    """Return the proxy that the environment names for an address; None if it names none or exempts the host."""
    return None if proxy_bypass(address.host) else getproxies().get(address.scheme)


def retry_after_s(response: Response) -> float | None:
    """Return the seconds of `Retry-After`, a number or a date; None if it is neither, or missing."""
    after = response.headers.get("Retry-After", "").strip()
    with suppress(ValueError, TypeError, OverflowError):
        if after.replace(".", "", 1).isdecimal():
            return float(after)
        return max(parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    return None
