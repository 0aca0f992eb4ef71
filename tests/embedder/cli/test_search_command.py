"""`embedder search`: several queries, conditions and the rest, as tables and as JSON."""

import json
import threading

import numpy as np
import pytest
import samples
from search_stores import QUERY, picture, searchable, towards, video
from typer.testing import CliRunner

from embedder.cli import app
from embedder.ingest.embed import embed
from embedder.retrieval.store_api import open_store


@pytest.fixture
def ask():
    """Runs a search in this process; gives the JSON, or the text for a person."""

    def run(store, *arguments, as_json=True):
        options = ["--store", str(store), *(["--json"] if as_json else [])]
        result = CliRunner().invoke(app, ["search", *map(str, arguments), *options])
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout.splitlines()[-1]) if as_json else result.stdout

    return run


@pytest.fixture(scope="module")
def texts(tiny_model, tmp_path_factory):
    """A store of a real, tiny model: six images, three of them with captions."""
    from embedder.config import load_config

    folder = tmp_path_factory.mktemp("command")
    source = samples.folder(folder / "in", num_images=6)
    settings = {"model": str(tiny_model), "store": str(folder / "s"), "source": [{"path": str(source)}]}
    embed(load_config(overrides=settings | {"engine": "local"}))
    return folder / "s"


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """Images and a video whose vectors are known, with a file of queries."""
    folder = tmp_path_factory.mktemp("vectors")
    rows = [*(picture(f"{n}.png", 10 * n) for n in range(4)), *video("v.mp4", 50, 60, 70)]
    searchable(folder / "s", *rows, price=[float(n) for n in range(7)])
    np.save(folder / "one.npy", QUERY)
    np.save(folder / "two.npy", np.stack([QUERY, towards(90)]))
    return folder


def test_one_query_keeps_its_keys(texts, ask):
    found = ask(texts, "a red car", "-k", 2)
    assert (found["query"], found["image"], len(found["hits"])) == ("a red car", None, 2)
    assert {"score", "item_id", "segment", "modality", "uri", "caption", "carryover"} <= found["hits"][0].keys()


def test_several_texts_are_answered_at_once_each_as_alone(texts, ask):
    found = ask(texts, "a red car", "two cats", "-k", 3)
    assert found.keys() == {"results", "sheet"}
    assert [each["query"] for each in found["results"]] == ["a red car", "two cats"]
    for each in found["results"]:
        alone = ask(texts, each["query"], "-k", 3)["hits"]
        assert [hit["item_id"] for hit in each["hits"]] == [hit["item_id"] for hit in alone]
    shown = ask(texts, "a red car", "two cats", "-k", 3, as_json=False)
    assert shown.count("score") == 2
    assert shown.index("a red car") < shown.index("two cats")


def test_several_images_find_themselves(texts, ask):
    images = [texts.parent / "in" / "pictures" / f"{number:04d}.png" for number in (1, 4)]
    found = ask(texts, "--image", images[0], "--image", images[1], "-k", 1)["results"]
    assert [each["hits"][0]["item_id"] for each in found] == ["pictures/0001.png", "pictures/0004.png"]
    assert [each["image"] for each in found] == [str(path) for path in images]


def test_words_of_captions_count_with_hybrid(texts, ask):
    hits = ask(texts, "an old book", "--hybrid", "-k", 6)["hits"]
    assert [(hit["item_id"], hit["words_rank"]) for hit in hits if hit["words_rank"]] == [("pictures/0004.png", 1)]
    assert "#1" in ask(texts, "an old book", "--hybrid", "-k", 6, as_json=False)


def test_a_condition_and_vectors_of_a_file(vectors, ask):
    found = ask(vectors / "s", "--vector", vectors / "two.npy", "-k", 2, "--where", "price BETWEEN 1 AND 3")
    assert [[hit["item_id"] for hit in each["hits"]] for each in found["results"]] == [
        ["1.png", "2.png"],
        ["3.png", "2.png"],
    ]
    assert ask(vectors / "s", "--vector", vectors / "one.npy", "-k", 1)["hits"][0]["carryover"] == {"price": 0.0}


