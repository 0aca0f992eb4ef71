"""Web servers on loopback that answer as a test says: well, badly, slowly, without end."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import samples

Answer = Callable[["Handler"], None]
WAIT_S = 0.02


class Handler(BaseHTTPRequestHandler):
    """One connection; `server.routes` says how each path is answered."""

    protocol_version = "HTTP/1.1"
    server: "WebServer"

    def setup(self):
        super().setup()
        self.server.num_connections += 1

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        with server.lock:
            server.requests.append((self.command, self.path, dict(self.headers)))
            server.num_at_once += 1
            server.most_at_once = max(server.most_at_once, server.num_at_once)
        try:
            server.routes.get(path, status(404))(self)
        except OSError:
            self.close_connection = True  # the client has gone
        finally:
            with server.lock:
                server.num_at_once -= 1

    do_HEAD = do_GET

    def send(self, body: bytes = b"", code: int = 200, **headers: str) -> None:
        """Send a whole answer."""
        self.send_response(code)
        fields = {"Content-Type": "image/png", "Content-Length": str(len(body))}
        for name, value in (fields | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def write(self, data: bytes) -> None:
        """Write bytes as they are, whatever HTTP says; the connection ends with this answer."""
        self.close_connection = True
        self.wfile.write(data)
        self.wfile.flush()

    def forever(self, data: bytes) -> None:
        """Write bytes again and again, without a pause, until the client or the server goes."""
        while not self.server.is_closing.is_set():
            self.write(data)

    def drip(self, data: bytes) -> None:
        """Write a byte now and then, beginning again at the end of them."""
        while not self.server.is_closing.is_set():
            for byte in data:
                self.write(bytes([byte]))
                if self.server.is_closing.wait(WAIT_S):
                    return

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """Server that remembers what it was asked.

    Attributes:
        routes: answer by path; others are 404.
        requests: method, path with query, and headers of each request.
        num_connections: connections that were made.
        most_at_once: most requests that were answered at the same time.
    """

    daemon_threads, block_on_close = True, False
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), Handler)
        self.routes: dict[str, Answer] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock, self.is_closing = threading.Lock(), threading.Event()
        self.num_connections = self.num_at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}"

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def add_images(self, number: int) -> list[str]:
        """Serve images as `/N.png`; gives their addresses."""
        for each in range(number):
            self.routes[f"/{each}.png"] = image(each)
        return [f"{self.url}/{each}.png" for each in range(number)]

    def handle_error(self, *_: object) -> None:
        """A client that has given up is no news."""


@contextlib.contextmanager
def web_server(host: str = "127.0.0.1", port: int = 0) -> Iterator[WebServer]:
    """Run a server."""
    server = WebServer(host, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def image(seed: int, **headers: str) -> Answer:
    """Answer with an image."""
    return lambda handler: handler.send(samples.image_bytes(seed), **headers)


def status(code: int, **headers: str) -> Answer:
    """Answer without content."""
    return lambda handler: handler.send(b"", code, **headers)


def redirect(place: str, code: int = 302) -> Answer:
    """Answer with another place."""
    return status(code, Location=place)


def in_turn(*answers: Answer) -> Answer:
    """Give the answers one after the other, and the last one for ever."""
    left = list(answers)

    def answered(handler: Handler) -> None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        answer(handler)

    return answered


def slowly(answer: Answer, seconds: float) -> Answer:
    """Give an answer after some time."""

    def answered(handler: Handler) -> None:
        time.sleep(seconds)
        answer(handler)

    return answered


def by_ranges(content: bytes, tag: str = '"1"') -> Answer:
    """Answer with the bytes that are asked for, or with the whole."""

    def answered(handler: Handler) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range") or "")
        if span is None:
            return handler.send(content, ETag=tag)
        start, stop = int(span[1]), min(int(span[2]) + 1, len(content))
        place = f"bytes {start}-{stop - 1}/{len(content)}"
        return handler.send(content[start:stop], 206, Content_Range=place, ETag=tag)

    return answered
