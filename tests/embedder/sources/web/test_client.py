"""A client among hostile servers: each attack ends as a clear reason, in bounded time and space."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import samples
from urllib3.connection import HTTPConnection
from web_downloads import HEAD, LIMITS, PNG, asked, failure
from web_server import image, in_turn, redirect, slowly, status, web_server

from embedder.sources.web import hosts
from embedder.storage import http


def test_an_image_comes_as_it_is_and_connections_are_used_again(server, make_client):
    client = make_client(user_agent="photos/1.0 (me@example.com)")
    for number, address in enumerate(server.add_images(5)):
        with client.download(address, LIMITS) as fetched:
            assert (fetched.data, fetched.path) == (samples.image_bytes(number), None)
            assert fetched.size_bytes == len(fetched.data)
    assert server.num_connections == 1
    method, path, headers = server.requests[0]
    assert (method, path) == ("GET", "/0.png")
    assert headers["User-Agent"] == "photos/1.0 (me@example.com)"
    assert headers["Accept-Encoding"] == "identity"
    assert headers["Host"] == server.url.removeprefix("http://")


def test_an_address_is_encoded_as_browsers_do(server, client):
    server.routes["/%C3%A9t%C3%A9%20%C3%A0/a%2Fb.png"] = image(1)
    fetched = client.download(f"{server.url}/été à/a%2Fb.png?größe=1 2#part", LIMITS)
    assert fetched.data == samples.image_bytes(1)
    assert server.paths == ["/%C3%A9t%C3%A9%20%C3%A0/a%2Fb.png?gr%C3%B6%C3%9Fe=1%202"]


def test_an_address_is_asked_for_as_it_is_written(server, client):
    server.routes["/100%/caf%c3%a9/../a.png"] = image(1)
    assert client.download(f"{server.url}/100%/caf%c3%a9/../a.png?q=50%&x=%41", LIMITS).data == samples.image_bytes(1)
    assert server.paths == ["/100%/caf%c3%a9/../a.png?q=50%&x=%41"]


def test_a_connection_that_skipped_the_checks_is_not_used(server, client, monkeypatch):
    """The hook that they hang on is none that urllib3 promises."""
    monkeypatch.setattr(http._Connection, "_new_conn", HTTPConnection._new_conn)
    error = failure(client, asked(server, image(0)))
    assert "without the checks of addresses" in error.message
    assert server.requests == []


PRIVATE = ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]")


@pytest.mark.parametrize("host", PRIVATE)
def test_no_spelling_of_a_private_address_is_connected_to_unless_it_is_allowed(server, make_client, host):
    address = f"http://{host}:{server.server_port}/a.png"
    server.routes["/a.png"] = image(0)
    error = failure(make_client(allow_private=False), address)
    assert (error.error_type, error.transient) == ("PrivateAddress", False)
    assert "web.allow_private = true" in error.message
    assert server.num_connections == 0


@pytest.fixture
def only_one_private(monkeypatch):
    """Takes 127.0.0.1 for the open internet, and 127.0.0.2 for a private network."""
    monkeypatch.setattr(http, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_into_a_private_network_is_refused(server, make_client, only_one_private, code):
    with web_server("127.0.0.2") as inner:
        error = failure(make_client(allow_private=False), asked(server, redirect(f"{inner.url}/secret.png", code)))
        assert error.error_type == "PrivateAddress"
        assert "127.0.0.2" in error.message
        assert (inner.num_connections, server.num_connections) == (0, 1)


def test_a_name_is_looked_up_once_and_its_checked_address_is_connected_to(
    server, make_client, only_one_private, monkeypatch
):
    """A second answer of a hostile DNS server (rebinding) is never asked for."""
    server.routes["/a.png"] = image(0)
    answers = ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
    lookups = []

    def look_up(host, port, **_):
        lookups.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[len(lookups) - 1], port))]

    monkeypatch.setattr(http.socket, "getaddrinfo", look_up)
    with web_server("127.0.0.2", server.server_port) as inner:
        client = make_client(allow_private=False)
        address = f"http://photos.example:{server.server_port}/a.png"
        assert client.download(address, LIMITS).data == PNG
        assert lookups == ["photos.example"]
        assert server.requests[0][2]["Host"] == f"photos.example:{server.server_port}"
        client.close()
        assert failure(client, address).error_type == "PrivateAddress"
        assert inner.num_connections == 0


def test_of_several_addresses_of_a_name_only_public_ones_are_tried(server, make_client, only_one_private, monkeypatch):
    server.routes["/a.png"] = image(0)
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, server.server_port)) for ip in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *_, **__: both)
    with web_server("127.0.0.2", server.server_port) as inner:
        client = make_client(allow_private=False)
        assert client.download(f"http://photos.example:{server.server_port}/a.png", LIMITS).data == PNG
        assert inner.num_connections == 0


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file:///etc/passwd", "neither http:// nor https://"),
        ("ftp://127.0.0.1/a.png", "neither http:// nor https://"),
        ("http://KEY:SECRET@127.0.0.1/a.png", "credentials never stand"),
        ("http://127.0.0.1:99999/a.png", "no valid host and port"),
        ("http://[::1/a.png", "no address"),
    ],
)
def test_a_redirect_to_what_no_table_may_name_is_refused(server, client, place, reason):
    error = failure(client, asked(server, redirect(place)))
    assert (error.error_type, error.transient) == ("BadAddress", False)
    assert "redirected to what is" in error.message
    assert reason in error.message
    assert "SECRET" not in error.message


def test_redirects_are_followed_as_often_as_allowed_and_no_more(server, make_client):
    for number in range(6):
        server.routes[f"/{number}"] = redirect(f"/{number + 1}" if number < 5 else "0")
    server.routes["/5"] = image(3)
    assert make_client(max_redirects=5).download(f"{server.url}/0", LIMITS).data == samples.image_bytes(3)
    assert server.num_connections == 1
    server.routes["/5"], server.requests[:] = redirect("/0"), []
    error = failure(make_client(max_redirects=5), f"{server.url}/0")
    assert (error.error_type, error.transient) == ("TooManyRedirects", False)
    assert "web.max_redirects = 5" in error.message
    assert len(server.requests) == 6


def test_a_redirect_may_be_written_in_utf_8(server, client):
    server.routes["/%C3%A9t%C3%A9.png"] = image(1)
    answer = "HTTP/1.1 302 Found\r\nLocation: /été.png\r\nContent-Length: 0\r\n\r\n".encode()
    assert client.download(asked(server, lambda handler: handler.write(answer)), LIMITS).data == samples.image_bytes(1)


def test_interim_answers_before_the_answer_are_passed_over(server, client):
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + hints + hints
    answer = interim + HEAD + b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG
    assert client.download(asked(server, lambda handler: handler.wfile.write(answer)), LIMITS).data == PNG
    assert client.download(asked(server, image(0)), LIMITS).data == PNG and server.num_connections == 1


SLOW = {
    "the status line": lambda handler: handler.drip(b"H"),
    "headers": lambda handler: (handler.write(HEAD + b"X: "), handler.drip(b"x")),
    "interim answers": lambda handler: handler.forever(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the body": lambda handler: (handler.write(HEAD + b"Content-Length: 99999\r\n\r\n" + PNG), handler.drip(b"\0")),
    "chunks": lambda handler: (
        handler.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        handler.drip(b"1\r\n\x89\r\n"),
    ),
    "trailers": lambda handler: (
        handler.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PNG) + PNG + b"\r\n0\r\n"),
        handler.drip(b"X: y\r\n"),
    ),
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_a_server_that_drips_wins_no_time(server, make_client, answer):
    """Each byte comes well within the idle limit; the time of the item as a whole ends it."""
    error = failure(make_client(timeout_s=0.5, idle_timeout_s=5), asked(server, answer))
    assert (error.error_type, error.transient) == ("Timeout", True)
    assert "no whole answer within web.timeout_s = 0.5" in error.message


def test_a_server_that_says_nothing_is_left_after_the_idle_time(server, make_client):
    def silent(handler):
        handler.server.is_closing.wait()

    error = failure(make_client(idle_timeout_s=0.2, max_tries=1), asked(server, silent))
    assert (error.error_type, error.transient) == ("Timeout", True)
    assert "web.idle_timeout_s = 0.2" in error.message


def test_a_reset_in_the_middle_is_tried_again(server, client):
    def reset(handler):
        handler.write(HEAD + b"Content-Length: 99999\r\n\r\n" + PNG)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        handler.connection.close()

    assert client.download(asked(server, in_turn(reset, image(0))), LIMITS).data == PNG
    assert len(server.requests) == 2


def test_a_kept_connection_that_the_server_has_closed_costs_no_try(server, make_client):
    def closes(handler):
        handler.send(PNG)
        handler.close_connection = True  # without a word in the headers

    client = make_client(max_tries=1)
    for _ in range(3):
        assert client.download(asked(server, closes), LIMITS).data == PNG


@pytest.mark.medium
def test_a_busy_host_is_asked_again_when_it_wants_to_be(server, client):
    address = asked(server, in_turn(status(429, Retry_After="1"), status(503, Retry_After="0"), image(0)))
    assert client.download(address, LIMITS).data == PNG
    assert len(server.requests) == 3


@pytest.mark.parametrize("after", ["3600", "Fri, 01 Jan 2100 00:00:00 GMT", "9" * 400])
def test_a_host_that_wants_to_be_left_alone_for_long_is(server, client, after):
    error = failure(client, asked(server, status(429, Retry_After=after)))
    assert (error.error_type, error.transient) == ("ServerBusy", True)
    assert "429 Too Many Requests and asks to wait" in error.message
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("code", "error_type", "transient", "num_requests"),
    [
        (404, "NotFound", False, 1),
        (410, "NotFound", False, 1),
        (401, "AccessDenied", False, 1),
        (403, "AccessDenied", False, 1),
        (418, "RequestRefused", False, 1),
        (204, "RequestRefused", False, 1),
        (304, "RequestRefused", False, 1),
        (999, "RequestRefused", False, 1),
        (500, "ServerError", True, 2),
        (503, "ServerBusy", True, 2),
        (408, "ServerError", True, 2),
    ],
)
def test_each_status_is_named_and_what_may_pass_is_tried_again(
    server, make_client, code, error_type, transient, num_requests
):
    error = failure(make_client(max_tries=2), asked(server, status(code)))
    assert (error.error_type, error.transient, len(server.requests)) == (error_type, transient, num_requests)
    assert str(code) in error.message


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"\0" * 100, HEAD + b"X: y\r\n" * 500 + b"\r\n", HEAD + b"X: " + b"y" * 100_000]
)
def test_what_is_no_http_is_a_reason(server, make_client, answer):
    error = failure(make_client(max_tries=1), asked(server, lambda handler: handler.write(answer)))
    assert error.error_type == "BadAnswer"


def test_a_host_gets_no_more_requests_at_once_than_allowed(server, make_client):
    addresses = server.add_images(8)
    server.routes = {path: slowly(answer, 0.05) for path, answer in server.routes.items()}
    client = make_client(parallel_per_host=2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda address: client.download(address, LIMITS).data, addresses))
    assert found == [samples.image_bytes(number) for number in range(8)]
    assert server.most_at_once == 2
    assert client._hosts._hosts == {}  # hosts in order are forgotten


def test_a_dead_host_is_left_alone_and_others_are_not(server, make_client, monkeypatch):
    monkeypatch.setattr(hosts, "MAX_FAILURES", 3)
    client = make_client(max_tries=1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/a.png"
    assert [failure(client, dead).error_type for _ in range(3)] == ["NetworkError"] * 3
    error = failure(client, dead)
    assert (error.error_type, error.transient) == ("HostFailing", True)
    assert client.download(asked(server, image(0)), LIMITS).data == PNG


def test_a_host_that_refuses_and_asks_to_wait_each_time_wins_no_time_of_further_items(server, make_client, monkeypatch):
    monkeypatch.setattr(hosts, "MAX_FAILURES", 3)
    monkeypatch.setattr(hosts, "REST_S", 0.01)
    client, address = make_client(timeout_s=0.4), asked(server, status(429, Retry_After="3600"))
    assert [failure(client, address).error_type for _ in range(3)] == ["ServerBusy"] * 3
    began_s = time.monotonic()
    assert {failure(client, address).error_type for _ in range(5)} == {"HostFailing"}
    assert time.monotonic() - began_s < 0.4
    assert len(server.requests) == 3


def test_no_more_hosts_are_remembered_than_a_bound(make_client, monkeypatch):
    monkeypatch.setattr(hosts, "MAX_HOSTS", 3)
    client = make_client(max_tries=1)
    for number in range(8):
        failure(client, f"http://127.0.0.{number + 2}:1/a.png")
    assert len(client._hosts._hosts) <= 3


def test_a_host_that_only_lacks_images_is_in_order(server, make_client, monkeypatch):
    monkeypatch.setattr(hosts, "MAX_FAILURES", 3)
    client = make_client()
    assert {failure(client, f"{server.url}/gone-{number}").error_type for number in range(6)} == {"NotFound"}
    assert server.num_connections == 1


def test_messages_hold_no_query_and_no_credentials(server, client):
    for address in (
        f"{server.url}/gone.png?X-Amz-Signature=SECRET&id=SECRET",
        "http://KEY:SECRET@127.0.0.1:1/a.png",
        "http://KEY:SEC/RET@127.0.0.1:1/a.png?sig=SECRET",
    ):
        error = failure(client, address)
        assert not [word for word in ("SECRET", "KEY", "RET") if word in error.message], error.message


def test_an_unknown_host_is_a_lasting_reason(client, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(http.socket, "getaddrinfo", unknown)
    error = failure(client, "http://no-such-host.invalid/a.png")
    assert (error.error_type, error.transient) == ("UnknownHost", False)


def test_a_stopped_download_ends_whatever_it_waits_for(server, client):
    begun, stop = threading.Event(), http.Stop()

    def silent(handler):
        begun.set()
        handler.server.is_closing.wait()

    address = asked(server, silent)
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(client.download, address, LIMITS, stop)
        begun.wait()
        stop.set()
        assert isinstance(download.exception(timeout=4), http.StoppedError)  # the idle time is 5 s
