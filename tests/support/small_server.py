"""A small ASGI application behind the service's protection, served by uvicorn in a thread; raw connections to it."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from embedder.plugins.serve.connections import uvicorn_options
from embedder.plugins.serve.protection import ProtectedApp
from embedder.plugins.serve.serve_settings import ServeSettings

BIG_BYTES = 64 << 20


async def echo(scope, receive, send):
    """Answer with what came: path, length of the body, client; `/big` streams, `/slow` takes its time."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    path = scope["path"]
    if path == "/fault":
        raise RuntimeError("it failed at s3://key:hunter22@bucket/x")
    if path == "/text-error":
        await _answer(send, 404, b"nothing here", b"text/plain")
        return
    body = b""
    message = {"more_body": scope["method"] == "POST"}
    while message["more_body"]:
        message = await receive()
        body += message.get("body", b"")
    if path == "/slow":
        await asyncio.sleep(1.0)
    if path == "/big":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(BIG_BYTES >> 16):
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    said = {"path": path, "num_bytes": len(body), "client": scope["client"][0]}
    await _answer(send, 200, json.dumps(said).encode(), b"application/json")


async def _answer(send, status, body, kind):
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def running(app=echo, **settings):
    """Serve an application behind its protection; gives the port."""
    served = ServeSettings(store="unused", port=0, **settings)
    server = uvicorn.Server(
        uvicorn.Config(
            ProtectedApp(app, served), "127.0.0.1", 0, log_level="warning", lifespan="on", **uvicorn_options(served)
        )
    )
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class RawConnection:
    """Connection that sends what it is told, as slowly as it is told."""

    def __init__(self, port, *, receive_buffer=None, timeout_s=30.0):
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(timeout_s)
        self._socket.connect(("127.0.0.1", port))

    def send(self, data):
        """Send bytes at once."""
        self._socket.sendall(data)

    def read(self, num=1 << 16):
        """Read what is there; b"" where the server has closed the connection."""
        try:
            return self._socket.recv(num)
        except ConnectionError:
            return b""

    def read_all(self):
        """Read until the server closes the connection."""
        parts = []
        while part := self.read():
            parts.append(part)
        return b"".join(parts)

    def is_reset(self):
        """Whether the server has cut the connection, though bytes of it may still be read."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def is_closed_by_sending(self, data, every_s, times):
        """Send the same bytes again and again; returns whether the server ended that."""
        for _ in range(times):
            try:
                self.send(data)
            except OSError:
                return True
            time.sleep(every_s)
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()
