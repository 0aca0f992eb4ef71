"""A service with a re-ranker: what Python's search answers with it, in its time, or the first order and why."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_runs import run_here
from picture_decoders import save_reranker
from running_server import running
from served import Served, form

import embedder
from embedder.config import load_config
from embedder.encoders.yes_no_reranker import YesNoReranker
from embedder.errors import ConfigError, ModelError, StoreError
from embedder.plugins.serve import hit_reranker, service
from embedder.plugins.serve.serve_settings import ServeSettings
from embedder.plugins.serve.web_app import create_routes
from embedder.retrieval.hit import decode_hits
from embedder.sources.fetch import FetchError
from shards.convert import import_reranker

TEXT, MOST = "a red car", 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    import_reranker(save_reranker(folder / "checkpoint"), folder / "model")
    return str(folder / "model")


@pytest.fixture(scope="module")
def reranked(made_store, model, tmp_path_factory):
    config, files = made_store
    limits = {"reranker": model, "rerank": MOST, "rerank_timeout_s": 60}
    with running(config.store, cache_dir=tmp_path_factory.mktemp("cache"), **limits) as url:
        yield Served(url, config, files)


@pytest.fixture(scope="module")
def expected(made_store, model):
    """Hits of the store, opened here, by the same re-ranker."""
    stage = embedder.YesNoReranker(model).load()
    return embedder.open_store(made_store[0].store).search(TEXT, k=20, rerank=MOST, reranker=stage)


def of(answer):
    assert answer.status == 200, answer.body
    (page,) = answer.json["answers"]
    return page


def ids(hits):
    return [hit["item_id"] for hit in hits]


def test_it_answers_what_python_does(reranked, expected, server):
    page = of(reranked.search({"text": TEXT}, k=20))
    assert ids(page["hits"]) == [hit.item_id for hit in expected]
    scores = [hit.rerank_score for hit in expected]
    assert [score is None for score in scores] == [False] * MOST + [True] * (len(scores) - MOST)
    assert [hit["rerank_score"] for hit in page["hits"]] == pytest.approx(scores, abs=1e-6)
    assert [hit["score"] for hit in page["hits"]] == pytest.approx([hit.score for hit in expected], abs=1e-6)
    assert page["warnings"] == []
    plain = of(server.search({"text": TEXT}, k=20))
    assert {hit["rerank_score"] for hit in plain["hits"]} == {None}
    assert ids(plain["hits"]) != ids(page["hits"]), "else nothing is shown"
    assert of(reranked.search({"text": TEXT}, k=20, rerank=0))["hits"] == plain["hits"]
    found = embedder.connect(reranked.url).search(TEXT, k=3)
    assert [(hit.item_id, hit.rerank_score) for hit in found] == [
        (hit["item_id"], hit["rerank_score"]) for hit in page["hits"][:3]
    ]
    assert reranked.get("/status").json["limits"]["rerank"] == MOST


def test_pages_go_on_where_the_last_one_ended(reranked, expected):
    found, cursor = [], None
    for _ in range(10):
        page = of(reranked.search({"text": TEXT}, k=2, cursor=cursor))
        found, cursor = found + page["hits"], page["cursor"]
        if cursor is None:
            break
    assert ids(found) == [hit.item_id for hit in expected]


def test_all_queries_with_a_text_are_scored(reranked, expected):
    beside = of(reranked.search({"text": TEXT, "item": expected[0].item_id}, k=20))
    assert sum(hit["rerank_score"] is not None for hit in beside["hits"]) == MOST
    alone = of(reranked.search({"item": expected[0].item_id}, k=20))
    assert {hit["rerank_score"] for hit in alone["hits"]} == {None}
    upload = (reranked.source / "pictures" / "0001.png").read_bytes()
    body, kind = form({"queries": [{"text": TEXT, "upload": "a"}], "k": 20}, a=upload)
    shown = of(reranked.post("/search", body, kind))["hits"]
    assert [hit["rerank_score"] is not None for hit in shown] == [True] * MOST + [False] * (len(shown) - MOST)


@pytest.mark.medium
def test_a_client_may_bring_its_own(reranked, server, model, expected):
    stage = embedder.YesNoReranker(model).load()
    for each in (reranked, server):
        hits = embedder.connect(each.url).search(TEXT, k=3, rerank=7, reranker=stage)
        assert len([hit for hit in hits if hit.rerank_score is not None]) == 3
        assert hits.cursor is None


def test_late_answers_have_the_first_order_and_are_not_remembered(reranked, server):
    text, timeout_s = "two birds", 1e-6
    for _ in range(2):
        late = of(reranked.search({"text": text}, k=20, rerank_timeout_s=timeout_s))
        assert late["hits"] == of(server.search({"text": text}, k=20))["hits"]
        (line,) = late["warnings"]
        assert line.startswith(f"the re-ranker had scored 0 of {MOST} first hits after 1e-06 s")
    before = misses(reranked)
    assert of(reranked.search({"text": text}, k=20, rerank_timeout_s=timeout_s))["warnings"]
    assert misses(reranked) == before + 1
    for _ in range(2):
        assert of(reranked.search({"text": text}, k=20))["warnings"] == []
    assert misses(reranked) == before + 2
    with embedder.connect(reranked.url) as remote:
        assert remote.search(text, k=3, rerank=4, rerank_timeout_s=timeout_s).warnings[0].endswith("hits with rerank")
    found = run_here("search", text, "--server", reranked.url, "--rerank", 4, "--rerank-timeout-s", timeout_s)
    assert "warning: the re-ranker had scored 0 of 4 first hits" in found.stdout


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_picture_that_fails_for_a_moment_is_scored_next_time(reranked, server, is_transient, monkeypatch):
    """What an answer lacks for good is remembered; what it lacks for a moment is not."""
    text = f"a picture that is gone, {is_transient}"
    plain = of(server.search({"text": text}, k=20))["hits"]
    gone = next(hit["item_id"] for hit in plain[:MOST] if hit["caption"] is None)

    def decode(hits, *rest):
        error = FetchError("ReadError", "the disk sleeps", is_transient)
        return (
            error if hit.item_id == gone else found for hit, found in zip(hits, decode_hits(hits, *rest), strict=True)
        )

    monkeypatch.setattr(hit_reranker, "decode_hits", decode)
    first = of(reranked.search({"text": text}, k=20))["hits"]
    assert (first[MOST - 1]["item_id"], first[MOST - 1]["rerank_score"]) == (gone, None), "it follows"
    assert [hit["rerank_score"] is None for hit in first[: MOST - 1]] == [False] * (MOST - 1)
    monkeypatch.undo()
    again = of(reranked.search({"text": text}, k=20))["hits"]
    scores = [hit["rerank_score"] for hit in again if hit["item_id"] == gone]
    assert [score is None for score in scores] == [not is_transient]


def misses(served):
    lines = served.get("/metrics").body.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith('embedder_cache_misses_total{cache="ans'))


def test_a_query_that_fills_the_reranker_is_answered_all_the_same(reranked):
    page = of(reranked.search({"text": "日本" * 2000}, k=3))
    assert any("first order: the query fills the 4,096 tokens" in line for line in page["warnings"]), page["warnings"]
    assert len(page["hits"]) == 3


@pytest.mark.medium
def test_many_at_once_wait_no_longer_than_their_time(made_store, model, tmp_path, monkeypatch):
    """The time of a search includes its wait for those before it."""
    process = YesNoReranker.process

    def score_slowly(stage, rows):
        time.sleep(1)
        return process(stage, rows)

    monkeypatch.setattr(YesNoReranker, "process", score_slowly)
    limits = {"reranker": model, "rerank_timeout_s": 4, "cache_dir": tmp_path}
    with running(made_store[0].store, **limits) as url:
        served = Served(url, *made_store)
        served.search({"text": "x"}, rerank=0)
        began = time.monotonic()
        answer = served.search(*({"text": f"a {number}"} for number in range(64)), k=3)
        took_s = time.monotonic() - began
        pages = answer.json["answers"]
    assert [len(page["hits"]) for page in pages] == [3] * 64
    warned = [page["warnings"] for page in pages]
    assert sum(not any("first order" in line for line in lines) for lines in warned) >= 1
    assert any(any("first order" in line for line in lines) for lines in warned)
    assert took_s < 20


@pytest.mark.medium
def test_a_burst_beyond_its_queue_is_answered_in_the_first_order(made_store, model, tmp_path, monkeypatch):
    """No query of a burst costs the others of its request their answers, nor those who look something up theirs."""
    process, write = YesNoReranker.process, service.page_of

    def score_slowly(stage, rows):
        time.sleep(1)
        return process(stage, rows)

    def write_slowly(asked, hits):
        time.sleep(0.01)
        return write(asked, hits)

    monkeypatch.setattr(YesNoReranker, "process", score_slowly)
    monkeypatch.setattr(service, "page_of", write_slowly)
    limits = {"reranker": model, "rerank_timeout_s": 0.5, "cache_dir": tmp_path, "max_waiting_images": 1}
    with running(made_store[0].store, **limits) as url, ThreadPoolExecutor(4) as threads:
        served = Served(url, *made_store)
        bursts = [[{"text": f"a {burst} {number}"} for number in range(64)] for burst in range(4)]
        answers = list(threads.map(lambda burst: served.search(*burst, k=3), bursts))
    assert [(answer.status, answer.json.get("error")) for answer in answers] == [(200, None)] * 4
    warned = [page["warnings"] for answer in answers for page in answer.json["answers"]]
    assert len(warned) == 256 and sum(any("wait for the re-ranker" in line for line in lines) for lines in warned) > 200


def test_what_it_cannot_do_is_refused(reranked, server, made_store):
    refused = reranked.search({"text": TEXT}, rerank=MOST + 1)
    assert (refused.status, refused.error["where"]) == (422, "body.rerank")
    assert refused.error["rule"] == f"up to {MOST} hits"
    refused = server.search({"text": TEXT}, rerank=5)
    assert (refused.status, refused.error["rule"]) == (422, "a service that was started with a re-ranker")
    refused = reranked.search({"item": "pictures/0001.png"}, rerank=5)
    assert (refused.status, refused.error["where"]) == (422, "body.queries.0.item")
    for name, value in (("rerank", -1), ("rerank", 2000), ("rerank", "x"), ("rerank_timeout_s", 0)):
        assert reranked.search({"text": TEXT}, **{name: value}).status == 422
    with pytest.raises((ConfigError, StoreError), match="leave it out"):
        embedder.connect(server.url).search(TEXT, rerank=5)


def test_a_service_starts_only_with_a_reranker_that_loads(made_store, tiny_model, model, tmp_path):
    store = made_store[0].store
    for folder, kind, message in (
        (str(tiny_model), ConfigError, "it is no re-ranker; give a folder of `embedder model import --reranker`"),
        (str(tmp_path / "gone"), ModelError, "gone"),
    ):
        app = create_routes(ServeSettings(store=store, reranker=folder))
        with pytest.raises(kind, match=message):
            _start(app)
        ended = run_here("serve", "--store", store, "--port", 0, "--limit", f"reranker={folder}")
        assert (ended.code, message in ended.stderr.replace("\n", " ")) == (2, True), ended.stderr


def _start(app):
    import asyncio

    async def start():
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    asyncio.run(start())


def test_the_configuration_has_its_own_section(made_store, model, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(f'store = "{made_store[0].store}"\n[serve]\nreranker = "{model}"\nrerank = 7\n')
    assert load_config(path).serve.given == {"reranker": model, "rerank": 7}
    path.write_text(f'store = "{made_store[0].store}"\n[serve]\nrerank = 7\n')
    with pytest.raises(ConfigError, match="rerank is of a re-ranker; give its folder, reranker, too"):
        load_config(path)
