"""`embedder search`: several queries, conditions and the rest, as tables and as JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
from model_stores import add_model, code_section, vector_row
from PIL import Image
from search_stores import QUERY, picture, searchable, towards, video
from served import make_store
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import ConfigError, StoreError
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
    folder = tmp_path_factory.mktemp("command")
    config, _ = make_store(folder, tiny_model, num_images=6, num_clips=0)
    return Path(config.store)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """Images and a video whose vectors are known, with a file of queries."""
    folder = tmp_path_factory.mktemp("vectors")
    rows = [*(picture(f"{n}.png", 10 * n) for n in range(4)), *video("v.mp4", 50, 60, 70)]
    searchable(folder / "s", *rows, price=[float(n) for n in range(7)])
    np.save(folder / "one.npy", QUERY)
    np.save(folder / "two.npy", np.stack([QUERY, towards(90)]))
    np.save(folder / "bytes.npy", np.zeros((2, len(QUERY)), np.uint8))
    np.savez(folder / "several.npz", one=QUERY)
    (folder / "half.zip").write_bytes((folder / "several.npz").read_bytes()[:100])
    head = (folder / "one.npy").read_bytes()
    (folder / "vast.npy").write_bytes(head.replace(b"(%d,)" % len(QUERY), b"(%d,)" % (1 << 50)))
    return folder


def test_one_query_keeps_its_keys(texts, ask):
    found = ask(texts, "a red car", "-k", 2)
    assert (found["query"], found["image"], len(found["hits"])) == ("a red car", None, 2)
    assert {"score", "item_id", "segment", "modality", "uri", "caption", "carryover"} <= found["hits"][0].keys()


def test_several_texts_are_answered_at_once_each_as_alone(texts, ask):
    found = ask(texts, "a red car", "two cats", "-k", 3)
    assert found.keys() == {"results", "sheet", "out", "copies"}
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


def test_hits_in_the_order_of_a_column(vectors, ask):
    found = ask(vectors / "s", "--vector", vectors / "one.npy", "-k", 3, "--sort", "price desc")["hits"]
    prices = [hit["carryover"]["price"] for hit in found]
    assert prices == sorted(prices, reverse=True)
    assert prices != [
        hit["carryover"]["price"] for hit in ask(vectors / "s", "--vector", vectors / "one.npy", "-k", 3)["hits"]
    ]


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
    "no query": ([], "what to search with: give a text"),
    "only examples": (["--not", "red"], "what to search with: give a text"),
    "two kinds": (["red", "--vector", "{one}"], "or only --vector FILE.npy"),
    "an image and a vector": (["--image", "{one}", "--vector", "{one}"], "or only --vector FILE.npy"),
    "a weight of no image": (["red", "--text-weight", "0.3"], "is the share of a text next to an --image"),
    "a weight of no example": (["red", "--not-weight", "0.3"], "--not-weight is for --not and --not-image"),
    "a weight above 1": (["red", "--not", "blue", "--not-weight", "2"], "not_weight is 2.0; give a number from 0 to 1"),
    "two texts and three images": (["a", "b", *["--image", "{one}"] * 3], "2 texts and 3 images"),
    "no vectors": (["--vector", "{store}/CURRENT.json"], "numpy.save"),
    "an archive of vectors": (["--vector", "{folder}/several.npz"], "it holds no plain array"),
    "half an archive": (["--vector", "{folder}/half.zip"], "it holds no plain array"),
    "more vectors than there are bytes": (["--vector", "{folder}/vast.npy"], "it holds no plain array"),
    "vectors of bytes": (["--vector", "{folder}/bytes.npy"], "it holds bytes, as pictures are; give floats"),
    "words of a vector": (["--vector", "{one}", "--hybrid"], "search with a text"),
    "a sheet of another format": (["red", "--sheet", "x.gif"], "--sheet x.gif: its suffix is .gif"),
    "a sheet in no folder": (["red", "--sheet", "{store}/no/x.png"], "make it first: mkdir -p"),
    "hits of another format": (["red", "--out", "x.xlsx"], "known are .csv, .parquet, .jsonl"),
    "copies into the folder here": (["red", "--copy", "."], "copies .: it is where the command runs"),
    "copies into a full folder": (["red", "--copy", "{store}"], "it holds files already"),
    "a cosine above 1": (["red", "--fold", "98"], "fold is 98.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, vectors, ask):
    arguments, message = MISTAKES[mistake]
    places = {"one": vectors / "one.npy", "store": vectors / "s", "folder": vectors}
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        ask(vectors / "s", *(argument.format(**places) for argument in arguments))
    assert message in str(caught.value)


@pytest.mark.medium
def test_a_text_and_an_image_are_searched_with_together(texts, ask):
    image = texts.parent / "in" / "pictures" / "0004.png"
    found = ask(texts, "a red car", "--image", image, "-k", 6)
    assert (found["query"], found["image"], found["not"]) == ("a red car", str(image), [])
    wanted = open_store(texts).search("a red car", image=image, k=6)
    assert [hit["item_id"] for hit in found["hits"]] == [hit.item_id for hit in wanted]
    assert ask(texts, "a red car", "--image", image, "--text-weight", 0)["hits"][0]["item_id"] == "pictures/0004.png"
    several = ask(texts, "a red car", "two cats", "--image", image, "-k", 1)["results"]
    assert [(each["query"], each["image"]) for each in several] == [("a red car", str(image)), ("two cats", str(image))]


@pytest.mark.medium
def test_examples_are_no_hits_and_are_named(texts, ask):
    image = texts.parent / "in" / "pictures" / "0001.png"
    found = ask(texts, "a red car", "--not", "a bird", "--not", "a dog", "--not-image", image, "-k", 9)
    assert (found["not"], found["not_image"]) == (["a bird", "a dog"], [str(image)])
    wanted = open_store(texts).search("a red car", not_text=["a bird", "a dog"], not_image=image, k=9)
    assert [hit["item_id"] for hit in found["hits"]] == [hit.item_id for hit in wanted]
    assert "pictures/0001.png" not in [hit["item_id"] for hit in found["hits"]]
    assert len(found["hits"]) == 5


@pytest.mark.medium
def test_a_sheet_shows_every_query_and_its_image(texts, ask, tmp_path):
    image = texts.parent / "in" / "pictures" / "0001.png"
    shown = ask(texts, "a red car", "two cats", "--image", image, "-k", 4, "--sheet", tmp_path / "a.jpg", as_json=False)
    assert f"contact sheet: {tmp_path / 'a.jpg'}" in shown
    with Image.open(tmp_path / "a.jpg") as both:
        assert (both.format, both.width) == ("JPEG", 896)
        height = both.height
    ask(texts, "a red car", "-k", 4, "--sheet", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as alone:
        assert alone.width < 896, "without an image there are four cells, not five"
        assert height > 1.8 * alone.height


def test_hits_are_written_as_a_table_and_their_files_are_copied(texts, ask, tmp_path):
    outputs = ("--out", tmp_path / "hits.jsonl", "--copy", tmp_path / "files")
    found = ask(texts, "a red car", "-k", 2, *outputs)
    assert (found["out"], found["copies"]["num_files"]) == (str(tmp_path / "hits.jsonl"), 2)
    rows = [json.loads(line) for line in (tmp_path / "hits.jsonl").read_text().splitlines()]
    assert [row["item_id"] for row in rows] == [hit["item_id"] for hit in found["hits"]]
    assert {path.name[:4] for path in (tmp_path / "files").iterdir()} == {"001-", "002-", "hits"}
    ask(texts, "a red car", "two cats", "-k", 2, "--out", tmp_path / "hits.csv")
    assert (tmp_path / "hits.csv").read_text().startswith("query_number,query,rank,")


@pytest.mark.medium
def test_a_hit_whose_file_is_gone_fails_the_command_and_the_others_are_copied(tiny_model, tmp_path, run_embedder):
    config, source = make_store(tmp_path, tiny_model, num_images=3, num_clips=0, captions=False)
    (source / "pictures" / "0001.png").unlink()
    code, _, stderr = run_embedder("search", "a car", "--store", config.store, "--copy", tmp_path / "out")
    assert code == 1
    assert "1 of 3 items could not be copied; hits.csv there says why" in stderr
    assert "0001.png" in stderr
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_a_mistake_exits_with_2_and_nothing_found_with_0(vectors, run_embedder):
    options = ("--store", vectors / "s", "--vector", vectors / "one.npy")
    code, _, stderr = run_embedder("search", *options, "--where", "prise < 3")
    assert (code, len(stderr.strip().splitlines())) == (2, 1)
    code, found, _ = run_embedder("search", *options, "--where", "false", "--json")
    assert (code, found["hits"]) == (0, [])


@pytest.mark.medium
def test_a_notebook_shows_a_heading_for_each_query(texts):
    html = open_store(texts).search(["a <red> car", "two cats"], k=2)._repr_html_()
    assert html.count("<img") == 4
    assert html.index("a &lt;red&gt; car</h4>") < html.index("two cats</h4>")
    assert "none of 6" in open_store(texts).search("a car", where="false")._repr_html_()


def test_code_of_a_store_runs_by_the_configuration_that_has_it_or_with_leave(tmp_path, ask):
    store = searchable(tmp_path / "s", *(picture(f"{n}.png", 10 * n) for n in range(4)), index=False)
    rows = [vector_row(f"{n}.png", towards(30 * n)) for n in range(4)]
    add_model(store.files, "own", *rows, section=code_section(tmp_path))
    asked = ("upwards", "--model", "own", "-k", 1)
    with pytest.raises(StoreError, match="--config FILE"):
        ask(tmp_path / "s", *asked)
    assert not (tmp_path / "ran").exists()
    assert ask(tmp_path / "s", *asked, "--allow-store-code")["hits"][0]["item_id"] == "3.png"
    (tmp_path / "ran").unlink()
    (tmp_path / "run.toml").write_text(
        """
[[model]]
uri = "nowhere"

[[model]]
name = "own"
kind = "python"
uri = "own.py:Upwards"
inputs = { text = { make = "text" } }
outputs = { text_embedding = { type = "float32", shape = [2] } }
"""
    )
    assert ask(tmp_path / "s", *asked, "--config", tmp_path / "run.toml")["hits"][0]["item_id"] == "3.png"
    with pytest.raises(ConfigError, match="--allow-store-code is for a store that is opened here"):
        CliRunner().invoke(
            app, ["search", "upwards", "--server", "http://127.0.0.1:1", "--allow-store-code"], catch_exceptions=False
        )
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "\n# changed")
    with pytest.raises(StoreError, match="its fingerprint is"):
        ask(tmp_path / "s", *asked, "--config", tmp_path / "run.toml")