def test_near_duplicates_and_segments(vectors, ask):
    one = ("--vector", vectors / "one.npy", "--fold", 0.98, "-k", 9)
    hits = ask(vectors / "s", *one)["hits"]
    assert [hit["item_id"] for hit in hits] == ["0.png", "2.png", "v.mp4"]
    assert hits[0]["duplicates"] == [["1.png", pytest.approx(0.985, abs=1e-3)]]
    assert [start_s for start_s, _, _ in hits[2]["segments"]] == [5.0, 10.0]
    shown = ask(vectors / "s", *one, as_json=False)
    assert "like it: 1.png" in shown
    assert "also at 5.0 s, 10.0 s" in shown
    assert len(ask(vectors / "s", "--vector", vectors / "one.npy", "--all-segments", "-k", 9)["hits"]) == 7


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [("--where", "price > 99", "none of 7 images and video segments fulfils the condition price > 99"),
     ("--min-score", "1", "none has a score of 1.0 or more; the best is -0.342")],
)  # fmt: skip
def test_nothing_found_is_one_line_that_says_why(vectors, ask, option, value, why):
    np.save(vectors / "away.npy", towards(180))
    shown = ask(vectors / "s", "--vector", vectors / "away.npy", option, value, as_json=False)
    assert shown.startswith("nothing found: ")
    assert why in shown
    assert len(shown.strip().splitlines()) == 1


MISTAKES = {
    "a condition": (["--vector", "{one}", "--where", "prise < 3"], "did you mean price?"),
    "no query": ([], "give one of the two"),
    "two kinds": (["red", "--vector", "{one}"], "give one of the two"),
    "no vectors": (["--vector", "{store}/CURRENT.json"], "numpy.save"),
    "words of a vector": (["--vector", "{one}", "--hybrid"], "search with a text"),
    "a sheet of two": (["red", "blue", "--sheet", "x.png"], "--sheet draws the hits of one query"),
    "a cosine above 1": (["red", "--fold", "98"], "fold is 98.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, vectors, ask):
    arguments, message = MISTAKES[mistake]
    places = {"one": vectors / "one.npy", "store": vectors / "s"}
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        ask(vectors / "s", *(argument.format(**places) for argument in arguments))
    assert message in str(caught.value)


def test_a_mistake_exits_with_2_and_nothing_found_with_0(vectors, run_embedder):
    options = ("--store", vectors / "s", "--vector", vectors / "one.npy")
    code, _, stderr = run_embedder("search", *options, "--where", "prise < 3")
    assert (code, len(stderr.strip().splitlines())) == (2, 1)
    code, found, _ = run_embedder("search", *options, "--where", "false", "--json")
    assert (code, found["hits"]) == (0, [])


def test_several_threads_encode_and_search_one_store(texts):
    image_file = texts.parent / "in" / "pictures" / "0003.png"
    queries = [{"query": "a red car", "hybrid": True}, {"query": "two cats"}, {"image": image_file}]
    expected = [[hit.item_id for hit in open_store(texts).search(**query, k=6)] for query in queries]
    store, found = open_store(texts), []
    start = threading.Barrier(6)

    def run(number):
        start.wait()
        found.append((number % 3, [hit.item_id for hit in store.search(**queries[number % 3], k=6)]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([*enumerate(expected)] * 2)


def test_a_notebook_shows_a_heading_for_each_query(texts):
    html = open_store(texts).search(["a <red> car", "two cats"], k=2)._repr_html_()
    assert html.count("<img") == 4
    assert html.index("a &lt;red&gt; car</h4>") < html.index("two cats</h4>")
    assert "none of 6" in open_store(texts).search("a car", where="false")._repr_html_()
