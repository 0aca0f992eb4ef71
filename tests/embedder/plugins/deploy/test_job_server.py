"""The client of Ray's job interface against servers that are wrong, silent, hostile, or gone."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from embedder.errors import ConfigError, RunFailedError
from embedder.plugins.deploy.submission import follow, job_server
from embedder.plugins.deploy.submission.follow import follow_log
from embedder.plugins.deploy.submission.job_server import JobServer, find_token

RUNNING = {"submission_id": "a", "status": "RUNNING", "start_time": 1_790_000_000_000, "metadata": {"embedder": "1"}}


@contextmanager
def serving(answers):
    """A server with one list of answers for each path: status and text; the last one stays. Gives URL and requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append((self.command, self.path, self.headers.get("Authorization"), body))
            mine = answers.get(self.path, [(404, "nothing")])
            status, text = mine.pop(0) if len(mine) > 1 else mine[0]
            content = (text if isinstance(text, str) else json.dumps(text)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for name in ("PATIENCE_S", "PAUSE_S"):
        monkeypatch.setattr(job_server, name, 0.2)
    monkeypatch.setattr(follow, "INTERVAL_S", 0.02)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")


def test_a_job_is_described_with_its_times_and_code():
    ended = RUNNING | {"status": "FAILED", "end_time": 1_790_000_060_000, "driver_exit_code": 2, "message": "it failed"}
    with serving({"/api/jobs/a": [(200, ended)], "/api/jobs/": [(200, [{"job_id": "driver"}, RUNNING, ended])]}) as (
        url,
        _,
    ):
        info = JobServer(url).job("a")
        assert (info.status, info.exit_code, info.is_over) == ("FAILED", 2, True)
        assert (info.ended_at - info.started_at).total_seconds() == 60
        assert [info.job_id for info in JobServer(url).jobs()] == ["a", "a"], "what nobody submitted is left out"


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (200, "<html>hello</html>", "it is no Ray dashboard"),
        (200, [1, 2], "it is no Ray dashboard"),
        (404, "not here", "it is no Ray dashboard"),
        (302, "elsewhere", "it is no Ray dashboard"),
        (401, "Unauthorized: Missing authentication token", "it wants a token"),
        (403, "Forbidden", "it wants a token"),
        (200, "\x1b[2J\n{", r"\\x1b"),
    ],
)
def test_what_is_no_dashboard_or_wants_another_token_is_one_line(status, text, message):
    with serving({"/api/version": [(status, text)]}) as (url, requests):
        with pytest.raises(ConfigError, match=message) as failed:
            JobServer(url).ray_version()
        assert "\n" not in str(failed.value) and "\x1b" not in str(failed.value)
        assert len(requests) == 1, "what answers so is not asked again"


def test_a_port_where_nothing_listens_and_a_server_that_says_no_http():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        talker = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n\r\n"))
        talker.start()
        with pytest.raises(ConfigError, match="can't be reached"):
            JobServer(f"http://127.0.0.1:{port}").ray_version()
        talker.join()
    for path in ("", "/béhind a proxy"):
        with pytest.raises(ConfigError, match=r"can't be reached \(ConnectionRefusedError"):
            JobServer(f"http://127.0.0.1:{port}{path}").ray_version()


@pytest.mark.parametrize(
    "address", ["10.0.0.1:8265", "ray://head:10001", "http://", "http://head:port", "http://u:p@head"]
)
def test_what_is_no_address_is_refused_without_a_request(address):
    with pytest.raises(ConfigError, match=r"address"):
        JobServer(address)


def test_the_token_is_shown_as_rays_clients_do(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(" of-the-file \n")
    assert find_token({}) is None
    assert find_token({"RAY_AUTH_TOKEN": "mine", "RAY_AUTH_TOKEN_PATH": str(file)}) == "mine"
    assert find_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == "of-the-file"
    assert find_token({"RAY_AUTH_TOKEN": "mine", "RAY_AUTH_MODE": "disabled"}) is None
    with pytest.raises(ConfigError, match="can't be read"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path)})
    file.write_text("")
    with pytest.raises(ConfigError, match="the file is empty"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(file)})
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-the-home")
    with serving({"/api/version": [(200, {"ray_version": "2.60.0"})]}) as (url, requests):
        assert JobServer(url).ray_version() == "2.60.0"
    assert requests[0][2] == "Bearer of-the-home"


def test_a_refused_job_tells_the_line_that_says_why():
    traceback = "Traceback (most recent call last):\n  File ...\nValueError: runtime_env is no environment"
    with serving({"/api/version": [(200, {"ray_version": "2.60.0"})], "/api/jobs/": [(500, traceback)]}) as (url, _):
        server = JobServer(url)
        server.ray_version()
        with pytest.raises(RunFailedError, match=r"refuses this \(500\): ValueError: runtime_env is no environment"):
            server.submit({"submission_id": "a"})


def test_a_log_is_followed_piece_by_piece_to_the_end():
    states = [(200, RUNNING), (200, RUNNING), (200, RUNNING | {"status": "SUCCEEDED"})]
    logs = [(200, {"logs": text}) for text in ("one\n", "one\ntw", "one\ntwo\nlast")]
    with serving({"/api/jobs/a": states, "/api/jobs/a/logs": logs}) as (url, _):
        assert list(follow_log(JobServer(url), "a")) == ["one\n", "two\nlast"], "no line in two pieces"


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        ({"status": "FAILED", "driver_exit_code": 2}, "job a failed with exit code 2: embedder: no store"),
        ({"status": "FAILED"}, "job a failed: embedder: no store"),
        ({"status": "STOPPED"}, "job a was stopped; what is finished is kept"),
    ],
)
def test_a_job_that_ends_badly_is_an_error(ended, message):
    with (
        serving(
            {"/api/jobs/a": [(200, RUNNING | ended)], "/api/jobs/a/logs": [(200, {"logs": "x\nembedder: no store\n"})]}
        ) as (
            url,
            _,
        ),
        pytest.raises(RunFailedError, match=message),
    ):
        list(follow_log(JobServer(url), "a"))


def test_a_head_that_dies_while_following_is_told_with_what_to_do():
    with serving({"/api/jobs/a": [(200, RUNNING)], "/api/jobs/a/logs": [(200, {"logs": "one\n"})]}) as (url, _):
        server = JobServer(url)
        pieces = follow_log(server, "a")
        assert next(pieces) == "one\n"
    server.close()
    with pytest.raises(RunFailedError, match="has not answered any more .* the same submission continues later"):
        list(pieces)


def test_an_id_that_would_change_the_path_is_quoted():
    with serving({}) as (url, requests), pytest.raises(ConfigError, match=r"has no job \.\./version\?x"):
        JobServer(url).job("../version?x")
    assert requests[0][1] == "/api/jobs/..%2Fversion%3Fx"
