"""HTTP client of a query service: keeps connections, retries requests, raises the errors of a local store."""

import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from itertools import count
from socket import gaierror
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from embedder.errors import ConfigError, StoreError
from embedder.storage.http import Connections, Limits, Response, retry_after_s
from embedder.storage.printable import printable
from embedder.storage.web_address import SCHEMES, WebAddress
from index.index_errors import RetrievalError
from shards.file_schema import parse_json

MAX_TRIES = 6
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0  # between two attempts, doubled each time; 3.1 s in all
PIECE_BYTES = 16 << 20  # of a large content
OF_BYTES = re.compile(r"bytes \d+-\d+/(\d{1,18})", re.ASCII)
BUSY = (429, 503)
OF_RETRIEVAL = re.compile(r"\.(k|vector)\b")  # parts of a request whose errors are RetrievalErrors in a store
NOT_REPEATED = (gaierror, ssl.SSLCertVerificationError)  # a retry would fail in the same way


class HttpClient:
    """Client of one service; safe for threads. All requests only read, so any of them may be retried.

    `url` has no trailing slash. `service` says what is asked, and `example` gives such an address; both are for
    messages.
    """

    service, example = "a query service", "http://127.0.0.1:8765"

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        try:
            address = urlsplit(url)
            host, port = (address.hostname or "").encode("idna").decode(), address.port
        except ValueError:  # invalid port, IPv6 address or DNS name
            host = ""
        if not host or address.scheme not in SCHEMES:
            raise ConfigError(f"{url}: it is no address of {self.service}; give one as {self.example}")
        if address.username or address.query or address.fragment:
            raise ConfigError(f"{address.scheme}://{host}: the address has more than host, port and path")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise ConfigError("the token is empty or has control characters; give the text that the service was given")
        self.url = url.rstrip("/")
        path = quote(address.path.rstrip("/"), safe="/%")
        self._address = WebAddress(address.scheme, host, port or SCHEMES[address.scheme], path)
        self._token, self._timeout_s = token, timeout_s
        self._connections = Connections()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the address; a copy opens its own connections."""
        return HttpClient, (self.url, self._token, self._timeout_s)

    def get(self, path: str, **query: Any) -> Any:
        """Request JSON; arguments that are None are left out."""
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._json("GET", path + (f"?{given}" if given else ""))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON and return the JSON answer."""
        return self._json("POST", path, json.dumps(body).encode())

    def read(self, path: str) -> bytes:
        """Request bytes, for example an image."""
        return self._request("GET", path, None).data

    def pieces(self, path: str) -> Iterator[bytes]:
        """Request bytes, for example a video, range by range; each request is retried.

        Raises `StoreError` if the content changes meanwhile, or as `read`.
        """
        start, headers = 0, {}
        while True:
            headers["Range"] = f"bytes={start}-{start + PIECE_BYTES - 1}"
            answer = self._request("GET", path, None, headers)
            size = OF_BYTES.fullmatch(answer.headers.get("Content-Range", "")) if answer.status == 206 else None
            if size is None and start:
                raise StoreError(f"{self.url}{path}: the content changed while it was read; ask again")
            yield answer.data
            start += len(answer.data)
            if size is None or start >= int(size[1]):
                return
            if not answer.data:
                raise StoreError(f"{self.url}{path}: it ends after {start:,} of {int(size[1]):,} bytes; ask again")
            if "ETag" in answer.headers:
                headers["If-Range"] = answer.headers["ETag"]

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        answer = self._request(method, path, body)
        try:
            return parse_json(answer.data)
        except ValueError:
            raise StoreError(f"{self.url}: it answers with something else than JSON; is it a query service?") from None

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Ask until there is an answer, a limited number of times.

        Raises what a local store does, and `StoreError` if the service can't be reached.
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
                asked_s = retry_after_s(answer)
                is_last, wait_s = not _is_temporary(answer), wait_s if asked_s is None else asked_s
            if is_last or tries == MAX_TRIES or time.monotonic() + wait_s > stop_s:
                raise failure from None
            time.sleep(wait_s)
        raise failure

    def _ask_once(self, method: str, path: str, body: bytes | None, own: Mapping[str, str]) -> Response:
        headers = {"Accept": "*/*", "User-Agent": "embedder", **own}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        address = self._address._replace(target=self._address.target + path)
        with self._connections.ask(method, address, Limits(self._timeout_s), headers, body) as response:
            response.read(cache_content=True)
            return response

    def _failure(self, answer: Response) -> Exception:
        error = _read_error(answer)
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


def _read_error(answer: Response) -> dict[str, Any] | None:
    try:
        found = parse_json(answer.data)["error"]
    except (ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, dict) and "what" in found else None


def _is_temporary(answer: Response) -> bool:
    """Whether to retry: the service is busy, or a load balancer has lost the replica that it asked."""
    return answer.status in BUSY or (answer.status >= 500 and _read_error(answer) is None)
