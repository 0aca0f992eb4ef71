"""Bad input to a running server: the right status, one line with where, what, rule and cure; nothing else suffers."""

import base64
import json
import threading

import pytest
import samples
from sandbox_checks import png_bomb
from served import form
from small_server import RawConnection

from embedder.errors import ConfigError
from embedder.plugins.serve.api_schema import MAX_QUERIES
from embedder.retrieval.store_api import Store

NAN = "NaN"
IMAGE = "pictures/0000.png"
TEXT = {"text": "a car"}


@pytest.fixture(autouse=True)
def _nothing_else_suffers(server):
    """After each test the server answers as before."""
    yield
    assert server.get("/readyz").status == 200
    assert server.search(TEXT, k=1).status == 200


def refused(answer, status, where):
    """Error of an answer, checked for its shape."""
    assert answer.status == status, (answer.status, answer.body[:500])
    assert set(answer.json) == {"error"}
    error = answer.error
    assert error["where"].startswith(where), error
    assert set(error) == {"where", "what", "rule", "cure"}
    assert all(text and text.isprintable() and len(text) < 1000 for text in error.values()), error
    assert "Traceback" not in str(error)
    return error


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b'{"queries": [', b"nonsense", b"\xff\xfe", b'{"queries": [{"text": "\xff"}]}', b"[" * 100_000),
        *(b'{"queries": [{"text": "a"}],}', b"'", b'{"queries": ' + b"[" * 500 + b"]" * 500 + b"}{", b"\x00" * 10),
    ],
)
@pytest.mark.parametrize("path", ["/search", "/embed"])
def test_malformed_json(server, path, body):
    refused(server.post(path, body), 400, "body")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ([], "body"),
        ("text", "body"),
        (None, "body"),
        ({}, "body.queries"),
        ({"queries": []}, "body.queries"),
        ({"queries": TEXT}, "body.queries"),
        ({"queries": ["a car"]}, "body.queries.0"),
        ({"queries": [{}]}, "body.queries.0"),
        ({"queries": [{"text": "a", "vector": [1.0]}]}, "body.queries.0"),
        ({"queries": [{"text": 1}]}, "body.queries.0.text"),
        ({"queries": [{"text": ["a"]}]}, "body.queries.0.text"),
        ({"queries": [{"words": "a"}]}, "body.queries.0"),
        ({"queries": [{"item": {"$ne": 1}}]}, "body.queries.0.item"),
        ({"queries": [{"item": "a", "segment": -1}]}, "body.queries.0.segment"),
        ({"queries": [{"item": "a", "segment": 1 << 70}]}, "body.queries.0.segment"),
        *[({"queries": [TEXT], "k": k}, "body.k") for k in (0, -1, 1001, 1.5, "many", None, 1 << 70)],
        *[({"queries": [TEXT], "fold": fold}, "body.fold") for fold in (0, 1.01, "x")],
        ({"queries": [TEXT], "min_score": 2}, "body.min_score"),
        ({"queries": [TEXT], "where": 1}, "body.where"),
        ({"queries": [TEXT], "where": "x" * 100_000}, "body.where"),
        ({"queries": [TEXT], "hybrid": "perhaps"}, "body.hybrid"),
        ({"queries": [{"vector": [1.0]}], "hybrid": True}, "body.queries.0"),
        ({"queries": [TEXT], "cursor": "made up"}, "body.cursor"),
        ({"queries": [TEXT], "cursor": 7}, "body.cursor"),
        ({"queries": [TEXT], "surprise": 1}, "body.surprise"),
        ({"queries": [TEXT] * (MAX_QUERIES + 1)}, "body.queries"),
    ],
)
def test_wrong_types_and_values(server, body, where):
    refused(server.post("/search", body), 422, where)


def test_a_version_that_is_none(server):
    for version in ("nothing", "../..", "' OR 1=1 --", "a\x00b"):
        refused(server.search(TEXT, version=version), 404, "version")


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "", "application/x-www-form-urlencoded", "\xff"])
def test_a_body_of_another_type(server, kind):
    refused(server.post("/search", b"<a/>", kind=kind), 415, "header.Content-Type")


