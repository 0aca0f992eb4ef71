"""Bodies of answers: too large, too short, endless, compressed, or something else than an image."""

import gzip
import zlib

import pytest
import samples
from web_downloads import ENDLESS, HEAD, LIMITS, PNG, asked, failure
from web_server import image

from embedder.sources.web import body
from embedder.sources.web.body import SizeLimits


def test_a_large_download_is_a_temporary_file_that_goes_when_it_is_left(server, client, downloads, monkeypatch):
    monkeypatch.setattr(body, "HELD_BYTES", 5000)
    large = PNG + bytes(100_000)
    with client.download(asked(server, lambda handler: handler.send(large)), LIMITS) as fetched:
        assert (fetched.data, fetched.path.read_bytes(), fetched.size_bytes) == (None, large, len(large))
        assert list(downloads.iterdir()) == [fetched.path]
    assert list(downloads.iterdir()) == []


def test_an_endless_body_is_cut_at_the_limit_of_its_kind_and_leaves_nothing(server, client, downloads, monkeypatch):
    monkeypatch.setattr(body, "HELD_BYTES", 100_000)

    def endless(handler):
        handler.write(HEAD + b"\r\n" + ENDLESS)
        handler.forever(bytes(65_536))

    error = failure(client, asked(server, endless))
    assert (error.error_type, error.transient) == ("TooLarge", False)
    assert "decode.max_file_bytes" in error.message
    assert list(downloads.iterdir()) == []


def test_a_video_has_the_limit_of_videos(server, client, tmp_path):
    clip = samples.clip(tmp_path / "a.mp4").read_bytes()
    address = asked(server, lambda handler: handler.send(clip), "/a.mp4")
    assert client.download(address, SizeLimits(10, len(clip))).data == clip
    error = failure(client, address, SizeLimits(len(clip), len(clip) - 1))
    assert (error.error_type, f"decode.max_video_bytes allows {len(clip) - 1:,}" in error.message) == ("TooLarge", True)


def test_what_is_announced_as_too_large_is_not_received(server, client):
    def announced(handler):
        handler.write(HEAD + b"Content-Length: 1500000\r\n\r\n" + ENDLESS[: body.HEAD_BYTES])
        handler.server.is_closing.wait()

    error = failure(client, asked(server, announced))
    assert error.error_type == "TooLarge"
    assert "image of 1,500,000 bytes; decode.max_file_bytes allows 1,048,576" in error.message


def test_fewer_bytes_than_announced_are_no_image(server, make_client):
    answer = HEAD + b"Content-Length: 99999\r\n\r\n" + PNG
    error = failure(make_client(max_tries=2), asked(server, lambda handler: handler.write(answer)))
    assert (error.error_type, error.transient) == ("Truncated", True)
    assert "after 2 tries" in error.message
    assert len(server.requests) == 2


def test_more_bytes_than_announced_never_become_the_next_answer(server, client):
    smuggled = HEAD + b"Content-Length: 8\r\n\r\nsmuggled"

    def longer(handler):
        handler.wfile.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG + smuggled)

    assert client.download(asked(server, longer), LIMITS).data == PNG
    server.routes["/b.png"] = image(1)
    assert client.download(f"{server.url}/b.png", LIMITS).data == samples.image_bytes(1)


def test_compressed_answers_are_read_though_not_asked_for(server, client):
    server.routes["/gzip"] = lambda handler: handler.send(gzip.compress(PNG), Content_Encoding="gzip")
    server.routes["/deflate"] = lambda handler: handler.send(zlib.compress(PNG), Content_Encoding="deflate")
    assert client.download(f"{server.url}/gzip", LIMITS).data == PNG
    assert client.download(f"{server.url}/deflate", LIMITS).data == PNG


def test_a_compressed_bomb_is_cut_at_the_limit(server, client, downloads):
    bomb = gzip.compress(ENDLESS + bytes(64 << 20))
    assert len(bomb) < LIMITS.image_bytes  # small as it comes
    error = failure(client, asked(server, lambda handler: handler.send(bomb, Content_Encoding="gzip")))
    assert error.error_type == "TooLarge"
    assert list(downloads.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "encoding", "error_type"),
    [
        (PNG, "br", "BadEncoding"),
        (PNG, "gzip, gzip", "BadEncoding"),
        (PNG, "gzip", "BadEncoding"),
        (gzip.compress(PNG)[:-20], "gzip", "Truncated"),
    ],
)
def test_an_encoding_that_is_unknown_or_a_lie_is_a_reason(server, make_client, content, encoding, error_type):
    address = asked(server, lambda handler: handler.send(content, Content_Encoding=encoding))
    assert failure(make_client(max_tries=1), address).error_type == error_type


def test_an_endless_page_behind_an_error_is_not_received(server, client):
    def endless(handler):
        handler.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        handler.forever(bytes(65_536))

    assert failure(client, asked(server, endless)).error_type == "NotFound"


def test_a_web_page_called_an_image_is_named_and_not_received(server, client):
    def page(handler):
        handler.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\n\r\n<!DOCTYPE html><title>Not found</title>")
        handler.forever(b"<p>more</p>" * 1000)

    error = failure(client, asked(server, page, "/a.jpg"))
    assert (error.error_type, error.transient) == ("NotMedia", False)
    assert "a web page (image/jpeg)" in error.message


def test_other_answers_that_are_no_media_say_what_they_are(server, client):
    def json_answer(handler):
        handler.send(b'{"error": "no such image"}', Content_Type="application/json\x1b[31m")

    error = failure(client, asked(server, json_answer))
    assert "neither an image nor a video (application/json\\x1b[31m)" in error.message
    assert "the answer is empty" in failure(client, asked(server, lambda handler: handler.send(b""))).message


def test_an_endless_page_behind_an_error_that_gives_its_length_twice_is_not_received(server, make_client):
    def endless(handler):
        handler.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 10, 10\r\n\r\n")
        handler.forever(bytes(65_536))

    assert failure(make_client(max_tries=1, timeout_s=0.5), asked(server, endless)).error_type == "NotFound"


@pytest.mark.parametrize("size", [b"-1", b"-5"])
def test_a_chunk_of_negative_size_is_not_received(server, make_client, size):
    def endless(handler):
        handler.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + PNG)
        handler.forever(bytes(65_536))

    error = failure(make_client(max_tries=1, timeout_s=0.5), asked(server, endless))
    assert (error.error_type, error.transient) == ("Truncated", True)
