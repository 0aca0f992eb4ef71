"""HTTP client of a query service: kept connections, requests that are repeated, errors as those of a local store."""

import contextlib
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import count
from socket import gaierror
from threading import Lock
from typing import Any
from urllib.parse import urlencode, urlsplit

from embedder.errors import ConfigError, StoreError
from embedder.storage.printable import printable
from index.errors import RetrievalError
from shards.schema import parse_json

MAX_TRIES = 6
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0  # between two tries, doubled each time; 3.1 s in all
MAX_KEPT = 8  # idle connections
PIECE_BYTES = 16 << 20  # of a large content
OF_BYTES = re.compile(r"bytes \d+-\d+/(\d{1,18})", re.ASCII)
BUSY = (429, 503)
OF_RETRIEVAL = re.compile(r"\.(k|vector)\b")  # parts of a request whose mistakes raise a RetrievalError in a store
NOT_REPEATED = (gaierror, ssl.SSLCertVerificationError)  # another try would find the same


@dataclass(frozen=True)
class HttpAnswer:
    """Answer of the service, or of what stands before it.

    Attributes:
        status: of HTTP.
        reason: in words.
        body: all of it.
        wait_s: seconds after which to ask again (`Retry-After`); None where it says nothing.
        num_bytes: of the whole content, where this is a range of it; else None.
        etag: version of the content; None where it says nothing.
    """

    status: int
    reason: str
    body: bytes
    wait_s: float | None = None
    num_bytes: int | None = None
    etag: str | None = None

    @property
    def error(self) -> dict[str, Any] | None:
        """Error as the service tells it; None of an answer by another program."""
        try:
            found = parse_json(self.body)["error"]
        except (ValueError, TypeError, KeyError):
            return None
        return found if isinstance(found, dict) and "what" in found else None

    @property
    def is_temporary(self) -> bool:
        """Whether to ask again: the service is busy, or a balancer has lost the replica that it had asked."""
        return self.status in BUSY or (self.status >= 500 and self.error is None)


