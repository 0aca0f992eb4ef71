"""Searches by HTTP: what the client of Python (test_remote_store) does not ask for."""

import base64

import numpy as np
from served import form

from embedder.plugins.serve.search_batch import Asked, BatchSearcher, compute_together
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.served_publication import ServedPublication
from index.index_errors import RetrievalError


def ids(answer, number=0):
    return [hit["item_id"] for hit in answer.json["answers"][number]["hits"]]


def test_an_answer_names_the_model_and_no_place_of_a_file(server):
    answer = server.search({"text": "a red car"}, k=5)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == server.store.info.model_fingerprint
    assert [hit["uri"] for hit in answer.json["answers"][0]["hits"]] == [None] * 5


def test_queries_of_all_kinds_are_answered_together(server):
    image = (server.source / "pictures" / "0000.png").read_bytes()
    vector = server.store.encode_text(["two cats"])[0].tolist()
    answer = server.search(
        {"text": "two cats"},
        {"vector": vector},
        {"image": base64.b64encode(image).decode()},
        {"item": "pictures/0000.png"},
        k=3,
    )
    assert answer.status == 200, answer.body
    assert ids(answer, 0) == ids(answer, 1)
    assert ids(answer, 2)[0] == ids(answer, 3)[0] == "pictures/0000.png"
    assert [page["query"] for page in answer.json["answers"]] == [
        {"text": "two cats"},
        {"vector": None},
        {"image": None},
        {"item": "pictures/0000.png", "segment": 0},
    ]


def test_an_upload_in_a_form_is_searched_with(server):
    image = (server.source / "pictures" / "0001.png").read_bytes()
    body, kind = form({"queries": [{"upload": "photo"}], "k": 1}, photo=image)
    answer = server.post("/search", body, kind)
    assert answer.status == 200, answer.body
    assert ids(answer) == ["pictures/0001.png"]
    assert answer.json["answers"][0]["query"] == {"upload": "photo"}
    missing = server.post("/search", *form({"queries": [{"upload": "other"}]}, photo=image))
    assert (missing.status, missing.error["where"]) == (422, "body.queries.0.upload")


def test_a_query_that_was_asked_before_is_remembered(server):
    def hits():
        lines = server.get("/metrics").body.decode().splitlines()
        return [line for line in lines if line.startswith('embedder_cache_hits_total{cache="answers"}')]

    server.search({"text": "something new"}, k=2)
    before = float(hits()[0].split()[1])
    again = server.search({"text": "something new"}, k=2)
    assert float(hits()[0].split()[1]) == before + 1
    assert ids(again) == [hit.item_id for hit in server.store.search("something new", k=2)]


def test_answers_name_addresses_that_answer(server):
    for hit in server.search({"text": "two cats"}, k=20).json["answers"][0]["hits"]:
        is_video = hit["start_s"] is not None
        for link in (hit["links"]["item"], hit["links"]["image"], *([hit["links"]["clip"]] if is_video else [])):
            assert server.get(link).status == 200, link
        assert is_video or hit["links"]["clip"] is None


def test_a_text_that_cannot_be_encoded_harms_no_other_query_of_its_batch(server):
    publication = ServedPublication(server.store, is_current=True, show_uris=False)
    batch = [Asked(publication, None, {}, text=text) for text in ("two cats", "", "a car")]
    found = BatchSearcher(Metrics())(batch)
    assert isinstance(found[1], RequestError)
    assert np.allclose([found[0], found[2]], server.store.encode_text(["two cats", "a car"]), atol=1e-5)
    assert server.search({"text": "\x1f"}).status == 422


def test_an_index_that_was_altered_is_no_mistake_of_a_query():
    def fail(given):
        raise RetrievalError("/srv/store/words: it was altered, by its sha256; build it again")

    found = compute_together(fail, ["two cats", "a car"])
    assert [type(each) for each in found] == [RetrievalError] * 2, "which are answered as any file that can't be read"
