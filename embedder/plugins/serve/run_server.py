"""A server that runs until a signal: uvicorn, which on shutdown first lets balancers and clients leave."""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from embedder.errors import ConfigError
from embedder.executors.interrupts import handling
from embedder.plugins.serve.connections import uvicorn_options
from embedder.plugins.serve.serve_metrics import ACCESS_LOG
from embedder.plugins.serve.serve_settings import ServeSettings, server_url
from embedder.plugins.serve.web_app import add_limits, create_routes


class DrainingServer(uvicorn.Server):
    """Uvicorn that after SIGTERM continues to answer for a while, with 503 at /readyz, before it stops listening."""

    def __init__(self, settings: ServeSettings, when_listening: Callable[[str], object] = lambda _: None) -> None:
        """Make the server and its application; `when_listening` gets the address once requests are answered."""
        self.routes = create_routes(settings)
        self._settings, self.when_listening = settings, when_listening
        super().__init__(
            uvicorn.Config(
                add_limits(self.routes, settings),
                settings.host,
                settings.port,
                log_config=None,
                date_header=False,
                timeout_graceful_shutdown=settings.graceful_s,
                **uvicorn_options(settings),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the store, listen, and report the address."""
        await super().startup(sockets)
        if self.started:
            self.when_listening(self.url)

    @property
    def url(self) -> str:
        """Address of the server, with its actual port."""
        return server_url(*self.servers[0].sockets[0].getsockname()[:2])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; afterwards the command ends as if it had finished normally."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handling(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Turn away new requests, and end a little later."""
        asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Signal balancers that this server ends, and stop listening once they had time to notice."""
        service = getattr(self.routes.state, "service", None)
        if service is not None:
            service.is_ready = False
        asyncio.get_running_loop().call_later(self._settings.drain_s, self.stop)

    def stop(self) -> None:
        """Stop listening, answer what has arrived, and end."""
        self.should_exit = True


def run_server(settings: ServeSettings, when_listening: Callable[[str], object]) -> None:
    """Serve until SIGTERM or Ctrl-C; `when_listening` is called with the address.

    Raises `ConfigError` if the address can't be listened on, or the token file can't be used; `StoreError` if there is
    no store, or nothing is published yet; `RetrievalError` if the index is damaged.
    """
    server = DrainingServer(settings, when_listening)
    try:
        with _logs(settings):
            server.run()
    except (SystemExit, UnicodeError):  # the address can't be listened on, or the store can't be opened
        pass
    if (problem := getattr(server.routes.state, "problem", None)) is not None:
        raise problem
    if not server.started:
        raise ConfigError(f"{settings.host}:{settings.port}: {listening_problem(settings.host, settings.port)}")


def listening_problem(host: str, port: int) -> str:
    """Say why an address can't be listened on, and the cure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program listens there; end it, or give another --port (0 takes a free one)"
            if error.errno == errno.EACCES:
                return "ports below 1024 are for the administrator; give another --port, as 8765"
    return "can't listen there; give another --host or --port"


@contextmanager
def _logs(settings: ServeSettings) -> Iterator[None]:
    """Log each request to standard error in one line, bypassing the terminal's layout, which would cost a millisecond.

    Uvicorn's own messages are tracebacks of what is reported in one line elsewhere.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    ACCESS_LOG.propagate = False
    handler = logging.StreamHandler()
    if settings.access_log:
        ACCESS_LOG.addHandler(handler)
    else:
        ACCESS_LOG.setLevel(logging.WARNING)
    try:
        yield
    finally:
        ACCESS_LOG.removeHandler(handler)