class HttpClient:
    """Client of one service; safe for threads. All requests only read, so any of them may be repeated.

    Attributes:
        url: address of the service, without a slash at its end.
        service: what is asked, and `example` an address of one, for messages.
    """

    service, example = "a query service", "http://127.0.0.1:8765"

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        try:
            address = urlsplit(url)
            self._host, self._port = address.hostname or "", address.port
        except ValueError:  # of the port, or of an IPv6 address
            self._host = ""
        if not self._host or address.scheme not in ("http", "https"):
            raise ConfigError(f"{url}: it is no address of {self.service}; give one as {self.example}")
        if address.username or address.query or address.fragment:
            raise ConfigError(f"{address.scheme}://{self._host}: the address has more than host, port and path")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise ConfigError("the token is empty or has control characters; give the text that the service was given")
        self.url = url.rstrip("/")
        self._token, self._timeout_s = token, timeout_s
        self._is_secure, self._prefix = address.scheme == "https", address.path.rstrip("/")
        self._idle: list[HTTPConnection] = []
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address alone; a copy opens connections of its own."""
        return HttpClient, (self.url, self._token, self._timeout_s)

    def get(self, path: str, **query: Any) -> Any:
        """Ask for JSON; arguments that are None are left out."""
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._json("GET", path + (f"?{given}" if given else ""))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON and get JSON."""
        return self._json("POST", path, json.dumps(body).encode())

    def read(self, path: str) -> bytes:
        """Ask for bytes, as of an image."""
        return self._request("GET", path, None).body

    def pieces(self, path: str) -> Iterator[bytes]:
        """Ask for bytes by ranges, one after another, as of a video; each is repeated as a request is.

        Raises:
            StoreError: the content changes meanwhile, or as `read`.
        """
        start, headers = 0, {}
        while True:
            headers["Range"] = f"bytes={start}-{start + PIECE_BYTES - 1}"
            answer = self._request("GET", path, None, headers)
            if answer.num_bytes is None and start:
                raise StoreError(f"{self.url}{path}: the content changed while it was read; ask again")
            yield answer.body
            start += len(answer.body)
            if answer.num_bytes is None or start >= answer.num_bytes:
                return
            if not answer.body:
                raise StoreError(f"{self.url}{path}: it ends after {start:,} of {answer.num_bytes:,} bytes; ask again")
            if answer.etag is not None:
                headers["If-Range"] = answer.etag

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        answer = self._request(method, path, body)
        try:
            return parse_json(answer.body)
        except ValueError:
            raise StoreError(f"{self.url}: it answers with something else than JSON; is it a query service?") from None

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Ask until there is an answer, a few times at most.

        Raises:
            ConfigError, RetrievalError, StoreError: as of a local store; or the service can't be reached.
        """
        stop_s = time.monotonic() + self._timeout_s
        for tries in count(1):
            wait_s = min(FIRST_WAIT_S * 2 ** (tries - 1), MAX_WAIT_S)
            try:
                answer = self._ask_once(method, path, body, headers or {})
            except (OSError, HTTPException) as error:
                failure: Exception = StoreError(
                    f"{self.url}: it can't be reached ({type(error).__name__}: {error}); check that `embedder serve` "
                    "runs there"
                )
                is_last = isinstance(error, NOT_REPEATED)
            else:
                if answer.status < 300:
                    return answer
                failure = self._failure(answer)
                is_last, wait_s = not answer.is_temporary, wait_s if answer.wait_s is None else answer.wait_s
            if is_last or tries == MAX_TRIES or time.monotonic() + wait_s > stop_s:
                raise failure from None
            time.sleep(wait_s)
        raise failure

    def _ask_once(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> HttpAnswer:
        """Ask once; a kept connection that the service has closed meanwhile is replaced by a new one."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._ask(kept, method, path, body, headers)
            except (ConnectionError, HTTPException):
                kept.close()
                self.close()  # the others are as old
        connection = self._connect()
        try:
            return self._ask(connection, method, path, body, headers)
        except BaseException:
            connection.close()
            raise

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._is_secure else HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def _ask(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None, own: Mapping[str, str]
    ) -> HttpAnswer:
        headers = {"Accept": "*/*", "User-Agent": "embedder", **own}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused, with an answer, before it was sent
            connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        content, size = response.read(), OF_BYTES.fullmatch(response.getheader("Content-Range", ""))
        num_bytes = int(size[1]) if size is not None and response.status == 206 else None
        answer = HttpAnswer(
            response.status, response.reason, content, _wait_s(response), num_bytes, response.getheader("ETag")
        )
        with self._lock:
            is_kept = not response.will_close and len(self._idle) < MAX_KEPT
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()
        return answer

    def _failure(self, answer: HttpAnswer) -> Exception:
        """Error that a local store would raise."""
        error = answer.error
        if error is None:
            return StoreError(
                f"{self.url}: it answers {answer.status} {answer.reason}, and not as a query service does; check the "
                "address, and what stands between"
            )
        where = str(error.get("where") or "")
        parts = [str(error[name]) for name in ("what", "rule", "cure") if error.get(name)]
        line = printable(": ".join([where, "; ".join(parts)] if where else ["; ".join(parts)]))
        if answer.status in (401, 403):
            return ConfigError(f"{self.url}: {line}")
        if answer.status in (400, 413, 422):
            return (RetrievalError if OF_RETRIEVAL.search(where) else ConfigError)(line)
        return StoreError(line)


def _wait_s(response: HTTPResponse) -> float | None:
    """Seconds of `Retry-After`, which is a number or a date."""
    after = response.getheader("Retry-After")
    if after is None:
        return None
    with contextlib.suppress(ValueError):
        return max(float(after), 0.0)
    with contextlib.suppress(ValueError, TypeError):
        return max(parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    return None
