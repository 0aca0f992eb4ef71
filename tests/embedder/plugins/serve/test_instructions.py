"""Instructions of queries at the service, in Python, on the command line and on the page: one path, kept apart."""

import numpy as np
import pytest
from command_runs import run_here
from running_server import running
from served import Served, make_instructed_store

import embedder
from embedder.errors import ArgumentTypeError, ConfigError

OWN, OTHER = "Find pictures.", "two birds"
TEXT = "a red car"


@pytest.fixture(scope="module")
def instructed(tiny_model, tmp_path_factory):
    """A service whose model's prompt has a place for an instruction."""
    folder = tmp_path_factory.mktemp("instructed")
    made, files = make_instructed_store(folder, tiny_model, OWN)
    with running(made.store, cache_dir=folder / "cache") as url:
        yield Served(url, made, files)


def scores(hits):
    return {hit.item_id: round(hit.score, 5) for hit in hits}


def served_scores(answer):
    assert answer.status == 200, answer.body
    return {hit["item_id"]: round(hit["score"], 5) for hit in answer.json["answers"][0]["hits"]}


def test_the_same_hits_by_all_ways_and_others_without(instructed):
    store = instructed.store
    plain, other = scores(store.search(TEXT, k=20)), scores(store.search(TEXT, k=20, instruction=OTHER))
    assert plain == scores(store.search(TEXT, k=20, instruction=f" {OWN} "))
    assert plain != other
    for _ in range(2):  # the second time from the cache
        assert served_scores(instructed.search({"text": TEXT}, k=20)) == plain
        assert served_scores(instructed.search({"text": TEXT}, k=20, instruction="  ")) == plain
        assert served_scores(instructed.search({"text": TEXT}, k=20, instruction=OTHER)) == other
    remote = embedder.connect(instructed.url)
    assert scores(remote.search(TEXT, k=20, instruction=OTHER)) == other
    assert np.allclose(remote.encode_text([TEXT], OTHER), store.encode_text([TEXT], OTHER), atol=1e-6)
    for place in (["--store", instructed.config.store], ["--server", instructed.url]):
        found = run_here("search", TEXT, "-k", 20, "--instruction", OTHER, *place, "--json").found
        assert {hit["item_id"]: round(hit["score"], 5) for hit in found["hits"]} == other


def test_texts_beside_a_picture_and_examples_have_it_too(instructed):
    store, item = instructed.store, "pictures/0001.png"
    query = {"text": TEXT, "item": item, "not": [{"text": "green apples"}]}
    found = [served_scores(instructed.search(query, k=20, **given)) for given in ({}, {"instruction": OTHER})]
    assert found[0] != found[1]
    image = instructed.source / item.rpartition("/")[2]
    if image.is_file():
        hits = store.search(TEXT, image=image, not_text="green apples", k=20, instruction=OTHER)
        assert scores(hits).keys() == found[1].keys()


def test_a_cursor_is_of_its_instruction(instructed):
    cursor = instructed.search({"text": TEXT}, k=2, instruction=OTHER).json["answers"][0]["cursor"]
    assert instructed.search({"text": TEXT}, k=2, instruction=OTHER, cursor=cursor).status == 200
    assert instructed.search({"text": TEXT}, k=2, cursor=cursor).error["where"] == "body.cursor"


def test_status_names_the_models_own_instruction(instructed, server):
    instructed.search({"text": TEXT})
    server.search({"text": TEXT})
    assert instructed.get("/status").json["instruction"] == OWN
    assert server.get("/status").json["instruction"] is None


def test_what_takes_none_says_so(instructed, server):
    refused = server.search({"text": TEXT}, instruction=OTHER)
    assert (refused.status, refused.error["where"]) == (422, "query")
    assert "the model of this store takes none" in refused.error["what"]
    assert server.get("/readyz").status == 200, "a refused instruction is no failure of the encoder"
    with pytest.raises(ConfigError, match="it takes no instruction of queries; leave it out"):
        server.store.search(TEXT, instruction=OTHER)
    refused = instructed.search({"item": "pictures/0001.png"}, instruction=OTHER)
    assert (refused.status, refused.error["where"]) == (422, "body.queries.0.item")
    with pytest.raises(ConfigError, match="an instruction stands before a text"):
        instructed.store.search(image=instructed.source / "x.png", instruction=OTHER)
    with pytest.raises(ConfigError, match="instruction '': it is empty"):
        instructed.store.search(TEXT, instruction="")
    with pytest.raises(ConfigError, match="instruction: with what stands around it, it fills the 32 tokens"):
        instructed.store.search(TEXT, instruction="car " * 400)
    ended = run_here("search", "--image", "x.png", "--instruction", OTHER, "--store", instructed.config.store)
    assert ended.code == 2
    assert "--instruction stands before a text" in ended.stderr
    body = {"images": [{"image": "AAAA"}], "instruction": OTHER}
    assert instructed.post("/embed", body).status == 422


@pytest.mark.parametrize("given", ["", "  ", 5, ["x"], "car " * 400])
def test_an_instruction_that_is_none_or_has_no_room_is_refused(instructed, given):
    refused = instructed.post("/embed", {"texts": [TEXT], "instruction": given})
    assert refused.status == 422, refused.body
    assert refused.error["what"]
    for ask in (instructed.store.encode_text, lambda texts, each: instructed.store.search(texts, instruction=each)):
        with pytest.raises((ConfigError, ArgumentTypeError), match="instruction"):
            ask([TEXT], given)
    if isinstance(given, str):
        ended = run_here("search", TEXT, "--instruction", given, "--store", instructed.config.store)
        assert ended.code == 2
        assert "instruction" in ended.stderr


def test_an_instruction_of_the_model_leaves_room_for_a_query(instructed):
    address = f"{instructed.config.model}#query_instruction={'car ' * 400}"
    store = embedder.open_store(instructed.config.store, model=address)
    with pytest.raises(ConfigError, match="query_instruction: with what stands around it, it fills the 32 tokens"):
        store.search(TEXT)
    store = embedder.open_store(instructed.config.store, model=f"{instructed.config.model}#query_instruction={OTHER}")
    assert scores(store.search(TEXT, k=20)) == scores(instructed.store.search(TEXT, k=20, instruction=OTHER))
