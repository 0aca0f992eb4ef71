"""The Python client of a query service: each search method answers as a store in process does, mistakes included."""

import csv
import math
import pickle
import threading
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import pytest
import samples
from running_server import running
from served import make_store

import embedder
from embedder.config import load_config
from embedder.errors import ArgumentTypeError, ConfigError, StoreError
from embedder.ingest.embed import embed
from embedder.retrieval import http_client
from embedder.retrieval.hit import describe
from embedder.retrieval.http_client import HttpClient
from embedder.retrieval.remote_hits import read_hits
from embedder.retrieval.remote_store import RemoteStore, _requests
from index.index_errors import RetrievalError

TOKEN = "a token of more than sixteen characters".replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """Images, half of them with captions, and clips of several segments, in a store of a tiny model."""
    folder = tmp_path_factory.mktemp("remote")
    source = samples.folder(folder / "in", num_images=8, num_clips=1)
    samples.clip(source / "clips" / "other.mp4", seconds=2.5, size=64)
    settings = {"model": str(tiny_model), "store": str(folder / "store"), "source": [{"path": str(source)}]}
    embed(load_config(overrides=settings | {"engine": "local", "segment_s": 1.0}))
    return folder


@pytest.fixture(scope="module")
def local(folder):
    return embedder.open_store(folder / "store")


@pytest.fixture(scope="module")
def remote(folder):
    with running(folder / "store", show_uris=True) as url, embedder.connect(url) as store:
        yield store


def as_plain(answer):
    """Hits as plain data, with the query, the note and the version."""
    if answer and isinstance(answer[0], list):
        return [as_plain(hits) for hits in answer]
    return answer.query, answer.note, answer.version, [asdict(hit) for hit in answer]


