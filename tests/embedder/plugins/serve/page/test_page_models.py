"""Two models side by side in the search page: each side answers with the model of its own publication."""

import shutil
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pyarrow as pa
import pytest
import samples
from browser_waits import wait_for_answers
from model_stores import add_model, label_row, vector_row
from playwright.sync_api import expect
from running_server import running
from search_stores import picture, searchable, towards
from tiny_models import tiny_config

import embedder
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

pytestmark = pytest.mark.medium

PAGE = 40  # results that are asked for at once
WORDS = "a red car"
LIKE = "shop:pictures/004"
DIM, OTHER_DIM = 24, 16


@pytest.fixture(scope="module")
def two_models(page_config, tmp_path_factory):
    """A copy of the store whose second publication is of another model, and narrower; its two publications."""
    folder = tmp_path_factory.mktemp("models")
    config = page_config.model_copy(update={"store": str(folder / "store"), "model": str(folder / "model")})
    shutil.copytree(page_config.store, config.store)
    before = embedder.open_store(config.store)
    model = tiny_config().model_copy(update={"embedding_dim": OTHER_DIM})
    init_model(model, Path(config.model), seed=5, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    embedder.refresh(config, forced=("retrieval", "vectors"))
    after = embedder.open_store(config.store)
    assert [each.encode_text([WORDS]).shape[1] for each in (before, after)] == [DIM, OTHER_DIM]
    return after, before


@pytest.fixture(scope="module")
def models_url(two_models, tmp_path_factory):
    """Address of a server over it."""
    with running(two_models[0].files.address, cache_dir=tmp_path_factory.mktemp("cache")) as url:
        yield url


def captions(page, side):
    """Captions of the first page of results of a side."""
    tiles = page.locator(f"{side} .grid .tile:not(.skeleton)")
    expect(tiles.first).to_be_visible()
    expect(page.locator(f"{side} .grid[aria-busy]")).to_have_count(0)
    return tiles.locator(".words").all_inner_texts()[:PAGE]


def expected(store, *query, **options):
    """What the publication finds in this process."""
    return [hit.caption or hit.item_id for hit in store.search(*query, k=PAGE, **options)]


def test_each_side_answers_by_its_own_model(open_page, models_url, two_models):
    after, before = two_models
    page = open_page(f"{models_url}/?q={WORDS.replace(' ', '+')}&vs={before.current.run_id}")
    wait_for_answers(page, 2)
    found = [captions(page, side) for side in ("#left", "#right")]
    assert found == [expected(each, WORDS) for each in (after, before)]
    assert found[0] != found[1], "else the test could not distinguish the models"
    names = [f"model {each.info.model_fingerprint[:8]}" for each in (after, before)]
    assert names[0] != names[1]
    for side, name in zip(("#left", "#right"), names, strict=True):
        expect(page.locator(f"{side} .side-model")).to_have_text(name)
        assert name in page.locator(f"{side}-version option:checked").inner_text()
    expect(page.locator("#summary")).to_contain_text(f"{names[0]} and {names[1]}: compare ranks, not scores")
    page.goto("about:blank")


def test_an_image_and_an_item_are_searched_with_by_each_model(open_page, models_url, two_models, tmp_path):
    image = samples.image_bytes(7)
    (tmp_path / "query.png").write_bytes(image)
    page = open_page(f"{models_url}/?vs={two_models[1].current.run_id}")
    page.set_input_files("#file", tmp_path / "query.png")
    wait_for_answers(page, 2)
    found = [captions(page, side) for side in ("#left", "#right")]
    assert found == [expected(each, image=image) for each in two_models]
    page.goto(f"{models_url}/?like={LIKE.replace(':', '%3A').replace('/', '%2F')}&vs={two_models[1].current.run_id}")
    wait_for_answers(page, 2)
    assert [captions(page, side)[0] for side in ("#left", "#right")] == [f"{samples.SENTENCES[4]} 4"] * 2
    assert captions(page, "#left") != captions(page, "#right")
    page.goto("about:blank")


def test_what_is_opened_on_a_side_is_of_its_publication(open_page, models_url, two_models):
    after, before = two_models
    page = open_page(f"{models_url}/?q=car&vs={before.current.run_id}")
    wait_for_answers(page, 2)
    ids = [{hit.item_id for hit in each.search("car", k=PAGE)} for each in two_models]
    item_id = min(each for each in ids[0] & ids[1] if each.startswith("shop:pictures"))
    for side, store in (("#left", after), ("#right", before)):
        with page.expect_response(lambda answer: "neighbours=" in answer.url) as asked:
            page.locator(f"{side} .tile-link[href*='item={quote(item_id, safe='')}']").click()
        assert asked.value.json()["version"] == store.version
        expect(page.locator("#item .near").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#item")).to_be_hidden()
    assert "side=" not in page.url
    page.goto("about:blank")


def test_one_model_is_not_called_two(open_page, models_url, two_models):
    run_id = two_models[0].current.run_id
    page = open_page(f"{models_url}/?q=car&vs={run_id}")
    wait_for_answers(page, 2)
    expect(page.locator("#summary")).to_contain_text("on both sides")
    expect(page.locator("#summary")).not_to_contain_text("model")
    page.goto("about:blank")


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    """Three pictures; the further model `clip` orders them the other way round, `labels` has no vectors."""
    folder = tmp_path_factory.mktemp("further")
    names = ["a.png", "b.png", "c.png"]
    store = searchable(folder / "store", *(picture(name, 10 * n) for n, name in enumerate(names)), index=False)
    add_model(store.files, "clip", *(vector_row(name, towards(20 - 10 * n)) for n, name in enumerate(names)))
    add_model(store.files, "labels", *map(label_row, names), has_vectors=False, top=pa.array(["cat", "dog", "cat"]))
    with running(store.files.address, cache_dir=folder / "cache") as url:
        yield url


def found_items(page):
    tiles = page.locator("#left .grid .tile:not(.skeleton) .tile-link")
    expect(tiles.first).to_be_visible()
    expect(page.locator("#left .grid[aria-busy]")).to_have_count(0)
    return [parse_qs(urlsplit(each.get_attribute("href")).query)["item"][0] for each in tiles.all()]


def test_a_further_model_is_chosen_and_stands_in_the_address(open_page, further):
    page = open_page(f"{further}/?like=a.png")
    wait_for_answers(page, 1)
    choice = page.get_by_label("Model")
    expect(choice.locator("option")).to_have_text(["main", "clip"])  # not the one without vectors
    by_main = found_items(page)
    with page.expect_response(lambda answer: answer.url.endswith("/search")) as asked:
        choice.select_option("clip")
    assert asked.value.json()["version"].endswith("/clip exact")
    assert "model=clip" in page.url
    assert sorted(found_items(page)) == sorted(by_main)
    page.go_back()
    expect(choice).to_have_value("")
    page.goto("about:blank")


def test_a_model_that_is_not_there_is_told_and_another_can_be_chosen(open_page, further):
    page = open_page(f"{further}/?like=a.png&model=clp")
    expect(page.locator("#left .results")).to_contain_text("No model 'clp'")
    page.get_by_label("Model").select_option("clip")
    expect(page.locator("#left .grid .tile-link").first).to_be_visible()
    page.goto("about:blank")


def test_a_store_of_one_model_offers_no_choice(open_page, models_url):
    page = open_page(f"{models_url}/?q=car")
    wait_for_answers(page, 1)
    expect(page.locator("#store")).to_contain_text("items")
    expect(page.get_by_label("Model")).to_be_hidden()
    page.goto("about:blank")


def test_words_in_a_picture_are_marked(open_page, page_config, tmp_path):
    store = shutil.copytree(page_config.store, tmp_path / "store")
    files = embedder.open_store(str(store)).files
    (item,) = [row for row in embedder.open_store(str(store)).to_arrow().to_pylist() if row["item_id"] == LIKE]
    lines, boxes = (
        ["Open daily", "营业时间", "a redder car"],
        [[0.1, 0.2, 0.6, 0.4], [0.0, 0.5, 0.5, 0.75], [0.0, 0.8, 1.0, 1.0]],
    )
    add_model(
        files,
        "ocr",
        label_row(LIKE, content_version=item["content_version"]),
        has_vectors=False,
        words=pa.array(["\n".join(lines)]),
        lines=pa.array([lines]),
        boxes=pa.array([boxes], pa.list_(pa.list_(pa.float32()))),
        scores=pa.array([[0.9, 0.9, 0.9]]),
    )
    with running(str(store), cache_dir=tmp_path / "cache") as url:
        page = open_page(f"{url}/?q={quote('OPEN 时间 red')}&item={quote(LIKE)}")
        marks = page.locator(".word-mark")
        expect(marks).to_have_count(2)
        assert [mark.get_attribute("title") for mark in marks.all()] == lines[:2]
        expect(page.locator(".facts")).to_contain_text("ocr.words")
        expect(page.locator(".facts")).not_to_contain_text("ocr.boxes")
        image, mark = page.locator(".still").evaluate("each => [each.naturalWidth, each.naturalHeight]"), marks.first
        page.wait_for_function("document.querySelector('.word-marks').clientWidth > 50")
        layer, box = page.locator(".word-marks").bounding_box(), mark.bounding_box()
        assert layer["width"] / layer["height"] == pytest.approx(image[0] / image[1], rel=0.02), "only over the image"
        assert (box["x"] - layer["x"]) / layer["width"] == pytest.approx(0.1, abs=0.01)
        assert box["height"] / layer["height"] == pytest.approx(0.2, abs=0.01)
