"""Protection of the service: what every request passes before the application, and every answer after it.

Pure ASGI, since Starlette's middleware would put a queue between the application and a client that reads slowly.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import socket
import stat
import time
import traceback
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedder.errors import ConfigError
from embedder.plugins.serve.rate_limit import RateLimit
from embedder.plugins.serve.serve_errors import RequestError, busy, refusal_of
from embedder.plugins.serve.serve_settings import LOOPBACK, ServeSettings
from embedder.quantities import plural
from embedder.redaction import mask

LOG = logging.getLogger(__name__)

COOKIE = "embedder_token"
MIN_CHARACTERS = 16
_TOKEN = re.compile(r"[\x21-\x7e]+")
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group may read, since containers mount secrets so


class TokenFile:
    """Tokens of a file, one a line; lines that begin with # are comments."""

    def __init__(self, path: Path) -> None:
        """Read the file; ConfigError if it is unreadable, others can read or change it, or a token is too short."""
        self._path = path
        self._seen: object = None
        self._tokens: tuple[bytes, ...] = ()
        self._sessions: tuple[bytes, ...] = ()
        self._read()

    def allows(self, headers: Mapping[bytes, bytes], *, cookie: bool) -> bool:
        """Whether a request has a token; all are compared, each in constant time.

        Headers are by lower-case name; `cookie` says whether a session's cookie suffices.
        """
        self._refresh()
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and _is_among(token.strip(), self._tokens):
            return True
        return cookie and any(_is_among(value, self._sessions) for value in _cookies(headers.get(b"cookie", b"")))

    def session(self, headers: Mapping[bytes, bytes]) -> str:
        """Value of the cookie for a request that has a token: derived from the token, and useless in its place."""
        token = headers.get(b"authorization", b"").partition(b" ")[2].strip()
        return _session(token).decode()

    def _refresh(self) -> None:
        """Read the file again if it changed; one that can't be used any more lets nobody in."""
        try:
            if self._signature() == self._seen:
                return
            self._read()
            LOG.info("token file %s: read again, %s", self._path, plural(len(self._tokens), "token"))
        except (ConfigError, OSError) as error:
            if self._tokens or self._seen is not None:
                LOG.error("%s; nobody is let in meanwhile", error)
            self._tokens, self._sessions, self._seen = (), (), None

    def _signature(self) -> object:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode

    def _read(self) -> None:
        try:
            self._seen = self._signature()
            mode = self._path.stat().st_mode
            # Reading a pipe would wait for its writer, and a change always makes a new file.
            lines = self._path.read_text(encoding="utf-8").splitlines() if stat.S_ISREG(mode) else []
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"token file {self._path}: {reason}; give a text file with one token a line") from None
        if mode & _OTHERS:
            raise ConfigError(
                f"token file {self._path}: its mode is {stat.S_IMODE(mode):04o}, so others can read or change it; "
                f"run chmod 600 {self._path}"
            )
        tokens = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not tokens:
            raise ConfigError(f"token file {self._path}: it has no token; write one a line")
        for number, token in enumerate(tokens, 1):
            if len(token) < MIN_CHARACTERS or not _TOKEN.fullmatch(token):
                raise ConfigError(
                    f"token file {self._path}: token {number} has {len(token)} characters; "
                    f"a token has {MIN_CHARACTERS} or more of ASCII without spaces, as `openssl rand -hex 32` writes"
                )
        self._tokens = tuple(token.encode() for token in tokens)
        self._sessions = tuple(_session(token) for token in self._tokens)


def _session(token: bytes) -> bytes:
    return hmac.new(token, b"embedder session", hashlib.sha256).hexdigest().encode()


def _is_among(given: bytes, known: tuple[bytes, ...]) -> bool:
    return bool(sum([hmac.compare_digest(given, each) for each in known]))


