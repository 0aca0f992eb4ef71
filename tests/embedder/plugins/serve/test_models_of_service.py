"""Further models behind a query service: `model` of a request, and what /status says of them."""

import base64
import json
from pathlib import Path

import pyarrow as pa
import pytest
import samples
from model_stores import add_model, code_section, label_row, vector_row
from running_server import running
from search_stores import picture, searchable, towards
from served import FOLLOW_S, Served
from store_samples import INFO
from test_publications import wait_for

from embedder.errors import ConfigError, StoreError
from embedder.retrieval.remote_store import connect
from embedder.store.journal.runs import new_run
from embedder.store.layout import utc_now
from embedder.store.publish.current import publish_current
from embedder.store.store_info import read_published

NAMES = ["a.png", "b.png", "c.png"]
QUERY = {"vector": towards(0).tolist()}


@pytest.fixture
def files(tmp_path):
    """Three pictures; `clip` orders them the other way round, `labels` has no vectors."""
    store = searchable(tmp_path / "s", *(picture(name, 10 * n) for n, name in enumerate(NAMES)), index=False)
    add_model(store.files, "clip", *(vector_row(name, towards(20 - 10 * n)) for n, name in enumerate(NAMES)))
    rows = [label_row(name) for name in NAMES[:2]]
    add_model(store.files, "labels", *rows, has_vectors=False, top=pa.array(["cat", "dog"]))
    return store.files


