"""Searches by HTTP find what the store finds in process."""

import base64

import numpy as np
import samples

from embedder.plugins.serve.search_batch import Asked, BatchSearcher
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.served_publication import ServedPublication


def ids(answer, number=0):
    return [hit["item_id"] for hit in answer.json["answers"][number]["hits"]]


def test_a_text_finds_what_the_store_finds_with_scores_captions_and_times(server):
    answer = server.search({"text": "a red car"}, k=5)
    assert answer.status == 200, answer.body
    expected = server.store.search("a red car", k=5)
    (page,) = answer.json["answers"]
    assert page["query"] == {"text": "a red car"}
    assert answer.json["version"] == expected.version
    assert answer.json["model"] == server.store.info.model_fingerprint
    for hit, other in zip(page["hits"], expected, strict=True):
        assert abs(hit["score"] - other.score) < 1e-5
        for name in ("item_id", "segment", "modality", "caption", "start_s", "end_s", "carryover"):
            assert hit[name] == getattr(other, name), name
        assert hit["uri"] is None, "the server does not show where files lie"


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
    body, kind = form(request=b'{"queries": [{"upload": "photo"}], "k": 1}', photo=image)
    answer = server.post("/search", body, kind)
    assert answer.status == 200, answer.body
    assert ids(answer) == ["pictures/0001.png"]
    assert answer.json["answers"][0]["query"] == {"upload": "photo"}
    missing = server.post("/search", *form(request=b'{"queries": [{"upload": "other"}]}', photo=image))
    assert (missing.status, missing.error["where"]) == (422, "body.queries.0.upload")


def form(**parts):
    """A form as browsers send it: its body and its type."""
    boundary = "boundary7"
    lines = []
    for name, content in parts.items():
        head = f'Content-Disposition: form-data; name="{name}"' + ("" if name == "request" else '; filename="x"')
        lines.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n")
    return b"".join(lines) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def test_vectors_of_texts_and_images_are_those_of_the_store(server):
    texts = ["two cats", "a blue bird"]
    answer = server.post("/embed", {"texts": texts})
    assert answer.json["dim"] == 24
    assert np.allclose(answer.json["vectors"], server.store.encode_text(texts), atol=1e-5)
    image = samples.image_bytes(3)
    answer = server.post("/embed", {"images": [{"image": base64.b64encode(image).decode()}]})
    assert np.allclose(answer.json["vectors"], server.store.encode_image([image]), atol=1e-5)
    refused = server.post("/embed", {"texts": texts, "images": []})
    assert refused.status == 422


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
