"""Each request is answered by one publication; what leaves the store is gone from caches."""

import errno
import shutil
import threading
import time
from pathlib import Path

import pytest
import samples
from running_server import running
from served import FOLLOW_S, Served, make_store
from store_samples import row
from store_states import build_store_index, new_store, publish_refresh

from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.snapshot import Snapshot
from embedder.retrieval.store_api import Store
from embedder.store.layout import read_current
from embedder.store.store_errors import StoreRefusedError
from index.index_errors import RetrievalError
from shards.model_errors import ModelError

QUERY = {"vector": [1.0, 0.0]}


@pytest.fixture
def files(tmp_path):
    """A store of two images that exist."""
    files = new_store(tmp_path / "store")
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(samples.image_bytes(len(name)))
    publish_refresh(files, *(image(tmp_path, name, caption="old") for name in ("a.png", "b.png")))
    return files


@pytest.fixture
def live(files, tmp_path):
    """A server of a store whose model is gone: vectors still find."""
    with running(files.address, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        yield Served(url, None, tmp_path)


def image(folder, name, **changes):
    return row(name, uri=str(folder / name), **changes)


def wait_for(live, files):
    """Wait until the server serves what is published."""
    run_id = read_current(files).run_id
    for _ in range(1000):
        if live.get("/status").json["publication"] == run_id:
            return run_id
        time.sleep(0.02)
    raise AssertionError(f"the server does not serve {run_id}")


def captions(answer):
    return {hit["item_id"]: hit["caption"] for hit in answer.json["answers"][0]["hits"]}


def test_a_later_publication_answers_and_an_earlier_one_on_request(live, files, tmp_path):
    first = live.search(QUERY).json
    assert captions(live.search(QUERY)) == {"a.png": "old", "b.png": "old"}
    publish_refresh(files, image(tmp_path, "a.png", caption="new", modified="t1"))
    second = wait_for(live, files)
    assert captions(live.search(QUERY)) == {"a.png": "new", "b.png": "old"}, "what was remembered is forgotten"
    for version in (first["version"], first["publication"]):
        earlier = live.search(QUERY, version=version)
        assert earlier.json["version"] == first["version"]
        assert captions(earlier) == {"a.png": "old", "b.png": "old"}
        links = earlier.json["answers"][0]["hits"][0]["links"]
        assert all(first["publication"] in link for link in (links["item"], links["image"]))
        assert live.get(links["image"]).status == live.get(links["item"]).status == 200
    assert [each["run_id"] for each in live.get("/versions").json["versions"]] == [second, first["publication"]]


def test_cursors_go_on_to_the_last_hit_of_the_same_publication(live, files, tmp_path):
    page = live.search(QUERY, k=1)
    cursor = page.json["answers"][0]["cursor"]
    publish_refresh(files, image(tmp_path, "c.png"))
    wait_for(live, files)
    rest = live.search(QUERY, k=1, cursor=cursor)
    assert rest.json["version"] == page.json["version"]
    assert set(captions(page)) | set(captions(rest)) == {"a.png", "b.png"}
    last = live.search(QUERY, k=1, cursor=rest.json["answers"][0]["cursor"])
    assert (captions(last), last.json["answers"][0]["cursor"]) == ({}, None)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"k": 2}, "body.cursor"),
        ({"queries": [{"vector": [0.0, 1.0]}]}, "body.cursor"),
        ({"queries": [QUERY, QUERY]}, "body.cursor"),
        ({"cursor": "nonsense"}, "body.cursor"),
        ({"cursor": "W10="}, "body.cursor"),
    ],
)
def test_a_cursor_of_another_query_is_refused(live, changes, place):
    cursor = live.search(QUERY, k=1).json["answers"][0]["cursor"]
    answer = live.post("/search", {"queries": [QUERY], "k": 1, "cursor": cursor} | changes)
    assert (answer.status, answer.error["where"]) == (422, place)