def test_vectors_of_another_length_or_without_a_number(server):
    dim = server.get("/status").json["dim"]
    for vector in ([1.0], [1.0] * (dim + 1), [0.0] * dim, [1e300] * dim):
        refused(server.search({"vector": vector}), 422, "body.queries.0.vector")
    for value in (NAN, "Infinity", "-Infinity", '"x"', "null", "[1]"):
        body = f'{{"queries": [{{"vector": [{value}{",0.1" * (dim - 1)}]}}]}}'
        answer = server.post("/search", body.encode())
        refused(answer, answer.status, "body")
        assert answer.status in (400, 422)
    refused(server.search({"vector": []}), 422, "body.queries.0.vector")
    refused(server.search({"vector": [0.5] * 100_000}), 422, "body.queries.0.vector")


@pytest.mark.parametrize("text", ["", " ", "\t\n ", "\u2003"])
def test_empty_texts(server, text):
    refused(server.search({"text": text}), 422, "body.queries.0.text")
    refused(server.post("/embed", {"texts": [text]}), 422, "body.texts.0")
    refused(server.post("/embed", {"texts": ["a"], "images": []}), 422, "body")


def test_ten_thousand_texts_and_a_text_of_a_megabyte(server):
    refused(server.search(*[TEXT] * 10_000), 422, "body.queries")
    refused(server.post("/embed", {"texts": ["a"] * 10_000}), 422, "body.texts")
    refused(server.search({"text": "x" * (1 << 20)}), 422, "body.queries.0.text")
    refused(server.post("/embed", {"texts": ["x" * (1 << 20)]}), 422, "body.texts.0")


def test_a_million_unknown_keys_are_not_read(server):
    body = b"{" + b",".join(b'"k%d":1' % number for number in range(1_000_000)) + b"}"
    for path in ("/search", "/embed"):
        assert "1,000,000 colons" in refused(server.post(path, body), 422, "body")["what"]


def test_texts_of_all_characters_are_searched(server):
    hostile = "\x00", "a\x00b", "\u202egnp", "x" * 10_000, "🧑🏽‍🚀" * 1000, "'; DROP TABLE --", "\ud7ff\ue000"
    for text in hostile:
        assert server.search({"text": text}, k=1).status == 200, text
    body = b'{"queries": [{"text": "a lone \\ud800 surrogate"}]}'
    answer = server.post("/search", body)
    assert answer.status in (200, 400, 422)
    assert "Traceback" not in str(answer.json)


@pytest.mark.parametrize(
    "item_id",
    [
        *("../" * 8 + "etc/passwd", "/etc/passwd", "..", ".", "a/../b", "a'b\"c", "\\..\\x", "%2e%2e%2f", "\r\nX: y"),
        *("nothing.png", "a/image", "../in/pictures/0000.png", "\x00", "\x1b[31m", "\u202e", "x" * 8000, "絵" * 2000),
        *("file:///etc/passwd", "http://127.0.0.1:1/x", "s3://b/k", "*", "?#"),
    ],
)
def test_ids_that_are_none(server, item_id):
    for rest in ("", "/image?size=320", "/clip"):
        refused(server.item(item_id, rest), 404, "item")
    refused(server.search({"item": item_id}), 404, "item")


def test_paths_that_leave_the_page_or_hold_raw_dots(server):
    port = int(server.url.rpartition(":")[2])
    for path in (
        *("/page/../../../etc/passwd", "/page/%2e%2e/%2e%2e/settings.py", "/page/..%2f..%2fsettings.py"),
        *("/page//etc/x", "/../etc/passwd", "/items/../../etc/passwd", "/items/%00/image", "/items//image", "/items/"),
        *("/items/%", "/page/%00", "/page/" + "a" * 5000, "//evil.example/x", "/docs/../../x"),
    ):
        with RawConnection(port) as raw:
            raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, body = raw.read_all().partition(b"\r\n\r\n")
        assert head.split()[1] in (b"404", b"422", b"400"), (path, head)
        assert set(json.loads(body)["error"]) == {"where", "what", "rule", "cure"}, path
        assert b"root:" not in body