def _cookies(header: bytes) -> list[bytes]:
    pairs = [each.strip().partition(b"=") for each in header.split(b";")]
    return [value for name, _, value in pairs if name == COOKIE.encode()]


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: dict[bytes, bytes] = {
    b"content-security-policy": CONTENT_SECURITY_POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    b"cache-control": b"no-store",  # unless the application says otherwise
}
PROBES = ("/healthz", "/readyz")
PUBLIC = (*PROBES, "/", "/favicon.ico")
DOCUMENTS = ("/docs", "/openapi.json")  # a browser that opens them can send no token, only the cookie
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
SESSION_PATH = "/session"


class ProtectedApp:
    """ASGI application behind all checks and limits; used from one event loop."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        """Wrap an application; ConfigError if the token file can't be used."""
        self._app, self._settings = app, settings
        self._tokens = TokenFile(settings.token_file) if settings.token_file is not None else None
        self._rate = RateLimit(settings.rate_per_s, settings.rate_burst)
        self._hosts = {host.lower() for host in settings.allowed_hosts}
        # Without tokens, a foreign page could read all answers through a browser, by a name that it binds to this
        # address; requests to the address itself carry no such name.
        self._takes_addresses = settings.host not in LOOPBACK and not self._hosts and self._tokens is None
        if settings.host in LOOPBACK or self._takes_addresses:
            self._hosts |= set(LOOPBACK)
        if self._takes_addresses:
            machine = socket.gethostname().lower()
            self._hosts |= {settings.host.lower(), machine, machine.partition(".")[0]}
        self._num_answering = 0
        self._num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the application's start and end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        try:
            await self._pass(scope, receive, answer)
        except RequestError as refusal:
            await refusal.response()(scope, receive, answer)
        except _ClientGoneError:
            return
        except Exception:  # noqa: BLE001  # the last place where a fault can become an answer
            LOG.error("%s %s failed: %s", scope["method"], scope["path"], mask(traceback.format_exc()))
            if not answer.is_started:
                await refusal_of(500).response()(scope, receive, answer)

    async def _pass(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in PROBES:
            self._check_host(headers)
            self._check_rate(scope)
        self._check_origin(scope, headers)
        self._check_token(scope, headers, path)
        if path == SESSION_PATH and scope["method"] == "POST":
            await self._begin_session(scope, headers, answer)
            return
        await self._answer(scope, headers, path, receive, answer)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], path: str, receive: Receive, answer: "_Answer"
    ) -> None:
        num_bytes = 0
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            body = await self._read_body(headers, receive)
            num_bytes, receive = len(body), _replay(body, receive)
        try:
            if path in PROBES:
                await self._app(scope, receive, answer)
                return
            if self._num_answering >= self._settings.max_concurrency:
                raise busy(f"max_concurrency = {self._num_answering} allows no further request")
            self._num_answering += 1
            answer.when_computed = self._release
            try:
                await self._app(scope, receive, answer)
            finally:
                answer.mark_computed()
        finally:
            self._num_body_bytes -= num_bytes

    def _release(self) -> None:
        """Release the place: while an answer is sent, the client's pace must not affect others."""
        self._num_answering -= 1

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse names of other servers: a foreign page whose name was bound to this address sends its own name."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if self._hosts and name not in self._hosts and not (self._takes_addresses and _is_address(name)):
            raise RequestError(
                421,
                "header Host",
                f"found {host!r}",
                "a name that this server answers to",
                "call it by that name, or add this one with --allowed-host",
            )

    def _check_rate(self, scope: Scope) -> None:
        client = scope.get("client")
        wait_s = self._rate.wait_s(client[0], time.monotonic()) if client else 0.0
        if wait_s:
            raise RequestError(
                429,
                "client",
                "it sends requests too fast",
                f"rate_per_s = {self._settings.rate_per_s:g}, and rate_burst = {self._settings.rate_burst} at once",
                "wait as Retry-After says",
                retry_after=str(int(wait_s) + 1),
            )

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a foreign page makes a browser send; there is no CORS either."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        is_foreign = (
            site not in (b"same-origin", b"none")
            if site is not None
            else origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()
        )
        if scope["method"] not in SAFE_METHODS and is_foreign:
            raise RequestError(
                403,
                "header Origin",
                f"found {(origin or site or b'').decode('latin-1')!r}",
                "requests of this server's own page, or of programs",
                "call the service from its own page or from a program",
            )

    def _check_token(self, scope: Scope, headers: Mapping[bytes, bytes], path: str) -> None:
        if self._tokens is None or path in PUBLIC or path.startswith("/page/"):
            return
        is_media = path.startswith("/items/") and path.endswith(("/image", "/clip", "/file"))
        may_be_cookie = scope["method"] in SAFE_METHODS and (is_media or path in DOCUMENTS)
        if not self._tokens.allows(headers, cookie=may_be_cookie):
            raise RequestError(
                401,
                "header Authorization",
                "its token is not known" if b"authorization" in headers else "it is missing",
                "`Bearer` and a token of this server",
                "ask its operator for one",
                www_authenticate="Bearer",
            )

    async def _begin_session(self, scope: Scope, headers: Mapping[bytes, bytes], answer: "_Answer") -> None:
        """Set the cookie with which images and clips are requested, since an element of a page can't send a token."""
        made: list[tuple[bytes, bytes]] = []
        if self._tokens is not None:
            secure = "; Secure" if scope["scheme"] == "https" else ""
            value = f"{COOKIE}={self._tokens.session(headers)}; HttpOnly; SameSite=Strict; Path=/{secure}"
            made.append((b"set-cookie", value.encode()))
        await answer({"type": "http.response.start", "status": 204, "headers": made})
        await answer({"type": "http.response.body", "body": b""})

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Receive the whole body before a place is taken, so that a slow sender keeps nobody else waiting."""
        most = self._settings.max_body_bytes
        if int(headers.get(b"content-length", b"0")) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        num_bytes = 0
        is_whole = False
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                is_more = True
                while is_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    part = message.get("body", b"")
                    parts.append(part)
                    num_bytes += len(part)
                    self._num_body_bytes += len(part)
                    is_more = message.get("more_body", False)
                    if num_bytes > most:
                        raise _too_large(most)
                    if self._num_body_bytes > self._settings.max_waiting_bytes:
                        raise busy(f"max_waiting_bytes = {self._settings.max_waiting_bytes} allows no further body")
            is_whole = True
        except TimeoutError:
            raise RequestError(
                408,
                "body",
                f"{plural(num_bytes, 'byte')} came in time",
                f"the whole body within body_timeout_s = {self._settings.body_timeout_s:g}",
                "send it faster, or less",
                connection="close",
            ) from None
        finally:
            if not is_whole:
                self._num_body_bytes -= num_bytes
        return b"".join(parts)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class _ClientGoneError(Exception):
    """End of a request whose client has closed the connection."""


class _Answer:
    """Send function that adds the security headers, and gives errors from elsewhere the one JSON shape.

    `when_computed` is called once, before the first bytes of the body are sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.is_started = False
        self.when_computed: Callable[[], None] | None = None
        self._is_replaced = False

    def mark_computed(self) -> None:
        """Report, only the first time, that only sending is left."""
        done, self.when_computed = self.when_computed, None
        if done is not None:
            done()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.mark_computed()
            if self._is_replaced:
                return
        elif message["type"] == "http.response.start":
            headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
            names = {name.lower(): value for name, value in headers}
            if message["status"] >= 400 and not names.get(b"content-type", b"").startswith(b"application/json"):
                await self._replace(message["status"], names)
                return
            self.is_started = True
            missing = [each for each in SECURITY_HEADERS.items() if each[0] not in names]
            message = {**message, "headers": headers + missing}
        await self._send(message)

    async def _replace(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        kept = {name: headers[name] for name in (b"allow", b"content-range", b"retry-after") if name in headers}
        response = refusal_of(status, {name.decode(): kept[name].decode("latin-1") for name in kept}).response()
        await self({"type": "http.response.start", "status": status, "headers": response.raw_headers})
        await self({"type": "http.response.body", "body": bytes(response.body)})
        self._is_replaced = True


def _too_large(most: int) -> RequestError:
    return RequestError(
        413, "body", f"it has more than {most:,} bytes", f"max_body_bytes = {most}", "send fewer or smaller images"
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receive function of a body that has been read already, and then of the end of the connection."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