def test_a_cursor_of_a_publication_that_was_vacuumed_is_gone(live, files, tmp_path):
    cursor = live.search(QUERY, k=1).json["answers"][0]["cursor"]
    for count in range(2):
        publish_refresh(files, image(tmp_path, "a.png", caption=f"{count}", modified=f"t{count}"))
    vacuum(files, keep_days=0, keep_versions=1)
    wait_for(live, files)
    answer = live.search(QUERY, k=1, cursor=cursor)
    assert (answer.status, answer.error["where"]) == (410, "version")


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        (Snapshot, RetrievalError("/secret/index: damaged"), 410),
        (Snapshot, StoreRefusedError("s3://secret/store: the token has expired"), 503),
        (Store, ModelError("/secret/model: not found"), 200),  # of its encoder, which vectors don't need
        (Store, ImportError("No module named 'torch'"), 200),
    ],
)
def test_an_earlier_publication_whose_index_or_model_is_gone_is_no_fault_of_the_service(
    live, files, tmp_path, monkeypatch, kind, error, status
):
    first = live.search(QUERY).json["publication"]
    publish_refresh(files, image(tmp_path, "c.png"))
    wait_for(live, files)

    def fail(*_):
        raise error

    monkeypatch.setattr(kind, "prepare", fail)
    answer = live.search(QUERY, version=first)
    assert answer.status == status, answer.body
    if status == 200:
        assert captions(answer) == {"a.png": "old", "b.png": "old"}
    else:
        assert answer.error["where"] == ("version" if status == 410 else "server")
        assert "secret" not in answer.body.decode(), "the reason names places, so it goes to the log"


def test_an_item_that_left_the_store_leaves_no_thumbnail_and_is_never_shown_again(live, files, tmp_path):
    kept = live.item("b.png", "/image?size=160")
    gone = live.item("a.png", "/image?size=160")
    assert kept.status == gone.status == 200
    assert {path.read_bytes() for path in thumbnails(tmp_path)} == {kept.body, gone.body}
    publish_refresh(files, image(tmp_path, "c.png"), retired=["a.png"])
    wait_for(live, files)
    for rest in ("", "/image?size=160"):
        assert live.item("a.png", rest).status == 404
        assert live.get(f"/items/a.png{rest}", If_None_Match=gone.headers["ETag"]).status == 404
    for _ in range(500):  # the files go while the new publication is served already
        if {path.read_bytes() for path in thumbnails(tmp_path)} == {kept.body}:
            break
        time.sleep(0.01)
    assert {path.read_bytes() for path in thumbnails(tmp_path)} == {kept.body}


def test_a_later_server_takes_thumbnails_over_but_for_items_that_left_meanwhile(files, tmp_path):
    options = {"follow_s": FOLLOW_S, "cache_dir": tmp_path / "cache"}
    with running(files.address, **options) as url:
        shown = {name: Served(url, None, tmp_path).item(name, "/image").body for name in ("a.png", "b.png")}
    publish_refresh(files, image(tmp_path, "c.png"), retired=["a.png"])
    (tmp_path / "b.png").unlink()
    with running(files.address, **options) as url:
        again = Served(url, None, tmp_path)
        assert again.item("a.png", "/image").status == 404
        for _ in range(500):
            if (answer := again.item("b.png", "/image")).status == 200:
                break
            time.sleep(0.01)
        assert answer.body == shown["b.png"], "its file is gone, the thumbnail is not"
        assert {path.read_bytes() for path in thumbnails(tmp_path)} == {shown["b.png"]}


def thumbnails(folder):
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


@pytest.mark.medium
def test_while_versions_are_published_no_answer_mixes_two(live, files, tmp_path):
    problems, asked = [], []
    done = threading.Event()

    def ask():
        while not done.is_set():
            answer = live.search(QUERY, {"vector": [1.0, 0.0]}, k=2)
            asked.append(answer.status)
            pages = [{hit["caption"] for hit in page["hits"]} for page in answer.json.get("answers", [])]
            if answer.status != 200 or pages[0] != pages[1] or len(pages[0]) != 1:
                problems.append(answer.body)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for count in range(5):
            rows = [image(tmp_path, name, caption=f"{count}", modified=f"t{count}") for name in ("a.png", "b.png")]
            publish_refresh(files, *rows)
            if count == 2:
                build_store_index(files)
            wait_for(live, files)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not problems
    assert len(asked) > 20


