"""A client that sends or reads a byte at a time harms only itself."""

import http.client
import time

import pytest
from small_server import RawConnection, running

pytestmark = pytest.mark.medium

HEAD = b"GET /big HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def port():
    with running(
        header_timeout_s=1.0, body_timeout_s=1.0, send_timeout_s=1.0, max_concurrency=2, max_connections=40
    ) as port:
        yield port


def is_answered(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/x")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def test_headers_that_come_a_byte_at_a_time_end_with_408(port):
    with RawConnection(port) as slow:
        slow.send(b"GET / HTTP/1.1\r\nX: ")
        assert slow.is_closed_by_sending(b"a", 0.1, 100) or slow.read_all().startswith(b"HTTP/1.1 408 ")
        assert is_answered(port)


def test_a_connection_that_says_nothing_is_closed(port):
    with RawConnection(port) as silent:
        assert silent.read_all().startswith(b"HTTP/1.1 408 ")


def test_headers_that_come_slowly_after_a_whole_request_end_too(port):
    with RawConnection(port) as slow:
        slow.send(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.read().startswith(b"HTTP/1.1 200 ")
        slow.send(b"GET /x HT")
        assert slow.is_closed_by_sending(b"T", 0.1, 100)


def test_a_body_that_comes_a_byte_at_a_time_ends_with_408_and_takes_no_place(port):
    slow = [RawConnection(port) for _ in range(20)]
    for each in slow:
        each.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(5):
        for each in slow:
            each.send(b"a")
        assert is_answered(port), "two places, and twenty slow bodies"
    for each in slow:
        assert each.read_all().startswith(b"HTTP/1.1 408 ")
        each.__exit__()


def test_readers_of_a_byte_at_a_time_take_no_place_and_are_left(port):
    slow = [RawConnection(port, receive_buffer=4096) for _ in range(20)]
    for each in slow:
        each.send(HEAD + b"\r\n")
        assert each.read(1) == b"H"
    assert is_answered(port), "two places, and twenty slow readers"
    left = set(range(len(slow)))
    ends_at = time.monotonic() + 60
    while left and time.monotonic() < ends_at:
        for number in list(left):
            if not slow[number].read(1) or slow[number].is_reset():
                left.discard(number)
        time.sleep(0.1)
    assert not left
    assert is_answered(port)
    for each in slow:
        each.__exit__()


def test_connections_beyond_the_limit_are_refused_and_the_next_are_not(port):
    held = [RawConnection(port) for _ in range(60)]
    ends = [each.read_all() for each in held]
    refused = [end for end in ends if end.startswith(b"HTTP/1.1 503 ")]
    assert len(refused) >= 20
    assert b"retry-after: 1" in refused[0].lower()
    for each in held:
        each.__exit__()
    assert is_answered(port)


def test_an_endless_body_after_a_refusal_is_cut(port):
    with RawConnection(port) as raw:
        raw.send(b"POST /x HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw.read().startswith(b"HTTP/1.1 421 ")
        assert raw.is_closed_by_sending(b"400\r\n" + bytes(1024) + b"\r\n", 0.05, 400)
