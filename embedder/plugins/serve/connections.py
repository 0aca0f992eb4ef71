"""Connections of the service: uvicorn's, with the limits that it lacks, so that a slow client harms only itself.

Uvicorn waits without limit for headers that come a byte at a time, and for a client that does not read its answer.
"""

import asyncio
import socket
import struct
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from embedder.plugins.serve.protection import SECURITY_HEADERS
from embedder.plugins.serve.rate_limit import client_key, is_among
from embedder.plugins.serve.serve_settings import ServeSettings

MAX_HEADER_BYTES = 32 << 10
MIN_BYTES_PER_S = 1024  # of an answer that a client reads; must be more than one byte at a time
MAX_CHECK_S = 2.0
_RESET = struct.pack("ii", 1, 0)  # linger for 0 seconds


def uvicorn_options(settings: ServeSettings) -> dict[str, Any]:
    """Options of `uvicorn.Config` for the service's safety."""
    return {
        "http": limited_connection(settings),
        "ws": "none",
        "server_header": False,
        "access_log": False,  # it would hold conditions and ids
        "proxy_headers": bool(settings.trusted_proxies),
        "forwarded_allow_ips": list(settings.trusted_proxies),
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "timeout_keep_alive": 30,
    }


def limited_connection(settings: ServeSettings) -> type[H11Protocol]:
    """Class of connections with the limits of these settings; uvicorn makes one instance for each connection."""
    return type("LimitedConnection", (_LimitedConnection,), {"settings": settings})


class _LimitedConnection(H11Protocol):
    """Connection that is closed when its client sends headers, or reads answers, too slowly."""

    settings: ServeSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many, else begin to watch it."""
        super().connection_made(transport)
        self._waits_since: float | None = time.monotonic()
        self._unsent, self._unsent_since = 0, time.monotonic()
        self._check_s = min(self.settings.header_timeout_s, self.settings.send_timeout_s, 4 * MAX_CHECK_S) / 4
        self._timer = self.loop.call_later(self._check_s, self._check)
        if len(self.connections) > self.settings.max_connections or self._has_too_many():
            transport.write(_answer(503, "too many connections are open", "close some, or try again later"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the watch."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, and note since when a request lacks its headers."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()

    def resume_writing(self) -> None:
        """Continue sending: the client has read what there was."""
        self._unsent_since = time.monotonic()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Wait for the next request; the time of one that has arrived already starts now."""
        self._waits_since = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the one shape of errors."""
        self.transport.write(_answer(400, "it is no HTTP request", "send one as RFC 9112 describes"))
        self.transport.close()

    def _has_too_many(self) -> bool:
        """Whether the client has too many connections; loopback and trusted proxies may carry all clients."""
        host = self.client[0] if self.client else ""
        if client_key(host) is None or is_among(host, self.settings.trusted_proxies):
            return False
        same = sum((getattr(each, "client", None) or ("",))[0] == host for each in self.connections)
        return bool(same > self.settings.max_connections_per_client)

    def _check(self) -> None:
        """Close the connection if its client is too slow, else check again later."""
        now = time.monotonic()
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent > self._unsent or self._unsent - unsent >= MIN_BYTES_PER_S * self._check_s:
            self._unsent_since = now
        self._unsent = unsent
        is_stuck = now - self._unsent_since > self.settings.send_timeout_s
        is_late = self._waits_since is not None and now - self._waits_since > self.settings.header_timeout_s
        if is_stuck:
            # Else the kernel would keep, and continue to send, up to megabytes.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        elif is_late and not self.transport.is_closing():
            self.transport.write(_answer(408, "the headers did not come in time", "send a whole request at once"))
            self.transport.close()
            self._waits_since = None
        self._timer = self.loop.call_later(self._check_s, self._check)


def _answer(status: int, what: str, cure: str) -> bytes:
    """Whole answer to a connection whose request no application has seen."""
    phrase = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[status]
    body = (
        f'{{"error":{{"where":"connection","what":"{what}","rule":"one HTTP request after another","cure":"{cure}"}}}}'
    )
    headers = {
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
        b"connection": b"close",
        **({b"retry-after": b"1"} if status == 503 else {}),
        **SECURITY_HEADERS,
    }
    lines = [f"HTTP/1.1 {status} {phrase}".encode(), *(name + b": " + value for name, value in headers.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body.encode()
