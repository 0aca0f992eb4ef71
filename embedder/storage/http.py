"""HTTP of all clients: kept connections, to checked addresses where that is asked, and no read outlasts its time."""

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
from http.client import BadStatusLine, HTTPException
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from embedder.storage.web_address import WebAddress

Response = urllib3.BaseHTTPResponse
"""Answer whose head has been read; its body is as it came, neither decompressed nor decoded."""

logging.getLogger("urllib3.connection").setLevel(logging.ERROR)  # it warns of each header that is none

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address is in its last 32 bits
PROXY_PORT = 3128  # where its address names none, as other programs take it
# What `is_global` of some versions of Python lets through: protocols' own addresses (the metadata of Oracle's cloud),
# Azure's for its machines, and documentation.
RESERVED_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "168.63.129.16/32")))
RESERVED_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "3fff::/20")))


class PrivateAddressError(Exception):
    """The server is not on the open internet; the message is what was found, as `photos.example is 10.0.0.1`."""


class StoppedError(Exception):
    """The requests were stopped."""


class Stop:
    """Request to end others at once, whatever they wait for."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._sockets: set[socket.socket] = set()

    def set(self) -> None:
        """End them: their sockets are shut, so that no read goes on."""
        with self._lock:
            self._event.set()
            for each in self._sockets:
                with suppress(OSError):  # not TLS's own way, which another thread may be inside of
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            StoppedError: the request came.
        """
        if self._event.wait(max(seconds, 0.0)):
            raise StoppedError

    @contextmanager
    def watch(self, opened: socket.socket) -> Iterator[None]:
        """Have a socket shut when the request comes.

        Raises:
            StoppedError: it has come.
        """
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
        ends_s: moment of `time.monotonic` at which all is over: a byte now and then does not win more time.
        allow_private: whether the server may lie in a private network.
        stop: request to end it.
    """

    idle_s: float
    ends_s: float = math.inf
    allow_private: bool = True
    stop: Stop = field(default_factory=Stop)

    def seconds(self) -> float:
        """Return the seconds that one operation may take.

        Raises:
            TimeoutError: none are left.
        """
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is over")
        return min(left_s, self.idle_s)


@dataclass
class _Exchange:
    """Request under way in this thread, for the sockets and connections below urllib3."""

    limits: Limits
    target: str
    has_connected: bool = False


_exchange: ContextVar[_Exchange] = ContextVar("_exchange")


class _PacedSocket(socket.socket):
    """Socket whose every operation keeps to the limits of the request; `http.client` reads through `recv_into`."""

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


class _Connection(HTTPConnection):
    """Connection to one server, or to a proxy before it."""

    def _new_conn(self) -> socket.socket:
        """Look the name up once and connect to what was found, so that no second answer can lead elsewhere."""
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
        if not isinstance(self.sock, _PacedSocket):  # `_new_conn` is no public hook
            self.close()
            raise OSError("this version of urllib3 connects in another way, without the checks of addresses")

    def putrequest(self, method: str, url: str, *args: Any, **options: Any) -> None:
        """Ask for the target as the address writes it; urllib3 has encoded it a second time."""
        super().putrequest(method, _exchange.get().target, *args, **options)


class _SecureConnection(_Connection, HTTPSConnection):
    """The same with TLS, verified for the name of the address."""


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class Connections:
    """Kept connections to any servers; safe for threads."""

    def __init__(self, max_hosts: int = 1, max_per_host: int = 256) -> None:
        """Open nothing yet."""
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
        """Send a request, on a kept connection or on a new one where that has been closed meanwhile.

        Yields:
            The answer with its head; its body is read in the block, as it comes. Redirects are not followed. Left
            before the body's end, it takes its connection with it.

        Raises:
            OSError, HTTPException: of the system, of TLS, or of `http.client`, also from within the block.
            PrivateAddressError: the server lies in a private network.
            StoppedError: the request to end came.
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
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            if parts.username:
                pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                options["proxy_headers"] = {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
            manager = urllib3.ProxyManager(f"http://{host}:{parts.port or PROXY_PORT}", **options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        return manager


def _cause(error: BaseException) -> OSError | HTTPException:
    """Error of the system or of `http.client` that one of urllib3 stands for."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError | HTTPException):
        found = found.__cause__ or found.__context__
    return found or HTTPException(str(error))


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet: not private, local, shared (CGNAT), reserved or a cloud's own.

    An IPv6 address that stands for an IPv4 one (mapped, 6to4, NAT64) is judged as that one.

    Raises:
        ValueError: it is no IP address.
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
    """Find the proxy that the environment names for an address; None where it names none, or exempts the host."""
    return None if proxy_bypass(address.host) else getproxies().get(address.scheme)


def retry_after_s(response: Response) -> float | None:
    """Seconds of `Retry-After`, which is a number or a date; None where it is neither, or missing."""
    after = response.headers.get("Retry-After", "").strip()
    with suppress(ValueError, TypeError, OverflowError):
        if after.replace(".", "", 1).isdecimal():
            return float(after)
        return max(parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    return None
