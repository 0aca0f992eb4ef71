"""Addresses of the web: what is one, how it is asked for, and how it stands where people read it."""

import pytest

from embedder.storage.web_address import WebAddressError, is_web, parse_address, public_name, shown_address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://Photos.Example/a.jpg", "https://photos.example/a.jpg"),
        ("HTTP://h:80", "http://h/"),
        ("http://h.:8080/a b?q=ü#part", "http://h:8080/a%20b?q=%C3%BC"),
        ("https://bücher.example/é%20.jpg", "https://xn--bcher-kva.example/%C3%A9%20.jpg"),
        ("http://[2606:4700::1]:81/a", "http://[2606:4700::1]:81/a"),
        ("http://h/a@b:c/../d", "http://h/a@b:c/../d"),
    ],
)
def test_an_address_is_written_as_servers_read_it(text, url):
    assert is_web(text)
    assert parse_address(text).url == url
    assert parse_address(url).url == url


@pytest.mark.parametrize(
    "text",
    [
        "http://", "http:///a", "http://h:0/", "http://h:99999/", "http://h:x/", "http://[::1", "http://u@h/",
        "https://KEY:SECRET@h/", "https://KEY:SEC/RET@h/", "http://h\\@evil/", "http://a b/", "http://h/\r\nX: y",
        "http://h/\0", "http://h/\x7f", "http://[fe80::1%25eth0]/", "http://h%00.evil/", "http://" + "a" * 64 + "/",
        "http://h/" + "a" * 9000, "http://h/\ud800",
    ],
)  # fmt: skip
def test_what_could_mislead_or_hold_a_secret_is_refused_and_not_quoted(text):
    with pytest.raises(WebAddressError) as caught:
        parse_address(text)
    assert "SEC" not in str(caught.value)


@pytest.mark.parametrize("text", ["a.jpg", "/http://h/a", "file:///a", "s3://b/http://", "ftp://h/a", "httpx://h", ""])
def test_other_references_are_no_addresses(text):
    assert not is_web(text)
    assert public_name(text) == text


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("https://h/a.jpg?id=5", "https://h/a.jpg?id=5"),
        ("https://h/a.jpg?key=photos/1.jpg", "https://h/a.jpg?key=photos/1.jpg"),
        ("https://b.s3.amazonaws.com/a.jpg?X-Amz-Date=1&X-Amz-Signature=SECRET", "https://b.s3.amazonaws.com/a.jpg"),
        (
            "https://storage.googleapis.com/b/a.jpg?X-Goog-Signature=SECRET&x=1",
            "https://storage.googleapis.com/b/a.jpg",
        ),
        ("https://acc.blob.core.windows.net/c/a.jpg?sv=1&sig=SECRET", "https://acc.blob.core.windows.net/c/a.jpg"),
        ("https://d.cloudfront.net/a.jpg?Expires=1&Signature=SECRET&Key-Pair-Id=K", "https://d.cloudfront.net/a.jpg"),
        ("https://h/o/a.jpg?alt=media&token=SECRET&x=1", "https://h/o/a.jpg?alt=media&token=***&x=1"),
        ("https://KEY:SECRET@h/a.jpg?x=1", "https://***@h/a.jpg"),
        ("https://KEY:SEC/RET@h/a.jpg", "https://***@h/a.jpg"),
        ("s3://KEY:SECRET@b/a.jpg", "s3://***@b/a.jpg"),
        ("s3://b/a@b.jpg", "s3://b/a@b.jpg"),
    ],
)
def test_an_id_holds_no_secret_and_stays_when_it_is_signed_anew(reference, name):
    assert public_name(reference) == name


def test_a_message_shows_no_query_no_credentials_and_no_control_characters():
    assert shown_address("https://KEY:SECRET@h/a.jpg?sig=SECRET") == "https://***@h/a.jpg"
    assert shown_address("https://h/a\x1b[31m.jpg") == "https://h/a\\x1b[31m.jpg"
    assert len(shown_address("https://h/" + "a" * 5000)) == 200
