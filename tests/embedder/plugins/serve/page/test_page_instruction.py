"""The page's field of an instruction: there where the model takes one, searched with, and in the address."""

import pytest
from playwright.sync_api import expect
from running_server import running
from served import make_instructed_store

import embedder

pytestmark = pytest.mark.medium

OWN, OTHER, WORDS = "Find pictures.", "two birds", "a red car"


@pytest.fixture(scope="module")
def instructed(tiny_model, tmp_path_factory):
    """Address of a service whose model's prompt has a place for an instruction, and its store."""
    folder = tmp_path_factory.mktemp("instructed")
    made, _ = make_instructed_store(folder, tiny_model, OWN)
    with running(made.store, cache_dir=folder / "cache") as url:
        yield url, embedder.open_store(made.store)


def scores_of(answer):
    return [round(hit["score"], 5) for hit in answer.json()["answers"][0]["hits"]]


def test_words_are_searched_with_the_instruction_of_the_field(open_page, instructed):
    url, store = instructed
    store_scores = {
        each: [round(hit.score, 5) for hit in store.search(WORDS, k=40, instruction=each)] for each in (None, OTHER)
    }
    page = open_page(f"{url}/?q={WORDS.replace(' ', '+')}")
    expect(page.locator("#left .grid .tile-link").first).to_be_visible()
    page.reload()  # the first text has shown the service what its model takes
    page.locator("#refine summary").click()
    field = page.locator("#instruction")
    expect(field).to_have_attribute("placeholder", OWN)
    with page.expect_response(lambda answer: answer.url.endswith("/search")) as asked:
        field.fill(OTHER)
        field.press("Enter")
    assert scores_of(asked.value) == store_scores[OTHER] != store_scores[None]
    assert "instruction=two+birds" in page.url
    page.goto("about:blank")


def test_a_model_that_takes_none_has_no_field(open_page, url):
    page = open_page(f"{url}/?q=car")
    expect(page.locator("#left .grid .tile-link").first).to_be_visible()
    page.reload()
    page.locator("#refine summary").click()
    expect(page.locator("#not")).to_be_visible()
    expect(page.locator("#instruction")).to_be_hidden()
    page.goto("about:blank")


def test_a_link_with_an_instruction_is_searched_without_where_the_model_takes_none(open_page, url):
    page = open_page(f"{url}/?q=car&instruction=Find+birds")
    expect(page.locator("#left .grid .tile-link").first).to_be_visible()
    page.locator("#refine summary").click()
    expect(page.locator("#instruction")).to_be_disabled()
    expect(page.locator("#instruction")).to_have_value("Find birds")
    expect(page.locator("#instruction")).to_have_attribute("title", "This model takes no instruction")
    page.goto("about:blank")


def test_a_link_with_an_instruction_is_searched_without_it_until_the_status_answers(open_page, instructed):
    url, store = instructed
    plain, other = (
        [round(hit.score, 5) for hit in store.search(WORDS, k=40, instruction=each)] for each in (None, OTHER)
    )
    page = open_page(url)
    page.route("**/status", lambda route: route.fulfill(status=500))
    link = f"{url}/?q={WORDS.replace(' ', '+')}&instruction={OTHER.replace(' ', '+')}"
    with page.expect_response(lambda answer: answer.url.endswith("/search")) as asked:
        page.goto(link)
    expect(page.locator("#left .grid .tile-link").first).to_be_visible()
    assert scores_of(asked.value) == plain != other
    page.unroute("**/status")
    with page.expect_response(lambda answer: answer.url.endswith("/search")) as asked:
        page.evaluate("dispatchEvent(new Event('online'))")
    assert scores_of(asked.value) == other
    page.goto("about:blank")
