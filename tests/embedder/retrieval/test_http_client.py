"""The HTTP client against services that are busy, restart, break connections, or are none."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import embedder
from embedder.errors import ConfigError, StoreError
from embedder.retrieval.http_client import HttpClient

STATUS = {"version": "v", "dim": 3}


class Service:
    """A server that answers one request after another as a test says, then as a service does.

    Attributes:
        num_connections: that were opened.
        num_requests: that came.
    """

    def __init__(self, *answers):
        self.num_connections = self.num_requests = 0
        left = list(answers)
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                service.num_connections += 1
                super().setup()

            def do_GET(self):
                service.num_requests += 1
                answer = left.pop(0) if left else {}
                if answer == "lost":
                    self.close_connection = True
                    return
                body = answer.get("body", json.dumps(STATUS)).encode()
                self.send_response(answer.get("status", 200))
                for name, value in answer.get("headers", {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = answer.get("ends", False)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def refusal(status, where="server", **headers):
    error = {"where": where, "what": "something", "rule": "the rule", "cure": "the cure"}
    return {"status": status, "body": json.dumps({"error": error}), "headers": headers}


BUSY = refusal(503, **{"Retry-After": "0"})
AGAIN = {
    "busy": [BUSY, BUSY, BUSY],
    "too many requests": [refusal(429, **{"Retry-After": "0"})],
    "a date": [refusal(503, **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})],
    "a connection that is lost": ["lost", "lost"],
    "a balancer whose replica died": [{"status": 502, "body": "<html>"}, {"status": 500, "body": "Traceback"}],
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_passes_is_asked_again(name):
    with Service(*AGAIN[name]).running() as service:
        assert embedder.connect(service.url).status() == STATUS
        assert service.num_requests == len(AGAIN[name]) + 1


@pytest.mark.medium
def test_asking_again_is_bounded_and_waits_as_long_as_it_is_told():
    with Service(*[BUSY] * 99).running() as service:
        with pytest.raises(StoreError, match="something; the rule; the cure"):
            embedder.connect(service.url).status()
        assert service.num_requests == 6
    with Service(refusal(503, **{"Retry-After": "3600"})).running() as service:
        with pytest.raises(StoreError, match="something"):
            embedder.connect(service.url).status()
        assert service.num_requests == 1, "an hour is more than the limit"
    with Service(refusal(503, **{"Retry-After": "1"})).running() as service:
        began = time.monotonic()
        embedder.connect(service.url).status()
        assert time.monotonic() - began >= 1


def test_mistakes_and_faults_of_the_service_are_not_asked_again():
    kinds = {400: ConfigError, 401: ConfigError, 404: StoreError, 410: StoreError, 500: StoreError}
    for status, kind in kinds.items():
        with Service(refusal(status, "body.where")).running() as service:
            with pytest.raises(kind, match="body.where: something; the rule; the cure$"):
                embedder.connect(service.url).status()
            assert service.num_requests == 1


def test_connections_are_kept_and_those_that_the_service_closed_are_replaced_at_once():
    with Service().running() as service, embedder.connect(service.url) as remote:
        for _ in range(5):
            remote.status()
        assert service.num_connections == 1
    with Service({"ends": True}, {"ends": True}).running() as service, embedder.connect(service.url) as remote:
        for _ in range(5):
            remote.status()
        assert service.num_requests == 5


def test_a_refusal_is_read_though_the_service_closed_before_all_was_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse():
            connection, _ = server.accept()
            connection.recv(1000)
            body = refusal(413)["body"].encode()
            head = f"HTTP/1.1 413 Large\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 20):
                pass
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", None, 20.0)
        with pytest.raises(ConfigError, match="something"):
            client.post("/search", {"queries": "x" * (20 << 20)})
        client.close()
        thread.join()


@pytest.mark.parametrize(
    ("body", "status"), [("<html>hello</html>", 200), ("<html>gone</html>", 404), ("moved", 301), ('["x"]', 403)]
)
def test_another_program_at_the_address_is_one_line(body, status):
    with Service(*[{"status": status, "body": body}] * 9).running() as service:
        with pytest.raises(StoreError, match=r"^http://127[^\n]*$"):
            embedder.connect(service.url).status()
        assert service.num_requests == 1


@pytest.mark.medium
def test_nobody_at_the_address_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(StoreError, match="can't be reached.*refused.*embedder serve"):
        embedder.connect(url).status()
    with pytest.raises(StoreError, match="can't be reached"):
        embedder.connect("http://name.invalid").status()


def test_a_service_that_says_nothing_is_left_after_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = embedder.connect(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(StoreError, match="timed out"):
            remote.status()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8765", "ftp://host", "http://", "http://user:secret@host", "http://host/?a=b", "http://h:x"]
)
def test_what_is_no_address_is_refused_before_anything_is_asked(url):
    with pytest.raises(ConfigError, match="address") as caught:
        embedder.connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", " ", "a\r\nb: c", "é"])
def test_what_can_be_no_token_is_refused(token):
    with pytest.raises(ConfigError, match="token"):
        embedder.connect("http://127.0.0.1:1", token=token)