@pytest.fixture
def server(files, tmp_path):
    with running(files.address, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        yield Served(url, None, tmp_path)


def found(answer) -> list[str]:
    return [hit["item_id"] for hit in answer.json["answers"][0]["hits"]]


def test_a_request_names_the_model_that_is_searched(server):
    assert found(server.search(QUERY)) == NAMES
    assert found(server.search(QUERY, model="main")) == NAMES
    assert found(server.search(QUERY, model="clip")) == NAMES[::-1]
    assert found(server.search({"item": "a.png"}, model="clip", k=2)) == ["a.png", "b.png"], "by that model's vector"
    assert server.search(QUERY, model="clip").json["version"].endswith("/clip exact")


def test_conditions_and_hits_have_the_columns_of_other_models(server):
    for model in ("main", "clip"):
        answer = server.search(QUERY, model=model, where="labels.top = 'dog'")
        assert found(answer) == ["b.png"]
        assert answer.json["answers"][0]["hits"][0]["carryover"] == {"labels.top": "dog"}
    columns = {each["name"]: each for each in server.get("/facets").json["columns"]}
    assert [each["value"] for each in columns["labels.top"]["values"]] == ["cat", "dog"]
    assert columns["labels.top"]["num_null"] == 1


def test_a_cursor_goes_on_with_the_same_model_and_with_no_other(server):
    first = server.search(QUERY, model="clip", k=1)
    cursor = first.json["answers"][0]["cursor"]
    assert found(server.search(QUERY, model="clip", k=1, cursor=cursor)) == ["b.png"]
    assert server.search(QUERY, k=1, cursor=cursor).status == 422


def test_an_unknown_model_and_one_without_vectors_are_refused(server):
    unknown = server.search(QUERY, model="clp")
    assert unknown.status == 404
    assert unknown.error["rule"] == "one of main, clip"
    none = server.search(QUERY, model="labels")
    assert (none.status, none.error["where"]) == (422, "body.model")
    assert "labels has no vectors" in none.error["what"]
    assert server.post("/embed", {"texts": ["a"], "model": "clp"}).status == 404
    assert server.search(QUERY, model="x" * 65).status == 422
    assert server.search(QUERY, model="../..").status == 404


def test_status_lists_the_models(server):
    models = {each["name"]: each for each in server.get("/status").json["models"]}
    assert models["clip"] == {
        "name": "clip",
        "model": "fingerprint of clip",
        "has_vectors": True,
        "searched": "image",
        "columns": {},
    }
    assert (models["labels"]["has_vectors"], models["labels"]["columns"]) == (False, {"top": "string"})


def test_a_new_publication_of_a_further_model_is_served_and_an_earlier_one_on_request(server, files):
    before = server.search(QUERY, model="clip").json
    add_model(files, "clip", vector_row("new.png", towards(0)))
    wait_for(server, files)
    assert found(server.search(QUERY, model="clip")) == ["c.png", "new.png", "b.png", "a.png"]
    assert found(server.search(QUERY, model="clip", version=before["publication"])) == NAMES[::-1]


def test_a_client_of_the_service_names_the_model(server):
    with connect(server.url, model="clip") as store:
        assert [hit.item_id for hit in store.search(towards(0), k=3)] == NAMES[::-1]
    with connect(server.url, model="clp") as store, pytest.raises((StoreError, ConfigError), match="no model 'clp'"):
        store.search(towards(0))


@pytest.mark.parametrize("leave", ["none", "configuration", "store"])
def test_no_request_runs_code_of_the_store_unless_the_operator_allowed_it(files, tmp_path, leave):
    section = code_section(tmp_path)
    add_model(files, "own", *(vector_row(name, towards(45 * n)) for n, name in enumerate(NAMES)), section=section)
    settings = {"none": {}, "configuration": {"servables": (section,)}, "store": {"allow_store_code": True}}[leave]
    with running(files.address, cache_dir=tmp_path / "cache", **settings) as url:
        server = Served(url, None, tmp_path)
        assert found(server.search(QUERY, model="own"))[0] == "a.png", "vectors need no code"
        asked = {"texts": ["upwards"], "model": "own"}
        answers = [server.search({"text": "upwards"}, model="own"), server.post("/embed", asked)]
        allowed = server.search({"text": "upwards"}, model="own", allow_store_code=True)
    assert (tmp_path / "ran").exists() == (leave != "none")
    assert allowed.status == 422, "it is no key of a request"
    if leave != "none":
        assert found(answers[0])[0] == "c.png"
        assert answers[1].json["vectors"] == [[0, 1]]
        return
    for answer in answers:
        assert answer.status == 422
        assert "model own of the store: it is of the kind python" in answer.error["what"]
        assert answer.error["cure"].endswith("(--allow-store-code)")
        assert str(tmp_path) not in str(answer.error)


@pytest.mark.medium
def test_places_are_shown_by_no_model_unless_uris_are(tmp_path):
    """The medium's columns stand in the main model's table; a further model's rows have them, too."""
    pictures = [picture(name, 10 * number) for number, name in enumerate(("a.png", "b.png"))]
    files = searchable(
        tmp_path / "s", *pictures, index=False, latitude=[48.1] * 2, longitude=[11.6] * 2, camera=["K-1"] * 2
    ).files
    run = new_run(files, INFO, pa.schema([]), "refresh")
    changes = {"medium_columns": ("latitude", "longitude", "camera"), "run_id": run.run_id, "published_at": utc_now()}
    publish_current(files, read_published(files).model_copy(update=changes), "refresh")
    add_model(files, "clip", *(vector_row(name, towards(20)) for name in ("a.png", "b.png")))
    whole = {"camera": "K-1", "latitude": 48.1, "longitude": 11.6}
    for show_uris, shown, place in ((False, {"camera": "K-1"}, None), (True, whole, "Munich, DE")):
        with running(files.address, show_uris=show_uris, cache_dir=tmp_path / f"cache-{show_uris}") as url:
            server = Served(url, None, tmp_path)
            for model in ("main", "clip"):
                answer = server.search({"vector": towards(0).tolist()}, model=model)
                for hit in answer.json["answers"][0]["hits"]:
                    assert (hit["carryover"], hit["medium"], hit["place"]) == ({}, shown, place), (model, show_uris)
            (row,) = server.get("/items/a.png").json["segments"]
            assert (row.get("latitude"), row.get("place")) == (shown.get("latitude"), place)
            exported = server.post("/export", {"items": ["a.png"], "format": "jsonl"}).body
            known = {"latitude": shown.get("latitude"), "place": place}
            row = json.loads(exported)
            assert {name: row.get(name) for name in known} == known and "rerank_score" not in row


def test_a_model_that_is_damaged_is_told_without_a_place_of_the_server(files, tmp_path):
    folder = Path(files.address) / "models" / "clip"
    for part in (folder / "embeddings").glob("*.parquet"):
        part.write_bytes(b"damaged")
    with running(files.address, cache_dir=tmp_path / "cache") as url:
        server = Served(url, None, tmp_path)
        answer = server.search(QUERY, model="clip")
        assert (answer.status, answer.error["where"]) == (503, "body.model"), answer.body
        assert int(answer.headers["Retry-After"]) > 0
        assert str(tmp_path) not in answer.body.decode(), "the reason names places, so it goes to the log"
        assert found(server.search(QUERY)) == NAMES


def test_a_model_whose_encoder_is_gone_is_told_without_a_place_of_the_server(server):
    image = {"image": base64.b64encode(samples.image_bytes(1)).decode()}
    for query, kind in (({"text": "upwards"}, "text"), (image, "image")):
        answer = server.search(query, model="clip")
        assert (answer.status, answer.error["where"]) == (503, "query"), answer.body
        assert f"no {kind} can be encoded" in answer.error["what"]
        assert "/models/clip" not in answer.body.decode(), "the reason names places, so it goes to the log"
    assert found(server.search(QUERY, model="clip")) == NAMES[::-1]