def check_equal(found, wanted):
    """All alike, numbers to 1e-6."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        check_equal(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            check_equal(*pair)
    else:
        assert found == (pytest.approx(wanted, abs=1e-6) if isinstance(wanted, float) else wanted)


class Brightness(embedder.Stage):
    columns_in = ("query", "image")
    columns_out: ClassVar = {"score": "float32"}

    def process(self, rows):
        return {"score": [np.frombuffer(image["pixels"], np.uint8).mean() for image in rows["image"].to_pylist()]}


@pytest.mark.medium
def test_a_second_model_orders_the_hits_of_a_service_by_their_images(local, folder):
    """The service hides where the images are; the order is that of the store in this process, and hits stay whole."""
    with running(folder / "store") as url, embedder.connect(url) as hiding:
        hits = hiding.search("a red car", k=4, rerank=8, reranker=Brightness())
        wanted = local.search("a red car", k=4, rerank=8, reranker=Brightness())
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in wanted]
        assert [hit.rerank_score for hit in hits] == pytest.approx([hit.rerank_score for hit in wanted], abs=2)
        assert None not in [hit.rerank_score for hit in hits]
        assert np.asarray(hits[0].image()).shape == (512, 512, 3)
        assert wanted[0].embedded is not None
        assert hiding.more(hits) == []


@pytest.mark.medium
def test_a_second_model_here_asks_a_service_for_nothing_that_an_older_one_does_not_know(folder, monkeypatch):
    asked = []
    with running(folder / "store") as url, embedder.connect(url) as remote:
        post = http_client.HttpClient.post
        monkeypatch.setattr(
            http_client.HttpClient, "post", lambda self, path, body: asked.append(body) or post(self, path, body)
        )
        hits = remote.search("a red car", k=4, rerank=8, reranker=Brightness(), rerank_timeout_s=29)
    assert None not in [hit.rerank_score for hit in hits]
    (body,) = asked
    assert [name for name in body if name.startswith("rerank")] == []


IMAGE, OTHER = samples.image_bytes(1), samples.image_bytes(2, "JPEG")
SEARCHES = {
    "a text": lambda store, folder: store.search("a red car"),
    "a number of hits": lambda store, folder: store.search("a red car", 3),
    "options": lambda store, folder: store.search("a red car", embedder.SearchOptions(k=4, group=False)),
    "options and keywords": lambda store, folder: store.search("two cats", embedder.SearchOptions(k=4), k=2),
    "texts": lambda store, folder: store.search(["a red car", "two cats", "a red car"], k=3),
    "one text in a list": lambda store, folder: store.search(["a red car"], k=3),
    "a vector": lambda store, folder: store.search(store.encode_text(["a bird"])[0], k=5),
    "vectors": lambda store, folder: store.search(store.encode_text(["a bird", "a car"]), k=5),
    "an image by path": lambda store, folder: store.search(image=folder / "in/pictures/0003.png", k=2),
    "an image by bytes": lambda store, folder: store.search(image=IMAGE, k=20),
    "an image as the query": lambda store, folder: store.search(folder / "in/pictures/0003.png", k=2),
    "an image of Pillow": lambda store, folder: store.search(samples.make_image(5), k=3),
    "an array of pixels": lambda store, folder: store.search(np.asarray(samples.make_image(5)), k=3),
    "images of all forms": lambda store, folder: store.search([IMAGE, samples.make_image(5)], k=3),
    "images": lambda store, folder: store.search(image=[IMAGE, str(folder / "in/pictures/0003.png"), OTHER]),
    "a text and an image": lambda store, folder: store.search("a red car", image=IMAGE, k=20),
    "a text and images": lambda store, folder: store.search("a red car", image=[IMAGE, OTHER], text_weight=0.3),
    "texts and images": lambda store, folder: store.search(["a red car", "two cats"], image=[IMAGE, OTHER]),
    "a text but not": lambda store, folder: store.search("a red car", not_text=["two cats", "a bird"], not_image=IMAGE),
    "an image but not": lambda store, folder: store.search(image=[IMAGE, OTHER], not_image=OTHER, not_weight=0.3),
    "a vector but not": lambda store, folder: store.search(store.encode_text(["a bird"])[0], not_text="a car"),
    "words but not": lambda store, folder: store.search("an old man reads", not_text="a car", hybrid=True),
    "words of captions": lambda store, folder: store.search("an old man reads", hybrid=True, k=6),
    "a condition": lambda store, folder: store.search("a red car", where="modality = 'video'"),
    "segments": lambda store, folder: store.search("a red car", where="modality = 'video'", group=False),
    "near-duplicates": lambda store, folder: store.search("a red car", fold=0.5),
    "a least score": lambda store, folder: store.search("a red car", min_score=0.0),
    "nothing by score": lambda store, folder: store.search("a red car", min_score=1.0),
    "nothing by condition": lambda store, folder: store.search(["a", "b"], where="item_id = 'none'"),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_each_search_gives_what_a_store_gives(name, local, remote, folder):
    found, wanted = (SEARCHES[name](store, folder) for store in (remote, local))
    check_equal(as_plain(found), as_plain(wanted))
    assert isinstance(found, type(wanted))


def test_encoding_gives_what_a_store_gives(local, remote, folder):
    texts, images = ["a red car", "two cats " * 30], [IMAGE, folder / "in/pictures/0003.png"]
    for found, wanted in (
        (remote.encode_text(texts), local.encode_text(texts)),
        (remote.encode_image(images), local.encode_image(images)),
        (remote.encode_text([]), local.encode_text([])),
    ):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.medium
def test_more_queries_than_a_request_takes_are_answered_in_their_order(local, remote):
    texts = [f"number {number}" for number in range(150)]
    check_equal(as_plain(remote.search(texts, k=1)), as_plain(local.search(texts, k=1)))


def test_requests_are_bounded_by_number_and_by_the_size_of_images():
    assert [len(each) for each in _requests(range(130))] == [64, 64, 2]
    large = {"image": "x" * (5 << 20)}
    assert [len(each) for each in _requests([large, large, {"image": "x"}, {"image": "x" * (99 << 20)}])] == [1, 2, 1]
    assert list(_requests([])) == []


def test_pages_go_on_to_the_last_hit(local, remote):
    pages = list(remote.pages(remote.search("a red car", k=3, group=False)))
    assert {len(page) for page in pages[:-1]} == {3}
    assert {page.query for page in pages} == {"a red car"}
    check_equal([asdict(hit) for page in pages for hit in page],
                [asdict(hit) for hit in local.search("a red car", k=99, group=False)])  # fmt: skip
    assert remote.more(pages[-1]) == []


def test_items_like_one_of_the_store(local, remote):
    (hit, *_) = remote.search("a red car", k=1, where="modality = 'video'")
    alike = remote.search_item(hit.item_id, 3, segment=np.int32(hit.segment))  # as in a data frame
    assert (alike[0].item_id, alike[0].score) == (hit.item_id, pytest.approx(1, abs=1e-5))
    item = remote.item(hit.item_id, segment=hit.segment, neighbours=3)
    assert item["item"]["item_id"] == hit.item_id
    assert [each["segment"] for each in item["segments"]] == [0, 1, 2]
    assert len(item["neighbours"]) == 3 and item["neighbours"][0].image(32).size == (32, 32)


def test_what_a_store_has_beside_searches(local, remote):
    columns = {column["name"] for column in remote.facets()["columns"]}
    assert {"caption", "modality"} <= columns
    assert remote.facets("modality = 'video'")["num_rows"] == 6
    assert remote.version == remote.status()["version"] == local.version
    assert [each["run_id"] for each in remote.versions()] == [local.current.run_id]


@pytest.mark.medium
def test_images_are_those_of_a_store(local, remote):
    found, wanted = (store.search("a red car", k=10) for store in (remote, local))
    assert {"image", "video"} < {hit.modality for hit in found}
    for hit, same in zip(found, wanted, strict=True):
        image, other = (np.asarray(each.image(64), np.int16) for each in (hit, same))
        assert image.shape == other.shape
        assert np.abs(image - other).mean() < 12  # the service compresses, and scales in two steps
    thumbnails = found.thumbnails()
    assert [each.shape for each in thumbnails] == [(160, 160, 3)] * 10
    assert found._repr_html_().count("<img") == 10


def test_files_of_videos_come_whole_and_images_as_the_service_makes_them(remote, folder):
    hits = {hit.modality: hit for hit in remote.search("a red car", k=10)}
    video = hits["video"]
    assert video.read() == (folder / "in" / video.item_id).read_bytes()
    assert remote.search(image=hits["image"].read(), k=1)[0].item_id == hits["image"].item_id


def test_pages_go_on_with_the_examples_of_their_search(local, remote):
    given = {"query": "a red car", "image": IMAGE, "not_text": "a bird", "group": False}
    pages = list(remote.pages(remote.search(**given, k=3)))
    assert len(pages) > 1
    assert {page.parts for page in pages} == {pages[0].parts}
    check_equal([asdict(hit) for page in pages for hit in page], [asdict(hit) for hit in local.search(**given, k=99)])


def test_files_are_copied_videos_whole_and_images_as_the_service_makes_them(remote, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(http_client, "PIECE_BYTES", 1000)
    hits = remote.search("a red car", k=10)
    copied = hits.copy_files(tmp_path / "out")
    assert (copied.num_files, copied.problems) == (10, [])
    with (tmp_path / "out" / "hits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["item_id"] for row in rows] == [hit.item_id for hit in hits]
    for row in rows:
        content = (tmp_path / "out" / row["file"]).read_bytes()
        if row["modality"] == "video":
            assert len(content) > 1000 and content == (folder / "in" / row["item_id"]).read_bytes()
            assert row["file"].endswith(".mp4")
        else:
            assert row["file"].endswith(".webp") and content[8:12] == b"WEBP"


@pytest.mark.medium
def test_an_image_that_is_gone_is_none(folder, tmp_path, request):
    with running(folder / "store", cache_dir=tmp_path / "cache") as url, embedder.connect(url) as remote:
        hits = remote.search("a red car", k=3, where="modality <> 'video'")
        gone = folder / "in" / hits[1].item_id
        gone.rename(tmp_path / "away")
        request.addfinalizer(lambda: (tmp_path / "away").rename(gone))
        assert [each is None for each in hits.thumbnails()] == [False, True, False]
        with pytest.raises(embedder.sources.fetch.FetchError):
            hits[1].image()
        assert hits[0].uri.startswith(f"{url}/items/"), "the service keeps the addresses of files to itself"


MISTAKES = {
    "k below 1": ({"query": "a", "k": 0}, RetrievalError, "k is 0"),
    "k too large": ({"query": "a", "k": 5000}, RetrievalError, "body.k"),
    "an empty text": ({"query": "  "}, ConfigError, "queries.0.text"),
    "an unknown column": ({"query": "a", "where": "prise < 3"}, ConfigError, "prise"),
    "an empty condition": ({"query": "a", "where": " "}, ConfigError, "write a condition"),
    "no query": ({}, ConfigError, "there is no query"),
    "parts that cancel": ({"query": "a", "not_text": "a", "not_weight": 1.0}, ConfigError, "cancel each other out"),
    "an empty example": ({"query": "a", "not_text": " "}, ConfigError, "not_text"),
    "words of an image": ({"image": IMAGE, "hybrid": True}, ConfigError, "search with a text"),
    "a short vector": ({"query": np.ones(3, np.float32)}, RetrievalError, "vector"),
    "a vector with NaN": ({"query": np.full(24, np.nan, np.float32)}, RetrievalError, "vector"),
    "no image": ({"image": b"no image"}, ConfigError, "give a JPEG"),
    "no file": ({"image": "nowhere.png"}, ConfigError, "nowhere.png"),
    "pixels as floats": ({"image": np.ones((4, 4, 3))}, ConfigError, "uint8"),
    "a number": ({"query": 5}, ArgumentTypeError, "found int; give a text"),
    "an option of another type": ({"query": "a", "k": "5"}, ArgumentTypeError, "k: found '5'"),
    "an unknown option": ({"query": "a", "colour": "blue"}, TypeError, "colour"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_what_it_raises_in_a_store_in_one_line(name, local, remote):
    arguments, kind, message = MISTAKES[name]
    with pytest.raises(kind, match="^[^\n]*$") as caught:
        remote.search(**arguments)
    assert message in str(caught.value)
    if name != "k too large":  # a store has no such limit
        with pytest.raises(kind):
            local.search(**arguments)


def test_an_unknown_item_or_version_is_a_store_error(remote):
    with pytest.raises(StoreError, match="no item 'none'"):
        remote.item("none")
    with pytest.raises(StoreError, match="nothing"):
        embedder.connect(remote._client.url, version="nothing").search("a")


@pytest.mark.medium
def test_an_earlier_publication_is_searched_by_its_run(tiny_model, tmp_path):
    config, source = make_store(tmp_path, tiny_model, num_images=4, num_clips=0)
    first = embedder.open_store(tmp_path / "store")
    (source / "pictures" / "0000.png").write_bytes(samples.image_bytes(77))
    embedder.refresh(config)
    with running(tmp_path / "store", show_uris=True) as url:
        found = embedder.connect(url, version=first.current.run_id).search(["a red car", "cats"], k=4)
        check_equal(as_plain(found), as_plain(first.search(["a red car", "cats"], k=4)))
        newest = embedder.connect(url).search("a red car", k=4)
        check_equal(as_plain(newest), as_plain(embedder.open_store(tmp_path / "store").search("a red car", k=4)))
        assert newest.version != found[0].version


def test_threads_share_one_client(local, remote):
    queries = [f"number {number % 7}" for number in range(40)]
    wanted = {query: [hit.item_id for hit in local.search(query, k=5)] for query in set(queries)}
    found = []

    def ask(query):
        found.append((query, [hit.item_id for hit in remote.search(query, k=5)]))

    threads = [threading.Thread(target=ask, args=(query,)) for query in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and all(hits == wanted[query] for query, hits in found)


@pytest.mark.medium
def test_a_token_lets_in_and_another_is_a_mistake(folder, tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    with running(folder / "store", token_file=path) as url:
        hits = embedder.connect(url, token=TOKEN).search("a red car", k=2)
        assert hits[0].image(32).size == (32, 32)
        for token in (None, TOKEN[::-1]):
            with pytest.raises(ConfigError, match="(?i)token") as caught:
                embedder.connect(url, token=token).search("a red car")
            assert TOKEN[::-1] not in str(caught.value)
        copy = pickle.loads(pickle.dumps(embedder.connect(url, token=TOKEN)))
        assert [hit.item_id for hit in copy.search("a red car", k=2)] == [hit.item_id for hit in hits]


@pytest.mark.medium
def test_items_rejects_and_duplicates_are_listed_as_in_the_store(remote, local):
    ids = {row["item_id"] for row in local.to_arrow(["item_id"]).to_pylist()}
    pages = list(remote.items(sort="name", k=4))
    listed = [hit.item_id for hits in pages for hit in hits]
    assert listed == sorted(ids)
    assert [len(hits) for hits in pages] == [4] * (len(ids) // 4) + ([len(ids) % 4] if len(ids) % 4 else [])
    assert pages[0][0].image().size == local.search(image=pages[0][0].image(), k=1)[0].image().size
    few = [hit.item_id for hits in remote.items("item_id LIKE 'images/%'", sort="random", seed=2) for hit in hits]
    assert sorted(few) == [item_id for item_id in listed if item_id.startswith("images/")]
    with pytest.raises(ConfigError, match="there is no column 'prise'"):
        next(remote.items("prise < 3"))
    assert remote.rejects() == local.rejects().to_pylist() == []
    groups = remote.duplicates(fold=0.5)
    assert groups == sorted(groups, key=len, reverse=True)
    assert all(len(hits) > 1 for hits in groups) and groups


def test_what_was_listed_without_a_search_is_shown_without_a_score():
    links = {"item": "/items/a.png", "image": "/items/a.png/image?size=320", "clip": None}
    nothing = dict.fromkeys(("score", "uri", "start_s", "end_s"))
    found = {"item_id": "a.png", "segment": 0, "modality": "image", "caption": "a car", "carryover": {}} | nothing
    found |= {"segments": [], "duplicates": [], "links": links}
    hits = read_hits(HttpClient("http://127.0.0.1:1", None, 1.0), {"hits": [found]}, "a version")
    assert math.isnan(hits[0].score)
    assert str(hits[0]) == "image  a.png  a car"
    assert describe(hits[0]) == ["a car", "a.png"], "of contact sheets and notebooks"
    assert hits.to_arrow()["score"].to_pylist() == [None]


class PublishingService:
    """Client of a service that gives two rejects at a time, and publishes again after each answer."""

    num_answers = 0

    def get(self, path, start, version):
        assert path == "/rejects"
        served = version or f"run{self.num_answers}"
        self.num_answers += 1
        ids = {"run0": "abc", "run1": "bcd"}[served]
        return {"version": f"{served}/exact", "num_rejects": 3, "rejects": [*ids[start : start + 2]]}


def test_all_rejects_are_of_one_publication_though_another_follows_meanwhile():
    assert RemoteStore(PublishingService()).rejects() == [*"abc"]
    assert RemoteStore(PublishingService(), version="run1").rejects() == [*"bcd"]
