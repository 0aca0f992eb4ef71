"""Queries of several parts by HTTP: they find what the store finds, pages and remembered answers keep them apart."""

import base64

import pytest
import samples
from served import form

from embedder.plugins.serve.api_schema import MAX_EXAMPLES

IMAGE, OTHER = samples.image_bytes(0), samples.image_bytes(3)


def encoded(content):
    return base64.b64encode(content).decode()


def page(answer, number=0):
    assert answer.status == 200, answer.body
    return answer.json["answers"][number]


def ids(answer, number=0):
    return [hit["item_id"] for hit in page(answer, number)["hits"]]


@pytest.mark.medium
def test_parts_are_given_in_every_form_that_queries_have(server):
    by_bytes = {"text": "a bird", "image": encoded(OTHER), "not": [{"image": encoded(IMAGE)}]}
    by_item = {"text": "a bird", "item": "pictures/0003.png", "not": [{"item": "pictures/0000.png"}]}
    vector = server.store.encode_image([IMAGE])[0].tolist()
    by_vector = {"text": "a bird", "item": "pictures/0003.png", "not": [{"vector": vector}]}
    answer = server.search(by_bytes, by_item, by_vector, k=20)
    assert ids(answer, 0) == ids(answer, 1) == ids(answer, 2)
    assert "pictures/0000.png" not in ids(answer), "the example is no hit"
    asked = {"queries": [{"text": "a bird", "upload": "one", "not": [{"upload": "two"}]}], "k": 20}
    uploaded = server.post("/search", *form(asked, one=OTHER, two=IMAGE))
    assert ids(uploaded) == ids(answer)
    assert page(uploaded)["query"] == {"text": "a bird", "upload": "one", "not": [{"upload": "two"}]}


def test_the_answer_repeats_the_query_without_bytes(server):
    query = {"text": " a bird ", "image": encoded(OTHER), "not": [{"text": "x"}, {"vector": [1.0] + [0.0] * 23}]}
    assert page(server.search(query))["query"] == {
        "text": " a bird ", "image": None, "not": [{"text": "x"}, {"vector": None}],
    }  # fmt: skip


def test_pages_go_on_with_all_parts_and_a_cursor_is_of_them_all(server):
    query = {"text": "a red car", "item": "pictures/0001.png", "not": [{"text": "a bird"}]}
    whole = ids(server.search(query, k=20))
    found, cursor = [], None
    while cursor is not None or not found:
        answer = page(server.search(query, k=2, cursor=cursor))
        found += [hit["item_id"] for hit in answer["hits"]]
        cursor = answer["cursor"]
    assert found == whole
    first = page(server.search(query, k=2))["cursor"]
    others = [
        ({**query, "not": [{"text": "two birds"}]}, {}),
        ({**query, "not": []}, {}),
        ({**query, "not": [{"item": "pictures/0001.png"}]}, {}),
        ({"text": query["text"], "not": query["not"]}, {}),
        (query, {"text_weight": 0.4}),
        (query, {"not_weight": 0.4}),
    ]
    for other, options in others:
        refused = server.search(other, k=2, cursor=first, **options)
        assert (refused.status, refused.error["where"]) == (422, "body.cursor"), (other, options)


def test_remembered_answers_are_those_of_the_same_parts(server):
    base = {"text": "green apples", "item": "pictures/0002.png", "not": [{"text": "a bird"}]}
    variants = [
        (base, {}),
        (base, {"text_weight": 0.0}),
        (base, {"not_weight": 1.0}),
        ({**base, "not": [{"item": "pictures/0002.png"}]}, {}),
        ({**base, "not": []}, {}),
        ({"text": base["text"]}, {}),
    ]
    first = [page(server.search(query, k=20, **options)) for query, options in variants]
    again = [page(server.search(query, k=20, **options)) for query, options in variants]
    assert first == again
    scores = {tuple((hit["item_id"], hit["score"]) for hit in each["hits"]) for each in first}
    assert len(scores) == len(variants)