@pytest.mark.medium
def test_a_server_is_ready_while_texts_can_be_encoded_and_says_why_it_is_not(tiny_model, tmp_path, monkeypatch):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config, _ = make_store(tmp_path / "made", model)
    store, away = Path(config.store), tmp_path / "away"
    shutil.rmtree(store / "query_towers")
    model.rename(away)
    encoded = []
    encode = Store.encode_text
    monkeypatch.setattr(
        Store, "encode_text", lambda store, texts, *own: encoded.append(texts) or encode(store, texts, *own)
    )
    with running(store, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        live = Served(url, None, tmp_path)
        for answer in (live.get("/readyz"), live.search({"text": "a red car"}), live.post("/embed", {"texts": ["a"]})):
            assert answer.status == 503, answer.body
            assert "no text can be encoded, as the model's query encoder fails (ModelError)" in answer.error["what"]
            assert int(answer.headers["Retry-After"]) > 0
            assert str(tmp_path) not in answer.body.decode(), "the reason names places, so it goes to the log"
        for method in ("GET", "HEAD"):  # monitors send either
            statuses = [live.get(path, method=method).status for path in ("/healthz", "/readyz")]
            assert statuses == [200, 503], method
        assert live.search({"vector": [1.0] + [0.0] * 23}).status == 200
        away.rename(model)
        assert live.get("/readyz").status == 200, "it is tried again"
        assert live.search({"text": "a red car"}).status == 200
        encoded.clear()
        assert [live.get("/readyz").status for _ in range(10)] == [200] * 10
        assert encoded == [], "what has worked is not tried again"
        monkeypatch.setattr(Store, "encode_text", no_space)
        failed = live.search({"text": "a green car"}, {"text": "a blue car"})
        assert (failed.status, failed.error["what"]) == (503, live.get("/readyz").error["what"])
        assert "(OSError)" in failed.error["what"]
        monkeypatch.setattr(Store, "encode_text", encode)
        assert live.get("/readyz").status == 200


def no_space(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_hits_of_an_earlier_publication_say_what_became_of_them(live, files, tmp_path):
    first = live.search(QUERY).json["publication"]
    publish_refresh(files, image(tmp_path, "a.png", modified="t1", content_version="other"), retired=("b.png",))
    wait_for(live, files)
    earlier = live.search(QUERY, version=first).json["answers"][0]["hits"]
    assert {hit["item_id"]: hit["since"] for hit in earlier} == {"a.png": "changed", "b.png": "removed"}
    assert live.get(f"/items/a.png?version={first}").json["since"] == "changed"
    assert [hit["since"] for hit in live.search(QUERY).json["answers"][0]["hits"]] == [None]


@pytest.mark.parametrize("path", ["/rejects", "/items/a.png"])
def test_what_an_earlier_publication_has_not_read_before_a_vacuum_is_gone_for_good(live, files, tmp_path, path, caplog):
    first = live.search(QUERY).json["publication"]
    for count in range(2):
        publish_refresh(files, image(tmp_path, "a.png", caption=f"{count}", modified=f"t{count}"))
    wait_for(live, files)
    assert live.search(QUERY, version=first).status == 200, "it is held open"
    for name in ("items", "embeddings"):
        for part in (Path(files.address) / name).glob("part-*.parquet"):
            if first in part.name:
                part.unlink()
    for asked in (f"{path}?version={first}", f"/facets?version={first}"):
        answer = live.get(asked)
        assert (answer.status, answer.error["where"]) == (410, "version"), answer.body
    assert live.search(QUERY, version=first).status == 410, "it is forgotten, too"
    assert live.get(path).status == 200
