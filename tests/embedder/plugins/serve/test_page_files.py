"""The page's files are sent compressed, and again only when they have changed."""

import gzip
from pathlib import Path

import pytest

import embedder

FOLDER = Path(embedder.__file__).parent / "plugins" / "serve" / "page"
GZIP = {"Accept_Encoding": "deflate, gzip"}


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/styles.css"])
def test_text_is_compressed_for_those_who_take_it(server, path):
    plain, packed = server.get(path), server.get(path, **GZIP)
    assert plain.body == (FOLDER / (Path(path).name or "index.html")).read_bytes()
    assert (plain.headers["Content-Encoding"], packed.headers["Content-Encoding"]) == (None, "gzip")
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2
    assert plain.headers["Content-Type"] == packed.headers["Content-Type"]
    assert {each.headers["Vary"] for each in (plain, packed)} == {"Accept-Encoding"}


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/icon.svg"])
@pytest.mark.parametrize("accepted", [{}, GZIP])
def test_what_the_browser_has_is_not_sent_again(server, path, accepted):
    first = server.get(path, **accepted)
    assert (first.status, first.headers["Cache-Control"]) == (200, "no-cache")
    etag = first.headers["ETag"]
    for known in (etag, f'"other", W/{etag}'):
        again = server.get(path, If_None_Match=known, **accepted)
        assert (again.status, again.body, again.headers["ETag"]) == (304, b"", etag)
    assert server.get(path, If_None_Match='"other"', **accepted).body == first.body


def test_a_compressed_form_is_not_taken_for_the_file(server):
    etag = server.get("/", **GZIP).headers["ETag"]
    assert server.get("/", If_None_Match=etag).status == 200


@pytest.mark.parametrize("path", ["/page/icon.svg", "/page/theme.js"])
def test_small_files_are_sent_as_they_are(server, path):
    answer = server.get(path, **GZIP)
    assert answer.headers["Content-Encoding"] is None
    assert answer.body == (FOLDER / Path(path).name).read_bytes()


def test_a_head_has_no_body_and_searches_are_not_compressed(server):
    head = server.get("/", method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["Content-Length"]) == len((FOLDER / "index.html").read_bytes())
    found = server.post("/search", {"queries": [{"text": "a red car"}], "k": 20}, **GZIP)
    assert (found.status, found.headers["Content-Encoding"]) == (200, None)
    assert len(found.body) > 1024


@pytest.mark.parametrize("path", ["/page/none.js", "/page/", "/page"])
def test_a_file_that_is_not_there_is_refused_in_the_shape_of_errors(server, path):
    answer = server.get(path)
    assert (answer.status, answer.error["where"]) == (404, "request")


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip;q=0", None),
        ("identity, GZIP; q=0.000", None),
        ("not-gzip", None),
        ("gzip;q=0.5", "gzip"),
        ("deflate, GZip", "gzip"),
    ],
)
def test_gzip_is_sent_to_those_who_name_it_with_a_weight(server, accepted, encoding):
    assert server.get("/", Accept_Encoding=accepted).headers["Content-Encoding"] == encoding