@pytest.mark.parametrize("size", [0, 1, 161, 9999999, -320, "big", "", "320.5", "320%00"])
def test_sizes_that_are_not_offered(server, size):
    error = refused(server.item(IMAGE, f"/image?size={size}"), 422, "query.size")
    assert "640" in error["rule"]


@pytest.mark.parametrize("query", ["segment=-1", "segment=x", "segment=99999999999999999999", "neighbours=101"])
def test_parameters_out_of_range(server, query):
    refused(server.item(IMAGE, f"?{query}"), 422, "query.")


def test_a_segment_that_the_item_lacks(server):
    refused(server.item(IMAGE, "/image?segment=9"), 404, "query.segment")


UPLOADS = {
    "no bytes": lambda: b"",
    "a text": lambda: b"hello, I am no image",
    "markup": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "a page": lambda: b"<!doctype html><script>alert(1)</script>",
    "an archive": lambda: b"PK\x03\x04" + bytes(100),
    "a program": lambda: b"\x7fELF" + bytes(1000),
    "only a head": lambda: samples.image_bytes(0)[:60],
    "a truncated file": lambda: samples.image_bytes(0)[: len(samples.image_bytes(0)) // 2],
    "a bomb": lambda: png_bomb(12_000, 12_000),
    "a pickle": lambda: b"\x80\x04\x95" + bytes(64),
    "zeros": lambda: bytes(1 << 20),
}
"""Content that is no image, by name; all must be refused."""


@pytest.mark.parametrize("name", UPLOADS)
def test_uploads_that_are_no_images(server, name):
    content = UPLOADS[name]()
    answer = server.search({"image": base64.b64encode(content).decode()})
    refused(answer, 422, "")
    if content:
        refused(server.post("/embed", {"images": [{"image": base64.b64encode(content).decode()}]}), 422, "")
    refused(server.post("/search", *form({"queries": [{"upload": "f"}]}, f=content)), 422, "")


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data", b"--x--", 400),
        ("multipart/form-data; boundary=x", b"", 422),
        ("multipart/form-data; boundary=x", b"no form at all", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--\r\n", 400),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 100_000, 400),
    ],
)
def test_forms_that_are_none(server, kind, body, status):
    answer = server.post("/search", body, kind=kind)
    assert answer.status in (status, 400, 422), answer.body
    refused(answer, answer.status, "body")


def test_forms_without_their_request_or_their_file(server):
    body, kind = form({"queries": [{"upload": "missing"}]})
    refused(server.post("/search", body, kind), 422, "body.queries.0.upload")
    refused(server.post("/search", body.replace(b'"request"', b'"other"'), kind), 422, "body")
    body, kind = form({"queries": [TEXT]}, **{f"f{number}": b"x" for number in range(200)})
    refused(server.post("/search", body, kind), 400, "body")


@pytest.mark.parametrize("image", ["%%%", "a", "a b c d", "data:image/png;base64,AAAA", "\u00e9"])
def test_images_that_are_no_base64(server, image):
    refused(server.search({"image": image}), 422, "body.queries.0.image")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "POST"])
def test_methods_that_do_not_exist(server, method):
    refused(server.get("/status", method=method), 405, "request")


@pytest.mark.slow
def test_a_hundred_bad_requests_at_once_fail_no_good_one(server):
    wrong, threads = [], []

    def bad():
        for _ in range(10):
            server.search({"image": base64.b64encode(png_bomb(9000, 9000)).decode()})
            server.search(*[{"text": "y"}] * 10_000)

    def good():
        for _ in range(10):
            answer = server.search(TEXT, k=3)
            if answer.status != 200 or len(answer.json["answers"][0]["hits"]) != 3:
                wrong.append(answer.body)

    for task in (bad, bad, good, good):
        threads.append(threading.Thread(target=task))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_that_takes_no_texts_is_told_without_its_place(server, monkeypatch):
    place = server.store.info.model

    def refuse(*_):
        raise ConfigError(f"model {place}: it has no text tower; give an image")

    monkeypatch.setattr(Store, "encode_text", refuse)
    answer = server.search({"text": "what nobody has asked yet"})
    refused(answer, 422, "query")
    assert answer.error["what"] == "model of the store: it has no text tower"
    assert place not in answer.body.decode()
