"""Connections to servers that nobody vouches for: to checked addresses alone, and no read outlasts its time."""

import ipaddress
import math
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from embedder.sources.errors import FetchError
from embedder.storage.web_address import WebAddress

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address is in its last 32 bits
PROXY_PORT = 3128  # where its address names none, as other programs take it
# What `is_global` of some versions of Python lets through: protocols' own addresses (the metadata of Oracle's cloud),
# Azure's for its machines, and documentation.
RESERVED_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "168.63.129.16/32")))
RESERVED_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "3fff::/20")))


class StoppedError(Exception):
    """The downloads were stopped."""


class Stop:
    """Request to end downloads at once, whatever they wait for."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._sockets: set[socket.socket] = set()

    def set(self) -> None:
        """End them: their sockets are shut, so that no read goes on."""
        with self._lock:
            self._event.set()
            for each in self._sockets:
                _shut(each)

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            StoppedError: the request came.
        """
        if self._event.wait(max(seconds, 0.0)):
            raise StoppedError

    def watch(self, opened: socket.socket) -> None:
        """Have a socket shut when the request comes.

        Raises:
            StoppedError: it has come.
        """
        with self._lock:
            if self._event.is_set():
                raise StoppedError
            self._sockets.add(opened)

    def forget(self, opened: socket.socket) -> None:
        """Leave a socket alone again."""
        with self._lock:
            self._sockets.discard(opened)


def _shut(opened: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)  # not TLS's own, which another thread may be inside of


class PacedSocket(socket.socket):
    """Socket whose every read has to end at a common moment: a byte now and then does not win more time.

    `http.client` reads through `recv_into`, headers included.
    """

    ends_s, idle_s = math.inf, 10.0

    def pace(self, ends_s: float, idle_s: float) -> None:
        """Set the limits.

        Args:
            ends_s: moment of `time.monotonic` at which all is over.
            idle_s: seconds without a byte.
        """
        self.ends_s, self.idle_s = ends_s, idle_s
        self.settimeout(seconds_left(ends_s, idle_s))

    def recv_into(self, *args: Any, **options: Any) -> int:
        """Read, as a socket does."""
        self.settimeout(seconds_left(self.ends_s, self.idle_s))
        return super().recv_into(*args, **options)


class PacedTlsSocket(PacedSocket, ssl.SSLSocket):
    """The same, with TLS."""


def seconds_left(ends_s: float, idle_s: float) -> float:
    """Return the seconds that one operation may take.

    Raises:
        TimeoutError: none are left.
    """
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return min(left_s, idle_s)


def tls_context() -> ssl.SSLContext:
    """Make the context of all TLS connections: certificates and names are verified against the system's authorities."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    context.sslsocket_class = PacedTlsSocket
    return context


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet: not private, local, shared (CGNAT), reserved or a cloud's own.

    An IPv6 address that stands for an IPv4 one (mapped, 6to4, NAT64) is judged as that one.
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


def check_literal(host: str, where: str) -> None:
    """Refuse a host that names a private address itself; a name is left to who looks it up.

    Raises:
        FetchError: it does.
    """
    with suppress(ValueError):
        if not is_public(host):
            raise private_address(host, host, where)


def private_address(host: str, found: str, where: str) -> FetchError:
    """Error for a host that lies in a private network.

    Args:
        host: as the address names it.
        found: its IP addresses.
        where: the address, for people.
    """
    host_is = found if host == found else f"{host} is {found}"
    return FetchError(
        "PrivateAddress",
        f"{where}: {host_is}, which is not on the open internet; a table may not reach into this network unless "
        "web.allow_private = true",
    )


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        stop: request to end it.
        ends_s: moment of `time.monotonic` at which it has to be over.
        idle_s: seconds without a byte.
        allow_private: whether the server may lie in a private network.
        where: the address, for people.
    """

    stop: Stop
    ends_s: float
    idle_s: float
    allow_private: bool
    where: str

    def seconds(self) -> float:
        """Return the seconds that one operation may take."""
        return seconds_left(self.ends_s, self.idle_s)


class WebConnection(HTTPConnection):
    """Connection to one server, or to a proxy before it; opened by its first request."""

    limits: Limits
    proxy_headers: Mapping[str, str] | None = None
    """Headers for the proxy; None where there is no proxy."""
    _watched: tuple[socket.socket, ...] = ()

    def ask(self, method: str, address: WebAddress, headers: Mapping[str, str], limits: Limits) -> HTTPResponse:
        """Send a request and read the head of the answer.

        Args:
            method: GET or HEAD.
            address: what is asked for, of this server.
            headers: of the request.
            limits: of the request.
        """
        self.limits = limits
        if self.sock is None:
            self.connect()
        if isinstance(self.sock, PacedSocket):
            self.sock.pace(limits.ends_s, limits.idle_s)
            self._watch(self.sock)
        target = address.target
        if self.proxy_headers is not None and address.scheme == "http":
            target, headers = address.url, {**headers, **self.proxy_headers}
        self.request(method, target, headers=dict(headers))
        return self.getresponse()

    def connect(self) -> None:
        """Connect to an address that has been checked, or to the proxy."""
        if self.proxy_headers is not None:
            self.timeout = self.limits.seconds()
            super().connect()
            self.sock = PacedSocket(fileno=self.sock.detach())
        else:
            self.sock = self._connect_checked()
        self.sock.settimeout(self.limits.seconds())  # of the TLS handshake as a whole

    def release(self) -> None:
        """Leave the sockets alone: the request is over."""
        for each in self._watched:
            self.limits.stop.forget(each)
        self._watched = ()

    def _watch(self, opened: socket.socket) -> None:
        self.limits.stop.watch(opened)
        self._watched += (opened,)

    def _connect_checked(self) -> PacedSocket:
        """Look the name up once and connect to what was found, so that no second answer can lead elsewhere."""
        limits = self.limits
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        allowed = [each for each in found if limits.allow_private or is_public(str(each[4][0]))]
        if not allowed:
            raise private_address(self.host, ", ".join(sorted({str(each[4][0]) for each in found})), limits.where)
        failure: OSError | None = None
        for family, kind, protocol, _, address in allowed:
            opened = PacedSocket(family, kind, protocol)
            self._watch(opened)
            try:
                opened.settimeout(limits.seconds())
                opened.connect(address)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                failure = failure or error
                opened.close()
            else:
                return opened
        raise failure or OSError("the name has no address")


class SecureWebConnection(HTTPSConnection, WebConnection):
    """The same with TLS, verified for the name of the address."""


def open_connection(address: WebAddress, context: ssl.SSLContext, proxy: str | None) -> WebConnection:
    """Make a connection; its first request opens it.

    Args:
        address: of the server.
        context: for https.
        proxy: address of the proxy to use, or none.
    """
    if proxy is None:
        host, port, headers = address.host, address.port, None
    else:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port, headers = parts.hostname or "", parts.port or PROXY_PORT, {}
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Proxy-Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    if address.scheme == "http":
        connection = WebConnection(host, port)
    else:
        connection = SecureWebConnection(host, port, context=context)
        if headers is not None:
            connection.set_tunnel(address.host, address.port, headers)
    connection.proxy_headers = headers
    return connection


def proxy_for(address: WebAddress) -> str | None:
    """Find the proxy that the environment names for an address; None where it names none, or exempts the host."""
    return None if proxy_bypass(address.host) else getproxies().get(address.scheme)
