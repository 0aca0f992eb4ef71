"""What every request passes: host, origin, rate, size of the body, places; and what every answer has."""

import http.client
import json
import socket
import threading

import pytest
from small_server import BIG_BYTES, RawConnection, running

from embedder.plugins.serve.protection import CONTENT_SECURITY_POLICY
from embedder.plugins.serve.rate_limit import is_among

SHAPE = {"where", "what", "rule", "cure"}


@pytest.fixture(scope="module")
def port():
    with running(max_body_bytes=4096, trusted_proxies=("127.0.0.1",), rate_per_s=0.5, rate_burst=3) as port:
        yield port


def ask(port, path="/", method="GET", body=None, **headers):
    """Status, headers and JSON of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        is_json = content and "json" in headers.get("content-type", "")
        return answer.status, headers, json.loads(content) if is_json else content
    finally:
        connection.close()


def refusal(answer, status):
    """Error of an answer that must have this status and the one shape."""
    assert answer[0] == status, answer
    assert set(answer[2]) == {"error"}
    assert set(answer[2]["error"]) == SHAPE
    assert all("\n" not in text for text in answer[2]["error"].values())
    check_headers(answer[1])
    return answer[2]["error"]


def check_headers(headers):
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers
    assert not [name for name in headers if name.startswith("access-control")]


def test_every_answer_has_the_security_headers_and_no_banner(port):
    status, headers, said = ask(port, "/items/x")
    assert (status, said["path"]) == (200, "/items/x")
    check_headers(headers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "localhost.evil.example", "", "[::1", "a@b"])
def test_a_foreign_name_for_this_server_is_refused(port, host):
    assert "Host" in refusal(ask(port, "/search", host=host), 421)["where"]


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST"])
def test_our_own_names_are_answered(port, host):
    assert ask(port, "/search", host=host)[0] == 200
    assert ask(port, "/readyz", host="10.1.2.3:80")[0] == 200, "probes come by any name"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "http://["},
        {"origin": "http://\xe9.example"},
    ],
)
def test_what_a_foreign_page_sends_is_refused(port, headers):
    assert "Origin" in refusal(ask(port, "/search", "POST", b"{}", **headers), 403)["where"]


def test_what_our_page_sends_is_answered(port):
    assert ask(port, "/search", "POST", b"{}", origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(port, "/search", "POST", b"{}", sec_fetch_site="same-origin", origin="null")[0] == 200
    assert ask(port, "/", sec_fetch_site="cross-site")[0] == 200, "a link from elsewhere"


def test_each_client_has_its_own_rate(port):
    fast, other = "203.0.113.5", "203.0.113.6"
    assert [ask(port, "/x", x_forwarded_for=fast)[0] for _ in range(3)] == [200] * 3
    answer = ask(port, "/x", x_forwarded_for=fast)
    assert "too fast" in refusal(answer, 429)["what"]
    assert 1 <= int(answer[1]["retry-after"]) <= 2
    assert ask(port, "/x", x_forwarded_for=other)[2]["client"] == other
    assert ask(port, "/healthz", x_forwarded_for=fast)[0] == 200


def test_addresses_of_one_ipv6_network_share_a_rate(port):
    answers = [ask(port, "/x", x_forwarded_for=f"2001:db8:1:2::{number}")[0] for number in range(4)]
    assert answers == [200, 200, 200, 429]
    assert ask(port, "/x", x_forwarded_for="2001:db8:1:3::1")[0] == 200


def test_loopback_has_no_rate(port):
    assert {ask(port, "/x")[0] for _ in range(10)} == {200}


def test_a_body_up_to_the_limit_arrives_whole(port):
    assert ask(port, "/x", "POST", bytes(4096))[2]["num_bytes"] == 4096


def test_a_body_above_the_limit_is_refused_before_it_is_read(port):
    assert "max_body_bytes = 4096" in refusal(ask(port, "/x", "POST", bytes(4097)), 413)["rule"]
    with RawConnection(port) as raw:
        raw.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert raw.read().startswith(b"HTTP/1.1 413 ")


def test_a_body_of_unknown_length_is_counted_as_it_comes(port):
    with RawConnection(port) as raw:
        raw.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            raw.send(b"400\r\n" + bytes(1024) + b"\r\n")
        assert raw.read().startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "request_line",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_one_shape(port, request_line):
    with RawConnection(port) as raw:
        raw.send(request_line)
        if not request_line.endswith(b"\r\n\r\n"):
            raw.send(b"\r\n\r\n")
        head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"nosniff" in head
    assert set(json.loads(body)["error"]) == SHAPE
    assert ask(port, "/x")[0] == 200


def test_errors_of_other_makers_get_the_one_shape(port):
    assert refusal(ask(port, "/text-error"), 404)["what"] == "there is nothing at this address"


def test_a_fault_is_told_without_its_reason_and_logged_without_secrets(port, caplog):
    error = refusal(ask(port, "/fault"), 500)
    assert "fault of the service" in error["rule"]
    assert "hunter22" not in str(error)
    logged = caplog.text
    assert "RuntimeError" in logged
    assert "bucket" in logged
    assert "hunter22" not in logged


@pytest.mark.medium
def test_more_requests_than_places_are_told_to_come_again():
    with running(max_concurrency=2) as port:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask(port, "/slow"))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, *_ in answers) == [200, 200, 503, 503, 503]
        busy = next(answer for answer in answers if answer[0] == 503)
        refusal(busy, 503)
        assert busy[1]["retry-after"] == "1"
        assert ask(port, "/x")[0] == 200, "the places are given back"


def test_bodies_that_wait_are_bounded_together():
    with running(max_body_bytes=4096, max_waiting_bytes=6000) as port, RawConnection(port) as first:
        first.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4096\r\n\r\n" + bytes(4095))
        assert ask(port, "/x", "POST", bytes(1000))[0] == 200
        refusal(ask(port, "/x", "POST", bytes(4000)), 503)
        first.send(b"x")
        assert first.read().startswith(b"HTTP/1.1 200 ")
        assert ask(port, "/x", "POST", bytes(4000))[0] == 200


def test_a_request_that_is_cut_off_leaves_nothing_behind():
    with running(max_body_bytes=4096, max_waiting_bytes=4096, max_concurrency=1) as port:
        for _ in range(3):
            with RawConnection(port) as raw:
                raw.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4096\r\n\r\n" + bytes(4000))
        answers = [ask(port, "/x", "POST", bytes(4096))[0] for _ in range(5)]
        assert answers[-1] == 200


def test_a_large_answer_arrives_whole(port):
    assert len(ask(port, "/big")[2]) == BIG_BYTES


def test_without_tokens_other_machines_call_a_server_by_its_own_names_and_addresses_alone():
    machine = socket.gethostname()
    with running(host="search.example.org") as port:
        for host in ("localhost", "127.0.0.1:8765", "10.1.2.3:80", "[fe80::1]", machine, "search.example.org:1"):
            assert ask(port, "/search", host=host)[0] == 200, host
        for host in ("evil.example", "evil.example:8765", f"{machine}.evil.example", "10.1.2.3.evil.example", ""):
            assert "--allowed-host" in refusal(ask(port, "/search", host=host), 421)["cure"], host
        assert ask(port, "/readyz", host="a-pod")[0] == 200
    with running(host="0.0.0.0", allowed_hosts=("search.example.org",)) as port:
        assert ask(port, "/search", host="search.example.org")[0] == 200
        for host in ("10.1.2.3", machine, "evil.example"):
            refusal(ask(port, "/search", host=host), 421)


@pytest.mark.parametrize(
    ("client", "is_trusted"),
    [
        ("10.1.2.3", True),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("fd00::1", True),
        ("fe80::1", False),
        ("unix:", True),
        ("", False),
    ],
)
def test_a_proxy_is_trusted_by_its_address_or_its_network(client, is_trusted):
    assert is_among(client, ("10.0.0.0/8", "192.0.2.7", "fd00::/8", "unix:")) == is_trusted
    assert is_among(client, ("*",)) and not is_among(client, ())
