"""What a running server never does: open a client's address, show secrets or what was purged; and who harms whom."""

import http.client
import json
import logging
import shutil
import socket
import threading
import time
from urllib.parse import quote

import pytest
import samples
from bucket_server import KEY, SECRET, bucket_on, running_server
from running_server import running
from served import FOLLOW_S, Served
from store_samples import row
from store_states import new_store, no_index, publish_refresh
from test_publications import wait_for

from embedder.plugins.maintain.purge.purge import purge
from embedder.sources.uris import split_uri
from embedder.storage import object_stores
from embedder.store.layout import read_current

MARKUP = "</figcaption><script>alert('x')</script>\"'&\x1b[31m{{1}}"
QUERY = {"vector": [1.0, 0.0]}
TOKEN = "canary-token-0123456789abcdef"


@pytest.fixture
def files(tmp_path):
    """A store of two images, one with a caption of markup."""
    files = new_store(tmp_path / "store")
    for number, name in enumerate(("a.png", "b.png")):
        (tmp_path / name).write_bytes(samples.image_bytes(number))
    rows = [row(name, uri=str(tmp_path / name), caption=MARKUP) for name in ("a.png", "b.png")]
    publish_refresh(files, *rows)
    return files


@pytest.fixture
def live(files, tmp_path):
    with running(files.address, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        yield Served(url, None, tmp_path)


@pytest.fixture
def canary():
    """Address of a server that nobody may call, and the list of who did."""
    calls = []
    listening = socket.create_server(("127.0.0.1", 0))

    def accept():
        try:
            while True:
                connection, _ = listening.accept()
                calls.append(connection.getpeername())
                connection.close()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/secret.png", calls
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def test_no_address_of_a_client_is_opened(live, canary, tmp_path):
    (tmp_path / "outside.png").write_bytes(samples.image_bytes(7))
    url, calls = canary
    for address in (url, str(tmp_path / "outside.png"), f"file://{tmp_path}/outside.png", f"{tmp_path}/a.png"):
        for body in (
            *({"item": address}, {"image": address}, {"upload": address}, {"uri": address}, {"url": address}),
            {"image": {"url": address}},
        ):
            assert live.search(body).status in (404, 422), body
        for rest in ("", "/image", "/clip", f"/image?uri={quote(address)}"):
            answer = live.item(address, rest)
            assert answer.status == 404, address
        assert live.post("/embed", {"images": [{"image": address}]}).status == 422
        assert (
            live.item("a.png", f"/image?url={quote(address)}&src={quote(address)}").body
            == live.item("a.png", "/image").body
        )
        assert live.search(QUERY, version=address).status == 404
        assert live.search(QUERY, where=f"caption = '{address}'").status == 200, "a text to compare with, no more"
    assert live.get("/status", X_Forwarded_Host="evil", Referer=url).status == 200
    assert calls == []


def test_a_caption_with_markup_stays_a_text(live):
    answer = live.search(QUERY)
    assert {hit["caption"] for hit in answer.json["answers"][0]["hits"]} == {MARKUP}
    assert live.item("a.png").json["segments"][0]["caption"] == MARKUP
    facets = {column["name"]: column for column in live.get("/facets").json["columns"]}
    assert facets["caption"]["values"] == [{"value": MARKUP, "count": 2}]
    for each in (answer, live.item("a.png"), live.get("/facets"), live.item("<script>alert(1)</script>")):
        assert each.headers["Content-Type"].startswith("application/json")
        assert each.headers["X-Content-Type-Options"] == "nosniff"
        assert "'unsafe" not in each.headers["Content-Security-Policy"]


def test_where_files_lie_is_told_to_nobody(live, tmp_path):
    (tmp_path / "a.png").write_bytes(b"broken meanwhile")
    (tmp_path / "b.png").unlink()
    for path in (
        "/items/a.png",
        "/items/a.png/image",
        "/items/b.png/image",
        "/items/a.png/clip",
        "/facets",
        "/metrics",
    ):
        assert str(tmp_path / "a.png") not in live.get(path).body.decode(), path
        assert str(tmp_path / "b.png") not in live.get(path).body.decode(), path
    assert str(tmp_path / "a.png") not in live.search(QUERY).body.decode()


@pytest.mark.medium
def test_what_is_purged_is_gone_from_answers_caches_and_thumbnails(live, files, tmp_path):
    first = read_current(files).run_id
    image = live.item("a.png", "/image?size=160")
    assert live.search(QUERY, where="item_id = 'a.png'").json["answers"][0]["hits"]
    assert live.search({"item": "a.png"}).status == 200
    cursor = live.search(QUERY, k=1).json["answers"][0]["cursor"]
    publish_refresh(files, row("c.png", uri=str(tmp_path / "b.png")))
    wait_for(live, files)
    live.search(QUERY, version=first)
    assert live.item("a.png", f"/image?size=160&version={first}").body == image.body
    purge(files, ["a.png"], no_index)
    wait_for(live, files)
    for rest in ("", "/image", "/image?size=160", "/clip", f"?version={first}", f"/image?size=160&version={first}"):
        answer = live.get(f"/items/a.png{rest}", If_None_Match=image.headers["ETag"])
        assert answer.status in (404, 410), rest
        assert "a.png" not in answer.body.decode().replace("'a.png'", "").replace("item a.png", "")
    for options in ({}, {"version": first}, {"cursor": cursor, "k": 1}, {"where": "item_id = 'a.png'"}):
        answer = live.search(QUERY, **options)
        assert answer.status in (200, 410), (options, answer.body)
        for page in answer.json.get("answers", ()):
            assert "a.png" not in [hit["item_id"] for hit in page["hits"]], options
    assert live.search({"item": "a.png"}).status == 404
    assert MARKUP not in str(live.get("/facets?where=item_id='a.png'").body)
    for _ in range(500):
        kept = {path.read_bytes() for path in (tmp_path / "cache").rglob("*.webp")}
        if image.body not in kept:
            return
        time.sleep(0.01)
    raise AssertionError("its thumbnail is still on disk")


@pytest.mark.medium
def test_a_store_that_goes_away_harms_no_search_and_is_served_again(live, files, tmp_path):
    before = live.search(QUERY).json["answers"]
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    time.sleep(10 * FOLLOW_S)
    assert live.search(QUERY).json["answers"] == before
    assert live.item("a.png", "/image").status == 200
    for path in ("/versions", "/status", f"/facets?version={'0' * 8}"):
        assert live.get(path).status in (200, 404, 410, 503), path
    shutil.move(tmp_path / "elsewhere", tmp_path / "store")
    publish_refresh(files, row("c.png", uri=str(tmp_path / "b.png")))
    wait_for(live, files)
    assert len(live.search(QUERY).json["answers"][0]["hits"]) == 3


@pytest.mark.slow
def test_a_bucket_that_goes_away_is_told_without_its_credentials(monkeypatch, tmp_path, caplog):
    with running_server() as (url, process):
        bucket = bucket_on(url, monkeypatch)
        address = next(bucket)
        files = new_store(f"{address}/store")
        object_stores.bucket_store(split_uri(address)[0]).put("a.png", samples.image_bytes(0))
        publish_refresh(files, row("a.png", uri=f"{address}/a.png"), row("b.png", uri=f"{address}/b.png"))
        options = {"follow_s": FOLLOW_S, "cache_dir": tmp_path / "cache"}
        with caplog.at_level(logging.DEBUG, "embedder"), running(files.address, **options) as server:
            live = Served(server, None, tmp_path)
            assert live.item("a.png", "/image?size=160").status == 200
            process.kill()
            process.wait()
            answers = [live.search(QUERY), live.item("a.png", "/image?size=160")]
            assert [answer.status for answer in answers] == [200] * 2
            gone = [live.item("b.png", "/image"), live.get("/versions"), live.search(QUERY, version="another")]
            for answer in gone:
                assert answer.status == 503, answer.body
                assert set(answer.error) == {"where", "what", "rule", "cure"}
                assert int(answer.headers["Retry-After"]) > 0
            said = caplog.text + "".join(str(answer.body) for answer in [*answers, *gone])
            assert KEY not in said
            assert SECRET not in said
        next(bucket, None)


@pytest.mark.medium
def test_logs_hold_no_tokens_queries_or_conditions(files, tmp_path, caplog):
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    with (
        caplog.at_level(logging.DEBUG),
        running(files.address, token_file=token_file, cache_dir=tmp_path / "cache") as url,
    ):
        live = Served(url, None, tmp_path, {"Authorization": f"Bearer {TOKEN}"})
        cookie = live.post("/session", b"").headers["Set-Cookie"].partition(";")[0]
        assert live.search({"item": "a.png"}, where="caption = 'private-words'").status == 200
        assert live.get("/facets?where=caption='private-words'").status == 200
        live.search({"text": "private-words"})
        assert live.get(f"/items/a.png/image?token={TOKEN}", Cookie=cookie).status == 200
        live.headers = {}
        assert live.get("/status", Authorization=f"Bearer {TOKEN}x").status == 401
        assert live.get("/status", Cookie=cookie).status == 401
    assert '"path": "/items/a.png/image"' in caplog.text, "the access log is written"
    for secret in (TOKEN, cookie.partition("=")[2], "private-words"):
        assert secret not in caplog.text


def test_a_request_that_is_being_answered_when_the_server_ends_gets_its_answer(server, tmp_path):
    with running(server.config.store, cache_dir=tmp_path, where_timeout_s=20.0) as url:
        host = url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        body = json.dumps({"queries": [{"text": f"text {number}"} for number in range(64)], "k": 5})
        connection.request("POST", "/search", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert len(json.loads(answer.read())["answers"]) == 64
    connection.close()
