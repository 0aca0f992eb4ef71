"""Tokens that let clients in: a file that is read again when it changes, and the cookie made of one."""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from embedder.errors import ConfigError
from embedder.quantities import plural

LOG = logging.getLogger(__name__)

COOKIE = "embedder_token"
MIN_CHARACTERS = 16
_TOKEN = re.compile(r"[\x21-\x7e]+")
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group may read, as where a container mounts a secret


class TokenFile:
    """Tokens of a file, one a line; lines that begin with # are comments."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it can't be read, others can read or change it, or a token is too short.
        """
        self._path = path
        self._seen: object = None
        self._tokens: tuple[bytes, ...] = ()
        self._sessions: tuple[bytes, ...] = ()
        self._read()

    def allows(self, headers: Mapping[bytes, bytes], *, cookie: bool) -> bool:
        """Whether a request has a token; all are compared, each in constant time.

        Args:
            headers: of the request, by their names in lower case.
            cookie: whether the cookie of a session will do.
        """
        self._refresh()
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and _is_among(token.strip(), self._tokens):
            return True
        return cookie and any(_is_among(value, self._sessions) for value in _cookies(headers.get(b"cookie", b"")))

    def session(self, headers: Mapping[bytes, bytes]) -> str:
        """Value of the cookie for a request that has a token: made of it, and of no use in its place."""
        token = headers.get(b"authorization", b"").partition(b" ")[2].strip()
        return _session(token).decode()

    def _refresh(self) -> None:
        """Read the file again where it changed; one that can't be used any more lets nobody in."""
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
            # Reading a pipe would wait for its writer, and each change is a file of its own.
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
    """Values of our cookie."""
    pairs = [each.strip().partition(b"=") for each in header.split(b";")]
    return [value for name, _, value in pairs if name == COOKIE.encode()]