@pytest.mark.parametrize(
    ("query", "options", "where"),
    [
        ({"text": "a", "vector": [1.0]}, {}, "body.queries.0"),
        ({"text": "a", "item": "b", "image": "AAAA"}, {}, "body.queries.0"),
        ({"item": "b", "image": "AAAA"}, {}, "body.queries.0"),
        ({"not": [{"text": "a"}]}, {}, "body.queries.0"),
        ({"text": "a", "not": {"text": "b"}}, {}, "body.queries.0.not"),
        ({"text": "a", "not": ["b"]}, {}, "body.queries.0.not.0"),
        ({"text": "a", "not": [{}]}, {}, "body.queries.0.not.0"),
        ({"text": "a", "not": [{"text": " "}]}, {}, "body.queries.0.not.0.text"),
        ({"text": "a", "not": [{"text": "b", "item": "c"}]}, {}, "body.queries.0.not.0"),
        ({"text": "a", "not": [{"text": "b", "not": [{"text": "c"}]}]}, {}, "body.queries.0.not.0.not"),
        ({"text": "a", "not": [{"text": "b"}] * (MAX_EXAMPLES + 1)}, {}, "body.queries.0.not"),
        ({"text": "a", "not": [{"image": "%%"}]}, {}, "body.queries.0.not.0.image"),
        ({"text": "a", "not": [{"upload": "none"}]}, {}, "body.queries.0.not.0.upload"),
        ({"text": "a", "not": [{"vector": [1.0]}]}, {}, "body.queries.0.not.0.vector"),
        ({"text": "a", "away": [{"text": "b"}]}, {}, "body.queries.0.away"),
        ({"text": "a"}, {"text_weight": 1.1}, "body.text_weight"),
        ({"text": "a"}, {"not_weight": -1}, "body.not_weight"),
        ({"text": "a"}, {"not_weight": "half"}, "body.not_weight"),
        ({"image": encoded(IMAGE), "not": [{"text": "a"}]}, {"hybrid": True}, "body.queries.0.image"),
        ({"text": "a", "not": [{"text": "a"}]}, {"not_weight": 1}, "query"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_refused_in_its_place(server, query, options, where):
    answer = server.search(query, **options)
    assert answer.status == 422, answer.body
    assert answer.error["where"] == where, answer.error
    assert server.search({"text": "a car"}, k=1).status == 200


def test_an_unknown_item_and_no_image_among_the_examples_are_refused(server):
    for example, refusal in (({"item": "nothing"}, (404, "item")), ({"image": encoded(b"no image")}, (422, "image"))):
        answer = server.search({"text": "a", "not": [example]})
        assert (answer.status, answer.error["where"]) == refusal


def test_other_queries_of_a_request_keep_their_answers(server):
    plain = {"text": "a red car"}
    answer = server.search(plain, {**plain, "not": [{"item": "pictures/0001.png"}]}, plain, k=20)
    alone = server.search(plain, k=20)
    assert ids(answer, 0) == ids(answer, 2) == ids(alone)
    assert "pictures/0001.png" not in ids(answer, 1)


def test_several_examples_share_what_a_text_leaves(server):
    """Two equal images weigh as much as one, and a second image counts."""
    one = ids(server.search({"text": "a red car", "image": encoded(IMAGE)}))
    twice = {"text": "a red car", "image": encoded(IMAGE), "also": [{"image": encoded(IMAGE)}]}
    assert ids(server.search(twice)) == one
    item = one[-1]
    both = server.search({"item": one[0], "also": [{"item": item}]}, k=2)
    assert set(ids(both)) == {one[0], item}
    assert page(both)["query"] == {"item": one[0], "segment": 0, "also": [{"item": item, "segment": 0}]}
    too_many = server.search({"text": "a", "also": [{"text": "b"}] * (MAX_EXAMPLES + 1)})
    assert (too_many.status, too_many.error["where"]) == (422, "body.queries.0.also")


def test_hits_come_in_another_order_on_request(server):
    hits = ids(server.search({"text": "a red car"}, k=4))
    assert ids(server.search({"text": "a red car"}, k=4, sort="name")) == sorted(hits), "the best four, by their names"
    assert server.search({"text": "a red car"}, sort="colour").status == 422
